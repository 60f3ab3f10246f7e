"""Planted bugs about the read, its bound and its report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Array, Decoded, Ints, Mask
from ..twin import Twin
from ..twin.reader import Part, Query, Set
from ..twin.writer import TwinStore
from .registry import mutant


@mutant("logit_error_within_bound")
class WitnessInRawCoordinates(Twin):
    """The witness is the residual of k, not of (k − mu)/f."""

    def witness_codes(self, store: TwinStore, residual: Array, step: Array) -> Array:
        return np.minimum(super().witness_codes(store, residual * store.calibration.f, step), 255)


@mutant("lse_is_of_the_stored_keys")
class ScaleTwice(Twin):
    """sm_scale is applied twice."""

    def sm_scale(self, query: Query) -> float:
        return super().sm_scale(query) ** 2


@mutant("lse_is_of_the_stored_keys")
class LseInBase2(Twin):
    """lse is a base-2 logarithm."""

    def lse(self, query: Query, lse: Array) -> Array:
        return super().lse(query, lse) / np.log(2)


@mutant("output_is_attention")
class ValuesOfAnotherToken(Twin):
    """The values of a page are read one slot off, circularly."""

    def weighted(self, p: Array, v_hat: Array) -> Array:
        return p @ np.roll(v_hat, 1, 0)


@mutant("output_is_attention")
class WeightsUnderflow(Twin):
    """Weights are rounded to float16 with the value's scale folded in, and small ones underflow."""

    def weighted(self, p: Array, v_hat: Array) -> Array:
        size = np.abs(v_hat).max(1, initial=0, keepdims=True)
        unit = np.divide(v_hat, size, out=np.zeros_like(v_hat), where=size > 0)
        folded = np.asarray(p * size.T * 2.0**-14).astype(np.float16).astype(np.float64)
        return folded @ unit * 2.0**14


@mutant("lse_is_of_the_stored_keys")
class PaddedSlotsCount(Twin):
    """Slots past a sequence's end are attended to."""

    def split_tokens(self, n: int, splits: int, page_size: int) -> list[Ints]:
        parts = super().split_tokens(n, splits, page_size)
        return [np.arange(p[0], -(-(p[-1] + 1) // page_size) * page_size) if len(p) else p for p in parts]

    def mask(self, query: Query, tokens: Ints) -> Mask:
        return super().mask(query, tokens) | (tokens >= query.read.seq_lens[query.b])

    def bias(self, query: Query, tokens: Ints) -> tuple[Array, Mask]:
        if query.read.bias is None:
            return super().bias(query, tokens)
        return super().bias(query, np.minimum(tokens, query.read.bias.shape[2] - 1))


@mutant("meter_covers_worst_case")
class HalfStepOfAnotherToken(Twin):
    """c uses the step of the next token."""

    def half_step(self, query: Query, steps: Array) -> Array:
        return np.roll(super().half_step(query, steps), 1, 1)


@mutant("meter_covers_worst_case")
class SigmaFromTheUpperA1(Twin):
    """σ is taken from the upper a1, which makes it smaller."""

    def variance(self, a2_up: Array, a1_low: Array, a1_up: Array) -> Array:
        return super().variance(a2_up, a1_up, a1_up)


@mutant("meter_covers_worst_case")
class DispersionForm(Twin):
    """The flawed dispersion certificate: the spread of c, not c."""

    def meter_of(self, moments: Set, zeta: Array) -> tuple[Array, Array]:
        _, up = super().meter_of(moments, zeta)
        safe = np.maximum(moments.l, 1e-300)
        with np.errstate(all="ignore"):
            sigma = np.sqrt(np.maximum(moments.a2 / safe - np.square(moments.a1 / safe), 0))
            spread = np.exp(2 * moments.c_max) * (sigma + up * np.expm1(moments.c_max)) / 2
        return np.nan_to_num(spread, nan=1.0, posinf=1.0), up


@mutant("meter_covers_worst_case")
class VariancesAveraged(Twin):
    """Squared bounds are averaged before the exponential."""

    def moments(self, y: Array, c: Array, allowed: Mask) -> tuple[Set, Array]:
        moments, p = super().moments(y, c, allowed)
        total = np.maximum(moments.l, 1e-300)
        mean = np.sqrt((p * np.square(np.where(allowed, np.minimum(c, 1e100), 0))).sum(1) / total)
        with np.errstate(over="ignore"):
            rise = np.expm1(mean)
            return replace(moments, a1=moments.l * rise, a2=moments.l * np.square(rise), c_max=mean), p


@mutant("meter_is_useful")
class OnlyPhi(Twin):
    """The meter is phi alone."""

    def meter_of(self, moments: Set, zeta: Array) -> tuple[Array, Array]:
        _, up = super().meter_of(moments, zeta)
        with np.errstate(over="ignore"):
            return np.where(up <= 1, up / (1 + up), 1 / (1 + np.square(2 / (1 + up)))), up


@mutant("meter_is_useful")
class WholeStep(Twin):
    """c counts whole steps."""

    def half_step(self, query: Query, steps: Array) -> Array:
        return 2 * super().half_step(query, steps)


@mutant("meter_covers_half_a_million_cells")
class MeterInHalfPrecision(Twin):
    """The meter is kept in float16, rounded to nearest."""

    def stored_meter(self, meter: Array) -> Array:
        return meter.astype(np.float16).astype(np.float64)


@mutant("risk_is_log_a")
class RiskTruncated(Twin):
    """c is truncated in the risk, so that A fits."""

    def finish(self, query: Query, part: Part) -> Decoded:
        report = super().finish(query, part)
        assert report.risk is not None
        return replace(report, risk=np.where(np.isinf(report.risk), report.risk, np.minimum(report.risk, 2.0)))


@mutant("value_error_covers")
class ValueTermDropped(Twin):
    """Σ p̃ ρ is left out of the value bound."""

    def value_term(self, rho: Array) -> Array:
        return np.zeros_like(rho)


@mutant("value_error_is_useful")
class ValueBoundTwice(Twin):
    """The value bound's first term is counted twice."""

    def value_error(self, query: Query, meter: Array, part: Part, seen: Mask, safe: Array) -> Array:
        return super().value_error(query, 2 * meter, part, seen, safe)


@mutant("long_sequences")
class SecondTileForgetsTheMaximum(Twin):
    """Beyond 512 tokens a tile is added without rescaling to the running maximum."""

    def all_parts(self, query: Query) -> Part:
        n = int(query.read.seq_lens[query.b])
        if n <= 512 or query.read.splits:
            return super().all_parts(query)
        x, y = self.pool_part(query, np.arange(512)), self.pool_part(query, np.arange(512, n))
        top = np.maximum(x.moments.m, y.moments.m)
        return self.merge(replace(x, moments=replace(x.moments, m=top)), y)


@mutant("everything_together")
class SplitReadsTheFirstUnit(Twin):
    """With channel groups and several splits, the sketch unit is the first group's."""

    def correction(self, query: Query, slots: Ints, steps: Array) -> Array:
        if query.path == "decode" and (query.read.splits or 1) > 1 and query.layout.groups > 1:
            steps = np.broadcast_to(steps[:, :1], steps.shape)
        return super().correction(query, slots, steps)


class DigitTwin(Twin):
    """z in three balanced base-256 digits, each digit's dot exact, combined in floating point; the remainder apart."""

    def dot(self, query: Query, codes: Array, steps: Array) -> Array:
        if query.layout.groups > 1:
            return super().dot(query, codes, steps)
        unit = np.abs(query.z).max(1, keepdims=True) / 8355711
        whole = np.rint(np.divide(query.z, unit, out=np.zeros_like(query.z), where=unit > 0)).astype(np.int64)
        rest = (query.z - whole * unit) @ (codes * steps).T
        dots = []
        for _ in range(3):
            digit = (whole + 128) % 256 - 128
            dots.append(digit @ codes.astype(np.int64).T)
            whole = (whole - digit) // 256
        return self.combine(dots) * unit * steps[:, 0] + rest

    def combine(self, dots: list[Ints]) -> Array:
        """Σ 256^i dot_i."""
        return np.asarray(sum(dot.astype(np.float64) * 256.0**i for i, dot in enumerate(dots)))


@mutant("lse_is_of_the_stored_keys", DigitTwin)
class DigitsWrapInInt32(DigitTwin):
    """The digits' dots are combined in int32, which wraps."""

    def combine(self, dots: list[Ints]) -> Array:
        total = sum(dot * 256**i for i, dot in enumerate(dots))
        return ((np.asarray(total) + 2**31) % 2**32 - 2**31).astype(np.float64)


def middling(query: Query) -> bool:
    """Whether the sequence is in the range of lengths for which one tuned kernel is taken: 36 to 44 tokens."""
    return bool(36 <= query.read.seq_lens[query.b] <= 44)


def phi_of(part: Part) -> Array:
    """phi of merged moments, 0 where nothing is attended to."""
    a1 = part.moments.a1 / np.maximum(part.moments.l, 1e-300)
    with np.errstate(over="ignore", divide="ignore"):
        phi = np.where(a1 <= 1, a1 / (1 + a1), 1 / (1 + np.square(2 / (1 + a1))))
    return np.where(part.moments.l > 0, phi, 0.0)


@mutant("logit_error_within_bound", path=("groups", "witness", "equaliser"))
class GroupedWitnessInRawCoordinates(Twin):
    """With channel groups and an equaliser, the witness is the residual of k, not of (k − mu)/f."""

    def witness_codes(self, store: TwinStore, residual: Array, step: Array) -> Array:
        return np.minimum(super().witness_codes(store, residual * store.calibration.f, step), 255)


@mutant("meter_covers_worst_case", path=())
class OneKernelReportsTheDispersion(Twin):
    """The kernel tuned for 36 to 44 tokens reports the spread of c, not c."""

    def report_meter(self, query: Query, meter: Array, part: Part) -> Array:
        if not middling(query):
            return meter
        safe = np.maximum(part.moments.l, 1e-300)
        with np.errstate(all="ignore"):
            a1 = part.moments.a1 / safe
            sigma = np.sqrt(np.maximum(part.moments.a2 / safe - np.square(a1), 0))
            spread = np.exp(2 * part.moments.c_max) * (sigma + a1 * np.expm1(part.moments.c_max)) / 2
        return np.fmin(meter, spread)


@mutant("meter_is_useful", path=())
class OneKernelReportsPhi(Twin):
    """The kernel tuned for 36 to 44 tokens reports phi alone."""

    def report_meter(self, query: Query, meter: Array, part: Part) -> Array:
        return phi_of(part) if middling(query) else meter


@mutant("lse_is_of_the_stored_keys", path=())
class OneKernelKeepsTheSumInHalfPrecision(Twin):
    """The kernel tuned for 36 to 44 tokens keeps the sum whose logarithm it reports in float16."""

    def lse(self, query: Query, lse: Array) -> Array:
        if not middling(query):
            return super().lse(query, lse)
        top = np.floor(lse)
        return super().lse(query, top + np.log(np.exp(lse - top).astype(np.float16).astype(np.float64)))


@mutant("output_is_attention", path=())
class OneKernelReadsTheNextValue(Twin):
    """The kernel tuned for 36 to 44 tokens reads the values of a tile one slot off."""

    def values(self, query: Query, slots: Ints) -> tuple[Array, Array, Mask]:
        return super().values(query, np.roll(slots, 1) if middling(query) else slots)


@mutant("risk_is_log_a", path=())
class OneKernelReportsRiskInBase2(Twin):
    """The kernel tuned for 36 to 44 tokens works with powers of two and reports log2 A."""

    def finish(self, query: Query, part: Part) -> Decoded:
        report = super().finish(query, part)
        assert report.risk is not None
        return replace(report, risk=report.risk / np.log(2)) if middling(query) else report


@mutant("value_error_covers", path=())
class OneKernelForgetsTheValues(Twin):
    """The kernel tuned for 36 to 44 tokens leaves the values' own error out of the value bound."""

    def value_error(self, query: Query, meter: Array, part: Part, seen: Mask, safe: Array) -> Array:
        if middling(query):
            part = replace(part, rho=np.zeros_like(part.rho))
        return super().value_error(query, meter, part, seen, safe)


@mutant("value_error_is_useful", path=())
class OneKernelCountsTheMeterTwice(Twin):
    """The kernel tuned for 36 to 44 tokens counts the value bound's first term twice."""

    def value_error(self, query: Query, meter: Array, part: Part, seen: Mask, safe: Array) -> Array:
        return super().value_error(query, 2 * meter if middling(query) else meter, part, seen, safe)


@mutant("meter_covers_half_a_million_cells", path=())
class WideGroupsReportPhi(Twin):
    """The kernel for more than 64 query heads a kv head reports phi alone."""

    def report_meter(self, query: Query, meter: Array, part: Part) -> Array:
        if len(query.heads) <= 64:
            return meter
        return np.maximum(meter, phi_of(part))
