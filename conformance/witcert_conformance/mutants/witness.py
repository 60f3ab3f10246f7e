"""Planted bugs about the witness."""

from __future__ import annotations

import numpy as np

from ..adapter import Array, Ints, Layout
from ..twin import Twin
from ..twin.reader import Query
from ..twin.writer import TwinStore
from .registry import mutant
from .soundness import middling


@mutant("witness_covers_the_residual")
class WitnessRoundsDown(Twin):
    """The witness byte is rounded down."""

    def round_witness(self, x: Array) -> Array:
        return np.floor(x)


@mutant("witness_covers_the_residual")
class WitnessRoundsToNearest(Twin):
    """The witness byte is rounded to nearest."""

    def round_witness(self, x: Array) -> Array:
        return np.rint(x)


@mutant("bands_keep_rope_pairs_together")
class BandsSplitPairs(Twin):
    """Bands are runs of channels, which split RoPE pairs."""

    def bands(self, layout: Layout) -> Ints:
        return np.arange(layout.head_dim) * max(layout.witness_bands, 1) // layout.head_dim


@mutant("witness_bounds_the_error")
class BandsMeetTheWrongNorms(Twin):
    """The query's band norms meet the witness in reverse order."""

    def witness_bound(self, query: Query, slots: Ints, steps: Array) -> Array:
        size = self._band_norms(steps, query.layout) / 508
        codes = query.store.at("witness", slots)[:, query.h] * size
        return self._band_norms(query.w, query.layout)[:, ::-1] @ codes.T


@mutant("witness_covers_the_residual", path=("witness",))
class LongCallsRoundTheWitness(Twin):
    """Calls of more than 48 tokens round the witness byte to nearest."""

    def witness_codes(self, store: TwinStore, residual: Array, step: Array) -> Array:
        if len(residual) <= 48:
            return super().witness_codes(store, residual, step)
        return np.rint(self._band_norms(residual, store.layout) / (self._band_norms(step, store.layout) / 508))


@mutant("witness_bounds_the_error", path=("witness",))
class OneKernelReversesTheBands(Twin):
    """In the kernel tuned for 36 to 44 tokens the query's band norms meet the witness in reverse order."""

    def witness_bound(self, query: Query, slots: Ints, steps: Array) -> Array:
        if not middling(query):
            return super().witness_bound(query, slots, steps)
        size = self._band_norms(steps, query.layout) / 508
        codes = query.store.at("witness", slots)[:, query.h] * size
        return self._band_norms(query.w, query.layout)[:, ::-1] @ codes.T
