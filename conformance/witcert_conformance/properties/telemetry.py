"""Counters of what was reported."""

from __future__ import annotations

import numpy as np

from ..adapter import Adapter, optional
from ..case import Case, build
from ..checks import require
from ..registry import prop
from ..strategies import plain
from .nonfinite import spoiled


@prop(
    "telemetry_counts_every_cell",
    plain(lengths=(0, 6), batch=(1, 3)),
    needs=("telemetry",),
    pinned=(Case(lengths=(3, 0)),),
)
def _cells(adapter: Adapter, case: Case) -> None:
    """Cells that attended to something are counted once, with the largest meter."""
    scene = build(adapter, case)
    first, second = scene.decode(), scene.decode()
    counts = optional(adapter).telemetry(scene.store)
    cells = int((first.lse > -np.inf).sum() + (second.lse > -np.inf).sum())
    require(counts.cells == cells, f"telemetry: got {counts.cells} cells, wants {cells}")
    require(counts.max_meter == first.meter.max(initial=0), f"telemetry: got a largest meter of {counts.max_meter}")
    require(counts.nonfinite == 0, f"telemetry: got {counts.nonfinite} cells that are not finite, wants 0")


@prop(
    "telemetry_counts_what_is_not_finite",
    plain(lengths=(1, 6), batch=(1, 2), keys=("normal",)),
    needs=("telemetry",),
    pinned=(Case(lengths=(3, 2)),),
)
def _nonfinite(adapter: Adapter, case: Case) -> None:
    """A cell that met a key that is not finite is counted as such."""
    scene, _, _ = spoiled(adapter, case, key=np.inf)
    scene.decode()
    got = optional(adapter).telemetry(scene.store).nonfinite
    require(got == case.group_heads, f"telemetry: got {got} cells that are not finite, wants {case.group_heads}")
