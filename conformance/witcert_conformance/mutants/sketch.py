"""Planted bugs about the query sketch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Array, Calibration, Ints, Layout
from ..twin import Twin
from ..twin.reader import Query
from ..twin.writer import TwinStore
from .registry import mutant


@mutant("directions_stay_off_the_bypass")
class BypassChannelsInTheDirections(Twin):
    """Directions keep their part on bypass channels, and the residual there is what the codes lack: all of it."""

    def check_calibration(self, layout: Layout, calibration: Calibration | None) -> None:
        return

    def kept(self, store: TwinStore, k: Array) -> Array:
        self._last = k
        return super().kept(store, k)

    def residual(self, store: TwinStore, residual: Array) -> Array:
        wrong = self._bypassed(store) & (store.calibration.u != 0).any(1)
        return np.where(wrong, -self._last, super().residual(store, residual))


@mutant("sketch_codes_are_nearest")
class SketchTruncates(Twin):
    """Sketch codes are truncated toward zero."""

    def round_sketch(self, x: Array) -> Array:
        return np.trunc(x)


@mutant("sketch_is_subtracted")
class SketchAdded(Twin):
    """The sketch is added."""

    def correction(self, query: Query, slots: Ints, steps: Array) -> Array:
        return -super().correction(query, slots, steps)


@mutant("sketch_is_subtracted")
class SketchOfAnotherToken(Twin):
    """The sketch of the next token is subtracted."""

    def stored_sketch(self, query: Query, slots: Ints) -> Array:
        return np.roll(super().stored_sketch(query, slots), 1, 0)


@mutant("sketch_is_subtracted")
class SketchOfAnotherDirection(Twin):
    """Coordinates meet the coefficients of the next direction."""

    def stored_sketch(self, query: Query, slots: Ints) -> Array:
        return np.roll(super().stored_sketch(query, slots), 1, 1)


@mutant("sketch_error_is_in_the_bound")
class SketchRoundingForgotten(Twin):
    """The sketch codes' own rounding is left out of c."""

    def sketch_error(self, query: Query, steps: Array) -> Array:
        return np.zeros((len(query.rows), len(steps)))


@mutant("sketch_error_is_in_the_bound")
class DirectionsStayInTheBound(Twin):
    """The bound counts the whole query, also what the sketch corrected."""

    def inside(self, a: Array, u: Array) -> Array:
        return np.zeros((len(a), u.shape[1]))


@mutant("sketch_lives_in_equalised_coordinates")
class SketchInRawCoordinates(Twin):
    """Coordinates are taken of the residual of k, not of (k − mu)/f."""

    def sketch_codes(self, store: TwinStore, residual: Array, step: Array) -> Array:
        return np.clip(super().sketch_codes(store, residual * store.calibration.f, step), -127, 127)


def _after_cap(query: Query, x: Array, taken: Array) -> Array:
    """The logit whose cap is cap(x) − taken."""
    cap = query.read.soft_cap
    if not cap:
        return x - taken
    return cap * np.arctanh(np.clip((cap * np.tanh(x / cap) - taken) / cap, -1 + 1e-12, 1 - 1e-12))


@mutant("sketch_under_a_soft_cap")
class CorrectionAfterTheCap(Twin):
    """The sketch is subtracted from the capped logit."""

    def logits(self, query: Query, slots: Ints, tokens: Ints, steps: Array) -> Array:
        if not query.layout.sketch:
            return super().logits(query, slots, tokens, steps)
        taken = self.sm_scale(query) * self.correction(query, slots, steps)
        return _after_cap(query, super().logits(query, slots, tokens, steps) + taken, taken)


@mutant("sketch_codes_are_nearest", path=("sketch",))
class LongCallsTruncateTheSketch(Twin):
    """Calls of more than 48 tokens truncate sketch codes toward zero."""

    def sketch_codes(self, store: TwinStore, residual: Array, step: Array) -> Array:
        if len(residual) <= 48:
            return super().sketch_codes(store, residual, step)
        unit = self.sketch_unit(store.calibration.u[None], step)
        along = np.einsum("hrd,nhd->nhr", store.calibration.u, residual)
        return np.trunc(np.divide(along, unit, out=np.zeros_like(unit), where=unit > 0))


@mutant("sketch_is_subtracted", path=("sketch", "groups"))
class SketchUnitOfTheFirstGroup(Twin):
    """With channel groups, the sketch's unit is that of the first group's step."""

    def correction(self, query: Query, slots: Ints, steps: Array) -> Array:
        return super().correction(query, slots, np.broadcast_to(steps[:, :1], steps.shape))


@mutant("sketch_error_is_in_the_bound")
class RoundingOfFourDirections(Twin):
    """The codes' own rounding is counted for the first four directions."""

    def sketch_error(self, query: Query, steps: Array) -> Array:
        return super().sketch_error(replace(query, a=np.where(np.arange(query.a.shape[1]) < 4, query.a, 0.0)), steps)


@mutant("sketch_lives_in_equalised_coordinates", path=("sketch", "equaliser", "heads"))
class UnitOfAnotherKvHead(Twin):
    """From the third kv head on, the sketch's unit is formed with the first one's directions."""

    def correction(self, query: Query, slots: Ints, steps: Array) -> Array:
        u = query.store.calibration.u[query.h if query.h < 2 else 0, : query.layout.sketch]
        return query.a @ (self.stored_sketch(query, slots) * self.sketch_unit(u[None], steps)).T


@mutant("sketch_under_a_soft_cap", path=("sketch", "soft_cap"))
class PlainCorrectionAfterTheCap(Twin):
    """Without other options the sketch is subtracted from the capped logit."""

    def logits(self, query: Query, slots: Ints, tokens: Ints, steps: Array) -> Array:
        taken = self.sm_scale(query) * self.correction(query, slots, steps)
        return _after_cap(query, super().logits(query, slots, tokens, steps) + taken, taken)
