"""The benchmarks for a GPU run from end to end on the interpreter, so that no typo waits for a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    for name in ("gpu_decode", "gpu_write", "gpu_step"):
        assert f"== {name}\n" in done.stdout and (tmp_path / f"{name}.svg").stat().st_size > 0


def test_tuning_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu_tune.py"), "--smoke"]
    subprocess.run(command, env=environment(tmp_path), capture_output=True, check=True)
    rows = results(tmp_path, "gpu_tune")
    assert rows[0]["options"] == "present" and rows[-1]["options"].startswith("together")
    assert all(row["ms"] > 0 for row in rows)


def test_without_a_device_they_say_so(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu_decode.py")]
    hidden = environment(tmp_path) | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "needs a CUDA device; --smoke runs tiny shapes without one" in done.stderr
