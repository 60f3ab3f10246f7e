"""Planted bugs about counters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Decoded, Mask
from ..twin import Twin
from ..twin.writer import TwinStore
from .registry import mutant


@mutant("telemetry_counts_every_cell")
class TelemetryCountsEmptyRows(Twin):
    """Rows without tokens are counted."""

    def count(self, store: TwinStore, decoded: Decoded) -> None:
        super().count(store, decoded)
        store.counts = replace(store.counts, cells=store.counts.cells + int((decoded.lse == -np.inf).sum()))


@mutant("telemetry_counts_what_is_not_finite")
class TelemetryMissesNaN(Twin):
    """Cells that met a lost key are not counted as such."""

    def nonfinite(self, decoded: Decoded) -> Mask:
        return np.isnan(decoded.meter)
