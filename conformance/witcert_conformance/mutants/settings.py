"""Planted bugs about what a caller set elsewhere."""

from __future__ import annotations

import numpy as np

from ..adapter import Array
from ..twin import Twin
from ..twin.reader import Query
from .registry import mutant


@mutant("settings_change_nothing")
class ReducedPrecisionIsTakenUp(Twin):
    """Products are formed in float16 where the caller allows it elsewhere."""

    def dot(self, query: Query, codes: Array, steps: Array) -> Array:
        exact = super().dot(query, codes, steps)
        return exact.astype(np.float16).astype(np.float64) if self.reduced else exact
