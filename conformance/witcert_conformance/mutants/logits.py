"""Planted bugs about sinks, soft cap and bias."""

from __future__ import annotations

import numpy as np

from ..adapter import Array, Ints, Mask
from ..twin import Twin
from ..twin.reader import Part, Query
from .registry import mutant


@mutant("sinks_are_in_the_denominator")
class SinkLeftOut(Twin):
    """The sink is not in the denominator."""

    def sink_parts(self, query: Query, parts: int) -> list[Part]:
        return []


@mutant("sinks_count_once")
class SinkOncePerSplit(Twin):
    """Every split adds the sink."""

    def sink_parts(self, query: Query, parts: int) -> list[Part]:
        return super().sink_parts(query, parts) * max(query.read.splits or 1, 1)


@mutant("soft_cap_is_on_the_logit")
class CapOnTheBound(Twin):
    """The soft cap is applied to c."""

    def bound(self, query: Query, slots: Ints, steps: Array) -> Array:
        return self.cap(query, super().bound(query, slots, steps))


@mutant("bias_is_inside_the_cap")
class BiasAfterTheCap(Twin):
    """The bias is added to the capped logit."""

    def capped(self, query: Query, raw: Array, bias: Array) -> Array:
        return self.cap(query, raw) + bias


@mutant("minus_infinity_masks")
class CapRevivesMaskedTokens(Twin):
    """A bias of −Inf goes through the cap and comes out finite."""

    def bias(self, query: Query, tokens: Ints) -> tuple[Array, Mask]:
        bias, kept = super().bias(query, tokens)
        return np.where(kept, bias, -1e9), np.ones_like(kept)


@mutant("sinks_are_in_the_denominator", path=("sinks",))
class SinkOnlyInOptionsOfMore(Twin):
    """The path with a sink and nothing else leaves it out."""

    def sink_parts(self, query: Query, parts: int) -> list[Part]:
        return []


@mutant("sinks_count_once", path=("sinks", "splits"))
class SinkOnceForEachOfAFewSplits(Twin):
    """Up to six splits are merged in registers, each with the sink."""

    def sink_parts(self, query: Query, parts: int) -> list[Part]:
        splits = query.read.splits or 1
        return super().sink_parts(query, parts) * (splits if splits <= 6 else 1)


@mutant("soft_cap_is_on_the_logit", path=("soft_cap",))
class PlainCapOnTheBound(Twin):
    """Without other options the soft cap is applied to c."""

    def bound(self, query: Query, slots: Ints, steps: Array) -> Array:
        return self.cap(query, super().bound(query, slots, steps))


@mutant("bias_is_inside_the_cap", path=("bias", "soft_cap"))
class FiniteBiasAfterTheCap(Twin):
    """A bias that masks nothing is added to the capped logit."""

    def capped(self, query: Query, raw: Array, bias: Array) -> Array:
        assert query.read.bias is not None
        if np.isinf(query.read.bias).any():
            return super().capped(query, raw, bias)
        return self.cap(query, raw) + bias


@mutant("sm_scale_is_the_callers")
class ScaleFollowsTheWidth(Twin):
    """The scale of a logit is 1/√d, whatever the caller says."""

    def sm_scale(self, query: Query) -> float:
        return float(np.float32(query.layout.head_dim**-0.5))


@mutant("terms_that_cancel")
class RoundingOfTheFinalLogit(Twin):
    """The rounding budget counts the final logit, not the terms that cancelled on the way."""

    def rounding(self, query: Query, y: Array, allowed: Mask) -> Array:
        return 2.0**-40 * (1 + np.abs(np.where(allowed, y, 0.0)).max(1, initial=0))
