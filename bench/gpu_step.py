"""What does a decode step cost besides its kernels: plan, graph, telemetry?

    python bench/gpu_step.py [--smoke]

A row a shape. On the device, with a cold L2: the planned decode, the same with telemetry, and without a plan. On the
host, microseconds from one call to the next in a row of calls that wait for nothing: eager without and with a plan, and
as a graph's replay. Writes ``gpu_step.json`` and ``gpu_step.svg``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from common import SMOKE, Problem, Shape, arguments, captured, collect, device, device_ms, plot

from witcert_kernels import Telemetry

SHAPES = [Shape(1, 32, 8, 4096), Shape(8, 32, 8, 32768), Shape(64, 32, 8, 4096)]


def host_us(function: Callable[[], object], calls: int) -> float:
    """Microseconds a call, the device's end of the last one included."""
    function()
    if not SMOKE:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        function()
    if not SMOKE:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls * 1e6


def measure(shape: Shape) -> dict[str, Any]:
    """One shape."""
    problem, telemetry = Problem(shape), Telemetry(device=device())
    splits = problem.plan.splits
    times = device_ms(
        {
            "planned": problem.decode,
            "telemetry": lambda: problem.decode(telemetry=telemetry),
            "unplanned": lambda: problem.decode(plan=None, splits=splits),
        }
    )
    calls = 1 if SMOKE else 200
    telemetry.reset()
    problem.decode(telemetry=telemetry)
    return {
        "batch": shape.batch, "length": shape.length, **times,
        "telemetry_adds": times["telemetry"] / times["planned"] - 1,
        "eager_us": host_us(lambda: problem.decode(plan=None, splits=splits), calls),
        "eager_planned_us": host_us(problem.decode, calls), "replay_us": host_us(captured(problem.decode), calls),
        "cells": telemetry.read().cells,
    }  # fmt: skip


def main() -> None:
    """Measure all shapes."""
    arguments(__doc__)
    rows = collect("gpu_step", [Shape(1, 4, 2, 64, dim=32, page=16)] if SMOKE else SHAPES, measure)
    names = ("eager_us", "eager_planned_us", "replay_us")
    lines = {name: [(float(r["batch"] * r["length"]), r[name]) for r in rows] for name in names}
    plot("gpu_step", "A step of 32 heads, from one call to the next", lines, "tokens read", "µs")


if __name__ == "__main__":
    main()
