"""Does the implementation on CUDA keep its contract? The conformance suite's properties, many processes at once.

    python bench/gpu_conformance.py [--seconds 120] [--workers N] [--smoke]

Nearly every case is a layout of its own: its kernels take seconds to compile on one core and no time to run. So each
core asks one property after the other, its pinned cases and a few drawn ones. Every outcome is printed and written to
``gpu_conformance.json`` when it is there; what is not finished in time is listed as such. With --smoke, two properties
on Triton's interpreter. Ends with 1 unless every property that was asked passed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from common import SMOKE, write
from witcert_conformance import load
from witcert_conformance.registry import Property, properties
from witcert_conformance.runner import Outcome, run_property

IMPLEMENTATION = "triton-interpret" if SMOKE else "triton-cuda"
TINY = ("zero_groups_have_a_scale", "sm_scale_is_the_callers")
DRAWN = 0.05  # of the cases that the suite's profile ``ci`` draws


def ordered(known: dict[str, Property]) -> list[str]:
    """Properties that only a GPU can show, those that draw one large case, those with most cases: the longest first."""

    def key(name: str) -> tuple[bool, bool, float]:
        one = known[name]
        return not one.cuda, one.examples > 1, -len(one.pinned) - DRAWN * one.examples

    return sorted(TINY if SMOKE else known, key=key)


def work(tasks: Any, results: Any) -> None:
    """Ask properties until none is left, or one raises: the device may then be lost to this process."""
    os.setsid()  # so that what it starts ends with it
    adapter, known = load(IMPLEMENTATION), properties()
    for name in iter(tasks.get, None):
        results.put((os.getpid(), name, None))
        outcome = run_property(known[name], adapter, IMPLEMENTATION, profile="quick", shrink=False, budget=DRAWN)
        results.put((os.getpid(), name, outcome))
        if outcome.verdict == "error":
            return


def ask(names: list[str], seconds: float, workers: int) -> list[Outcome]:
    """Outcomes of the properties, those not finished in time included, each reported as it comes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else torch starts a thread a core in every process
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    end = time.monotonic() + seconds
    for name in names:
        tasks.put(name)
    for _ in range(workers):
        tasks.put(None)
    running: dict[int, Any] = {}
    asked: dict[int, str] = {}
    outcomes: dict[str, Outcome] = {}

    def start() -> None:
        process = context.Process(target=work, args=(tasks, results), daemon=True)
        process.start()
        running[process.pid or 0] = process

    def report(outcome: Outcome) -> None:
        outcomes[outcome.name] = outcome
        print(f"{outcome.verdict:11} {outcome.name} ({outcome.examples} cases, {outcome.seconds:.1f} s)", flush=True)
        if outcome.verdict in ("failed", "error"):
            print(f"{outcome.message}\n{outcome.reproduction}", flush=True)
        document = {"implementation": IMPLEMENTATION, "asked": len(names), "seconds": seconds, "workers": workers}
        write("gpu_conformance", {**document, "outcomes": [asdict(one) for one in outcomes.values()]})

    try:
        for _ in range(workers):
            start()
        while len(outcomes) < len(names) and running and time.monotonic() < end:
            try:
                pid, name, outcome = results.get(timeout=0.5)
            except queue.Empty:
                for pid in [pid for pid, process in running.items() if not process.is_alive()]:
                    code = running.pop(pid).exitcode
                    name = asked.pop(pid, "")
                    if name:
                        report(Outcome(name, "error", message=f"its process ended with {code}"))
                    if len(outcomes) + len(asked) < len(names) and code != 0:
                        start()
                continue
            if outcome is None:
                asked[pid] = name
            else:
                asked.pop(pid, None)
                report(outcome)
                if outcome.verdict == "error":
                    running.pop(pid, None)
                    start()
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    for name in names:
        if name not in outcomes:
            report(Outcome(name, "not run", message="not finished in time"))
    return list(outcomes.values())


def main() -> None:
    """Ask and sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="until what is not finished is given up")
    parser.add_argument("--workers", type=int, default=max(1, min(15, (os.cpu_count() or 2) - 1)), help="processes")
    parser.add_argument("--smoke", action="store_true", help="two properties on Triton's interpreter, no GPU")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an end that also ends the processes
    try:
        info = load(IMPLEMENTATION).info
    except ValueError as error:
        raise SystemExit(f"{error}; --smoke asks two properties without one") from error
    print(f"{info.name} {info.version} on {info.device}: {info.versions}", flush=True)
    outcomes = ask(ordered(properties()), options.seconds, 1 if SMOKE else options.workers)
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    for outcome in outcomes:
        if outcome.verdict not in ("passed", "not offered"):
            print(f"{outcome.verdict:11} {outcome.name}: {(outcome.message.strip().splitlines() or [''])[-1]}")
    sys.exit(0 if all(outcome.verdict in ("passed", "not offered") for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
