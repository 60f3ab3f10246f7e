"""Planted bugs about reconstructions of any scheme."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Array, Decoded, Ints, Mask
from ..twin import Twin
from ..twin.reader import Part, Query, weight
from .registry import mutant


@mutant("reconstructions_are_read_untouched")
class SketchTouchesTheScheme(Twin):
    """The sketch is subtracted from a black-box scheme's logits, as the packed store's is."""

    def capped(self, query: Query, raw: Array, bias: Array) -> Array:
        if query.store.observatory and query.layout.sketch and raw.shape[1]:
            n = int(query.read.seq_lens[query.b])
            if raw.shape[1] == n:
                slots = self.slots(query, np.arange(n))
                unit = query.store.at("sketch_scale", slots)[:, query.h]
                unit = np.where(np.isfinite(unit), unit, 0)
                raw = raw - self.sm_scale(query) * (query.a @ (self.stored_sketch(query, slots) * unit).T)
        return super().capped(query, raw, bias)


@mutant("one_part_meter_of_a_scheme", path=("observatory", "witness", "equaliser"))
class WitnessMeetsTheRawQuery(Twin):
    """Band norms of q meet a witness in equalised coordinates."""

    def observatory_bound(self, query: Query, part: Array, witness: Array) -> Array:
        return super().observatory_bound(query, query.q if part is query.z else part, witness)


@mutant("one_part_meter_of_a_scheme")
class ValuesOfASchemeAreFree(Twin):
    """The values' own error is left out of a scheme's value bound."""

    def values(self, query: Query, slots: Ints) -> tuple[Array, Array, Mask]:
        v_hat, rho, lost = super().values(query, slots)
        return v_hat, np.zeros_like(rho) if query.store.observatory else rho, lost


@mutant("two_part_meter_of_a_scheme")
class KnownPartUnderTheWrongSoftmax(Twin):
    """The known part's moments are taken under softmax(y)."""

    def known_base(self, y: Array, r: Array) -> Array:
        return y


@mutant("two_part_meter_of_a_scheme")
class KnownPartIsFree(Twin):
    """What the sketch knows is not accounted at all."""

    def known_variance(self, e2: Array, e1: Array) -> Array:
        return np.zeros_like(e2)


@mutant("two_part_meter_of_a_scheme")
class CorrectedBoundForTheUncorrectedLogit(Twin):
    """The one-part meter uses the bound of the corrected logit."""

    def observatory_bound(self, query: Query, part: Array, witness: Array) -> Array:
        return super().observatory_bound(query, query.w, witness)


@mutant("two_part_meter_under_a_cap")
class KnownPartIgnoresTheCap(Twin):
    """r is the raw correction, not what it does through the cap."""

    def known_part(self, query: Query, slots: Ints, raw: Array, exact: Mask, witness: Array) -> tuple[Array, Array]:
        return super().known_part(replace(query, read=replace(query.read, soft_cap=0.0)), slots, raw, exact, witness)


@mutant("two_part_meter_merges")
class KnownPartMergesByTheFirstWeights(Twin):
    """The known part's sums are merged by the weights of softmax(y)."""

    def merge(self, x: Part, y: Part) -> Part:
        both = super().merge(x, y)
        if x.sums is None or y.sums is None:
            return both
        top = both.moments.m
        return replace(both, sums=x.sums * weight(x.moments.m, top) + y.sums * weight(y.moments.m, top))


@mutant("observatory_writer")
class FloatWitnessRoundsToNearest(Twin):
    """The fp16 witness is rounded to nearest."""

    def round_norm(self, norm: Array) -> Array:
        return norm.astype(np.float16)


@mutant("observatory_writer")
class WitnessSaturates(Twin):
    """A norm beyond fp16 is stored as its largest number."""

    def round_norm(self, norm: Array) -> Array:
        return np.minimum(super().round_norm(norm), np.float16(65504))


@mutant("reconstructions_are_read_untouched")
class LseOfTheSecondSet(Twin):
    """Without a cap or a sink, lse is that of the corrected logits, which only the meter may use."""

    def finish(self, query: Query, part: Part) -> Decoded:
        report, known = super().finish(query, part), part.known
        if known is None or query.read.soft_cap or query.read.sinks is not None:
            return report
        return replace(report, lse=known.m + np.log(known.l))


@mutant("two_part_meter_of_a_scheme", path=("observatory", "witness", "sketch"))
class PlainKnownPartIsFree(Twin):
    """Without a cap, a sink or splits, what the sketch knows is not accounted at all."""

    def known_part(self, query: Query, slots: Ints, raw: Array, exact: Mask, witness: Array) -> tuple[Array, Array]:
        r, c = super().known_part(query, slots, raw, exact, witness)
        return np.zeros_like(r), c
