"""The benchmarks for a GPU run from end to end on the interpreter, so that no typo waits for a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def environment(out: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "WITCERT_BACKEND")}
    return kept | {"OUT": str(out), "PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"}


def results(out: Path, name: str) -> list[dict[str, Any]]:
    document = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    assert document["environment"]["torch"]
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def test_the_check_runs_every_benchmark(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(BENCH / "gpu_check.sh"), "--smoke"], env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (decode,), (write,), (step,) = (results(tmp_path, name) for name in ("gpu_decode", "gpu_write", "gpu_step"))
    for name in ("sdpa", "bf16", "int8", "two_digits", "certified", "floor"):
        assert decode[name] > 0
    assert decode["value_error_holds"] and decode["bf16_agrees"] and decode["same_output"]
    assert 0 < decode["meter_max"] < 0.1
    assert write["bytes"] == 16 * 8 * (4 * 32 + 2 * 32 + 2 * 2 + 1) and write["ratio"] > 0
    assert step["cells"] == 4 and step["replay_us"] > 0
    conformance = json.loads((tmp_path / "gpu_conformance.json").read_text(encoding="utf-8"))
    assert [outcome["verdict"] for outcome in conformance["outcomes"]] == ["passed", "passed"]
    names = ("gpu_decode", "gpu_write", "gpu_step")
    log = (tmp_path / "gpu_check.log").read_text(encoding="utf-8")
    for name in ("gpu_conformance", *names):
        assert f"== {name}\n" in done.stdout and f"== {name}\n" in log
    wanted = {
        "gpu_check.log",
        "gpu_conformance.json",
        *(f"{name}.{kind}" for name in names for kind in ("json", "svg")),
    }
    assert {path.name for path in tmp_path.iterdir()} == wanted and all(x.stat().st_size for x in tmp_path.iterdir())


def test_tuning_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu_tune.py"), "--smoke"]
    subprocess.run(command, env=environment(tmp_path), capture_output=True, check=True)
    rows = results(tmp_path, "gpu_tune")
    assert rows[0]["options"] == "present" and rows[-1]["options"].startswith("together")
    assert all(row["ms"] is not None and row["ms"] > 0 for row in rows), rows


@pytest.mark.parametrize("command", [[sys.executable, "gpu_decode.py"], ["bash", "gpu_check.sh"]])
def test_without_a_device_they_say_so(command: list[str], tmp_path: Path) -> None:
    hidden = environment(tmp_path) | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [command[0], str(BENCH / command[1])], env=hidden, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "needs a CUDA device; --smoke runs tiny shapes without one" in done.stderr


def script(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Code that may import the modules of ``bench``."""
    paths = os.pathsep.join([str(BENCH), *sys.path])
    given = environment(tmp_path) | {"PYTHONPATH": paths}
    return subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False)


def test_a_case_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    code = """
from common import collect
def measure(n):
    if n == 2:
        raise RuntimeError("out of memory")
    return {"n": n}
assert collect("some", [1, 2, 3], measure, unit="ms") == [{"n": 1}, {"n": 3}]
collect("none", [2], measure)
"""
    done = script(code, tmp_path)
    assert done.returncode == 1 and done.stderr == "none: every case failed\n"
    assert "2: failed" in done.stdout and "RuntimeError: out of memory" in done.stdout
    document = json.loads((tmp_path / "some.json").read_text(encoding="utf-8"))
    assert document["unit"] == "ms" and document["rows"] == [{"n": 1}, {"n": 3}]
    assert document["errors"] == [{"case": "2", "error": "RuntimeError('out of memory')"}]


def test_results_are_there_after_each_case(tmp_path: Path) -> None:
    """A run that is stopped leaves the rows it has; neither git nor a repository is needed."""
    code = """
import os
os.environ["PATH"] = ""
from common import collect
def measure(n):
    if n == 2:
        os._exit(7)
    return {"n": n}
collect("some", [1, 2], measure)
"""
    assert script(code, tmp_path).returncode == 7
    document = json.loads((tmp_path / "some.json").read_text(encoding="utf-8"))
    assert document["rows"] == [{"n": 1}] and document["environment"]["commit"] == ""


def test_conformance_outlives_a_process_and_its_time(tmp_path: Path) -> None:
    """One whose process dies is an error, one that raises ends its process and no other, one too slow is left out."""
    code = """
import gpu_conformance as g, os, time
def work(tasks, results):
    os.setsid()
    for name in iter(tasks.get, None):
        results.put((os.getpid(), name, None))
        time.sleep(0.5)
        if name == "dies":
            os._exit(3)
        if name == "hangs":
            time.sleep(900)
        verdict = "error" if name == "raises" else "passed"
        results.put((os.getpid(), name, g.Outcome(name, verdict)))
        if verdict == "error":
            return
class Context:
    Process = staticmethod(__import__("multiprocessing").get_context("fork").Process)
    Queue = staticmethod(__import__("multiprocessing").get_context("fork").Queue)
g.multiprocessing.get_context = lambda kind: Context
g.work = work
began = time.monotonic()
found = {o.name: o.verdict for o in g.ask(["dies", "raises", "hangs", "a", "b"], 15.0, 2)}
assert found == {"dies": "error", "raises": "error", "hangs": "not run", "a": "passed", "b": "passed"}, found
assert time.monotonic() - began < 25
"""
    done = script(code, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "gpu_conformance.json").read_text(encoding="utf-8"))
    assert document["asked"] == 5 and len(document["outcomes"]) == 5
