"""Which launch options suit the certified decode at one shape?

    python bench/gpu_tune.py [--smoke]

Milliseconds at (8, 32, 8, 32768) for split counts, tokens a tile, warps, stages and a limit on registers, one departure
from the present options at a time, then some that belong together, and the best of each. Writes ``gpu_tune.json``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from common import SMOKE, Problem, Shape, arguments, device_ms, table, write

from witcert_kernels import triton_reader, triton_tiles

CHOICES: dict[str, tuple[int, ...]] = {
    "splits": (4, 16, 32), "block_n": (32, 128), "num_warps": (2, 8), "num_stages": (2, 4), "maxnreg": (96, 168),
}  # fmt: skip
TOGETHER = [{"maxnreg": 168, "splits": 6}]  # three programs a multiprocessor, and no more than run at once
if SMOKE:
    CHOICES = {"splits": (1, 2), "block_n": (32,), "num_warps": (2,)}
    TOGETHER += [{"splits": 2, "block_n": 32}]


class Launch:
    """The read's kernel with some of its launch options replaced."""

    def __init__(self, kernel: Any, options: dict[str, int]) -> None:
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *args, **options: self.kernel[grid](*args, **{**options, **self.options})


def measure(problem: Problem, chosen: dict[str, int]) -> float:
    """Milliseconds with these options in place of the present ones."""
    launch = {name: value for name, value in chosen.items() if name not in ("splits", "block_n")}
    read, kernel = triton_tiles.Read, triton_reader._packed_kernel
    with (
        mock.patch.object(read, "block_n", chosen.get("block_n", read.block_n)),
        mock.patch.object(triton_reader, "_packed_kernel", Launch(kernel, launch)),
    ):
        plan = problem.make_plan(**{name: chosen[name] for name in ("splits",) if name in chosen})
        return device_ms({"decode": lambda: problem.decode(plan=plan)})["decode"]


def main() -> None:
    """One at a time, then together."""
    arguments(__doc__)
    problem = Problem(Shape(1, 4, 2, 64, dim=32, page=16) if SMOKE else Shape(8, 32, 8, 32768))
    rows: list[dict[str, Any]] = []

    def tried(name: str, chosen: dict[str, int]) -> float:
        """Milliseconds, Inf where the options do not fit."""
        try:
            ms = measure(problem, chosen)
        except Exception as error:  # more registers or shared memory than there are
            rows.append({"options": f"{name}: {type(error).__name__}", "ms": None})
            return float("inf")
        rows.append({"options": name, "ms": ms})
        return ms

    present = tried("present", {})
    best: dict[str, int] = {}
    for name, values in CHOICES.items():
        times = {value: tried(f"{name}={value}", {name: value}) for value in values}
        value = min(values, key=times.__getitem__)
        if times[value] < present:
            best[name] = value
    for chosen in (*TOGETHER, best):
        tried(f"together {chosen}", chosen)
    print(table(rows))
    print(write("gpu_tune", {"rows": rows, "best": best}))


if __name__ == "__main__":
    main()
