"""Every bound of an experiment's stores, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from experiments.intervals import share_of, spread
from experiments.result import Cell, Table, number
from experiments.synthetic import BOUNDS, TAU

Array = NDArray[np.float64]


def every_bound(header: tuple[str, ...], found: Mapping[tuple[Cell, ...], Mapping[str, Array]]) -> list[Table]:
    """Coverage by every bound, and each over the attained total variation; a row for each key, which comes first.

    found: values of all `BOUNDS`, [n] of independent samples or [prompts, cells].
    """

    def table(title: str, names: Sequence[str], show: Callable[[Array, Array], tuple[float | None, str]]) -> Table:
        shown = [(key, [show(values[name], values["attained"]) for name in names]) for key, values in found.items()]
        rows = [(*key, *(f"{number(value)} ({interval})" for value, interval in cells)) for key, cells in shown]
        return Table(f"Every bound: {title} (95 %)", (*header, *names), rows)

    def within(bound: Array, _: Array) -> tuple[float | None, str]:
        passed = bound <= TAU
        return share_of(passed) if passed.ndim == 1 else spread(passed.astype(float))

    def over(bound: Array, attained: Array) -> tuple[float | None, str]:
        return spread(np.divide(bound, attained, out=np.ones_like(bound), where=bound != attained), np.median)

    sound = [name for name in BOUNDS if name != "attained"]
    return [
        table(f"coverage at τ = {TAU}; no sound bound covers more than the attained", tuple(BOUNDS), within),
        table("median of bound over attained total variation", sound, over),
    ]
