"""What every benchmark shares: versions, times and files."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def environment() -> dict[str, Any]:
    """Machine, versions and commit of a run."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        import triton

        return {"device": torch.cuda.get_device_name(), "commit": commit, "triton": triton.__version__, **versions}
    return {
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "commit": commit,
        **versions,
    }


def interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, the functions taking turns, so that a slow spell of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - began)
    return times


def median_ms(times: list[float]) -> float:
    """Median in milliseconds."""
    return statistics.median(times) * 1e3


def write(name: str, document: dict[str, Any]) -> Path:
    """Write ``NAME.json`` to ``$OUT``, or to ``bench/results``."""
    folder = Path(os.environ.get("OUT") or HERE / "results")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **document}, indent=1) + "\n", encoding="utf-8")
    return path
