"""``release_check``: everything, on every implementation that this machine can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from . import kills
from .adapter import CAPABILITIES, Adapter, load
from .report import Run, write_report
from .runner import SCALES, Outcome, run_suite

SHIPPED = ("ref", "torch-cpu", "numba-cpu", "triton-interpret", "triton-cuda")

OPTIONAL: dict[str, frozenset[str]] = {
    "ref": frozenset({"gate", "telemetry", "binding", "settings", "refusals", "cuda_graphs"}),
    "torch-cpu": frozenset({"cuda_graphs"}),
    "numba-cpu": frozenset({"cuda_graphs"}),
    "triton-interpret": frozenset({"cuda_graphs"}),
    "triton-cuda": frozenset(),
}
"""Groups that a shipped implementation may leave out; the properties of all others are required of it."""


ALWAYS = frozenset({"ref", "torch-cpu"})
"""Shipped implementations that every machine can run: one that does not load is broken."""


def available(names: Sequence[str] = SHIPPED) -> tuple[dict[str, Adapter], dict[str, str]]:
    """``(adapters that load, why the others do not)``, by name."""
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = load(name)
        except ValueError as error:
            missing[name] = str(error)
    return found, missing


def release_check(
    implementations: Sequence[str] | None = None,
    *,
    profile: str = "release",
    seed: int = 0,
    report: Path | None = None,
    write: Callable[[str], None] = print,
) -> int:
    """Run all properties on each implementation; in the profile ``release`` first check the suite against planted bugs.

    Args:
        implementations: names as for ``--impl``; one that does not load fails the check. None: all shipped ones that
            this machine can run.
        profile: ``quick``, ``ci`` or ``release``.
        seed: of all draws.
        report: JSON file to write; HTML goes beside it.
        write: takes the lines of output.

    Returns:
        0 if every property that was asked passed for every implementation and each of ``ALWAYS`` loads, else 1.

    Raises:
        ValueError: another profile.
    """
    if profile not in SCALES:
        raise ValueError(f"profile: got {profile!r}, wants one of {', '.join(SCALES)}")
    unsure: list[str] = []
    if implementations is None and profile == "release":
        write("planted bugs")
        unsure = kills.broken(kills.load(), lambda name, by: write(f"  {name}: {', '.join(by)}"))
        write(
            f"  FAILED      {', '.join(unsure)}"
            if unsure
            else "  each rejected, for each property of kills.json one by it alone"
        )
    found, missing = available(SHIPPED if implementations is None else implementations)
    for name, reason in missing.items():
        write(f"{name}: not run, {reason}")
    runs: list[Run] = []
    lacking = sorted(ALWAYS & missing.keys())
    for name, adapter in found.items():
        info = adapter.info
        write(f"{name}: {info.name} {info.version} on {info.device}")

        def progress(outcome: Outcome) -> None:
            write(f"  {outcome.verdict:11} {outcome.name} ({outcome.examples} examples, {outcome.seconds:.1f} s)")
            if outcome.verdict in ("failed", "error"):
                write(f"{outcome.message}\n{outcome.reproduction}")

        outcomes = run_suite(adapter, name, profile=profile, root_seed=seed, progress=progress)
        runs.append(Run(name, adapter, profile, seed, tuple(outcomes)))
        dropped = CAPABILITIES.keys() - info.offers - OPTIONAL[name] if name in OPTIONAL else set()
        if dropped:
            lacking.append(name)
            write(f"  FAILED      {name} no longer offers {', '.join(sorted(dropped))}, which a release requires")
    if report is not None:
        write_report(report, runs)
        write(f"report: {report} and {report.with_suffix('.html')}")
    complete = not lacking and not unsure and (implementations is None or not missing)
    fine = bool(runs) and complete and all(run.passed for run in runs)
    write("conformance: passed" if fine else "conformance: FAILED")
    return 0 if fine else 1
