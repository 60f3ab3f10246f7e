"""Planted bugs. Each is the twin with one mistake that someone has made or will make; a named property rejects it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .adapter import Account, Array, Budget, Calibration, Decoded, Gated, Ints, Layout, Mask, Read
from .twin import Twin
from .twin.reader import Part, Query, Set, weight
from .twin.writer import TINY, TwinStore, half_up


@dataclass(frozen=True)
class Mutant:
    """A planted bug: its class, the twin that it was made from, the property that must reject it."""

    name: str
    mistake: str
    kind: type[Twin]
    twin: type[Twin]
    killed_by: str


MUTANTS: dict[str, Mutant] = {}

IMPLIED = {
    "meter_covers_any_query": "logit_error_within_bound and meter_covers_worst_case imply it; here on real keys",
    "dispersion_form_stays_refuted": "about the suite's own arithmetic, whatever the implementation",
    "variance_averaged_form_stays_refuted": "about the suite's own arithmetic, whatever the implementation",
}
"""Properties without a planted bug of their own, and why."""


def mutant(killed_by: str, twin: type[Twin] = Twin) -> Callable[[type[Twin]], type[Twin]]:
    """Register a class as a planted bug; its docstring names the mistake."""

    def register(kind: type[Twin]) -> type[Twin]:
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in kind.__name__).lstrip("_")
        MUTANTS[name] = Mutant(name, " ".join((kind.__doc__ or "").split()), kind, twin, killed_by)
        return kind

    return register


# the writer


@mutant("residual_within_half_step")
class QuantisesWithTheFloatScale(Twin):
    """Codes are counted in the fp32 scale, the fp16 one is stored."""

    def code_step(self, step: Array, x: Array, k: Array) -> Array:
        groups = x.shape[-1] // max(1, int(np.unique(step[0, 0]).size)) if len(x) else x.shape[-1]
        amax = np.abs(x).reshape(*x.shape[:-1], -1, groups).max(-1)
        return np.maximum(amax / 127, TINY).repeat(groups, -1)


@mutant("scale_covers_amax")
class RoundsTheScaleToNearest(Twin):
    """The scale is rounded to the nearest fp16 number."""

    def round_scale(self, scale: Array) -> Array:
        return np.maximum(scale.astype(np.float16), np.float16(TINY))


@mutant("residual_within_half_step")
class ClipsAt126(Twin):
    """Codes are clipped at ±126."""

    def to_int8(self, codes: Array) -> Array:
        return np.clip(codes, -126, 126)


@mutant("residual_within_half_step")
class StoreTruncates(Twin):
    """The float goes to int8 by an implicit store, which truncates toward zero."""

    def round_codes(self, ratio: Array, xi: Array) -> Array:
        return ratio + xi


@mutant("residual_within_half_step")
class WriterClips(Twin):
    """The scale follows the 90th percentile and outliers saturate."""

    def key_scale(self, store: TwinStore, x: Array, k: Array, lost: Mask) -> Array:
        return self.round_scale(super().key_scale(store, x, k, lost).astype(np.float64) * 0.9)

    def to_int8(self, codes: Array) -> Array:
        return np.clip(codes, -127, 127)


@mutant("groups_have_their_own_scale")
class FirstGroupScalesAll(Twin):
    """All channel groups are quantised with the first group's scale."""

    def code_step(self, step: Array, x: Array, k: Array) -> Array:
        return np.broadcast_to(step[..., :1], step.shape)


@mutant("zero_groups_have_a_scale")
class ZeroGroupDividesByZero(Twin):
    """A group of zeros gets scale 0, and codes 0/0."""

    def round_scale(self, scale: Array) -> Array:
        return half_up(scale)


@mutant("writer_is_a_pure_function")
class PrefillRoundsHalfUp(Twin):
    """Prefill rounds ties up, decode rounds them to even."""

    def round_codes(self, ratio: Array, xi: Array) -> Array:
        return np.floor(ratio + xi + 0.5) if len(ratio) > 1 else np.rint(ratio + xi)


@mutant("values_within_half_step")
class ValuesTruncate(Twin):
    """Value codes are truncated toward zero."""

    def round_values(self, ratio: Array) -> Array:
        return np.trunc(ratio)


@mutant("dequantize_is_what_is_stored")
class DequantizeForgetsMu(Twin):
    """``dequantize`` leaves the equaliser's mid-range out."""

    def dequantize(self, store: TwinStore) -> tuple[Array, Array]:
        k, v = super().dequantize(store)
        return k - store.calibration.mu * (1 - self._bypassed(store)), v


@mutant("byte_account_is_measured")
class AccountForgetsTheScale(Twin):
    """The byte account leaves the scales out."""

    def account(self, store: TwinStore) -> Account:
        full = super().account(store)
        return replace(full, key=full.key - 2 * store.layout.groups)


@mutant("bypass_channels_are_kept")
class BypassInTheAmax(Twin):
    """Bypassed outliers still set the group's scale."""

    def key_scale(self, store: TwinStore, x: Array, k: Array, lost: Mask) -> Array:
        whole = np.where(lost[..., None], 0.0, (k - store.calibration.mu) / store.calibration.f)
        return super().key_scale(store, whole, k, lost)


@mutant("bypass_channels_are_kept")
class BypassInHalfPrecision(Twin):
    """Bypass channels of a float32 model are kept in float16."""

    def kept(self, store: TwinStore, k: Array) -> Array:
        return super().kept(store, k).astype(np.float16).astype(np.float64)


@mutant("bypass_is_read_exactly")
class BypassInTheBound(Twin):
    """The query's bypass channels stay in the witness bound."""

    def query(self, store: TwinStore, read: Read, b: int, h: int) -> Query:
        query = super().query(store, read, b, h)
        return replace(query, w=query.z - self.inside(query.a, query.u))

    def half_step(self, query: Query, steps: Array) -> Array:
        full = steps.max(1, keepdims=True)
        return super().half_step(query, np.broadcast_to(full, steps.shape))


@mutant("directions_stay_off_the_bypass")
class BypassChannelsInTheDirections(Twin):
    """Directions keep their part on bypass channels, and the residual there is what the codes lack: all of it."""

    def check_calibration(self, layout: Layout, calibration: Calibration | None) -> None:
        return

    def kept(self, store: TwinStore, k: Array) -> Array:
        self._last = k
        return super().kept(store, k)

    def residual(self, store: TwinStore, residual: Array) -> Array:
        return np.where(self._bypassed(store), -self._last, residual)


# what is not finite


@mutant("keys_that_are_not_finite")
class LostKeysAreZeros(Twin):
    """A NaN key is stored as zeros with an ordinary scale."""

    def lost_scale(self) -> float:
        return TINY


@mutant("keys_that_are_not_finite")
class OneNaNSpoilsTheCall(Twin):
    """One key that is not finite marks every token of the call."""

    def equalise(self, store: TwinStore, k: Array) -> tuple[Array, Mask]:
        x, lost = super().equalise(store, k)
        return x, np.broadcast_to(lost.any(), lost.shape)


@mutant("keys_beyond_the_scale")
class OverflowBecomesZero(Twin):
    """A scale beyond fp16 becomes Inf, then NaN, then 0."""

    def round_scale(self, scale: Array) -> Array:
        up = super().round_scale(scale)
        return np.where(np.isinf(up), np.float16(TINY), up)


@mutant("logits_that_overflow")
class OverflowReadsAsEmpty(Twin):
    """A row whose logits leave float32 is taken for one that attends to nothing."""

    def decode(self, store: TwinStore, read: Read) -> Decoded:
        decoded = super().decode(store, read)
        lost = (np.abs(read.q) > 1e19).any(-1)
        return replace(decoded, meter=np.where(lost, 0.0, decoded.meter), lse=np.where(lost, -np.inf, decoded.lse))


@mutant("queries_that_are_not_finite")
class NaNQueriesAreZeros(Twin):
    """A query that is not finite is read as zeros without a flag."""

    def query(self, store: TwinStore, read: Read, b: int, h: int) -> Query:
        query = super().query(store, read, b, h)
        return replace(query, bad=np.zeros_like(query.bad))


@mutant("values_that_are_not_finite")
class LostValuesAreFree(Twin):
    """A value that is not finite costs nothing in the value bound."""

    def values(self, query: Query, slots: Ints) -> tuple[Array, Array, Mask]:
        v_hat, rho, lost = super().values(query, slots)
        return v_hat, rho, np.zeros_like(lost)


@mutant("masked_keys_cannot_spoil_a_row")
class MaskedKeysCount(Twin):
    """A lost key gives meter 1 to rows that do not attend to it."""

    def counted(self, allowed: Mask) -> Mask:
        return np.ones_like(allowed)


@mutant("empty_sequences")
class EmptyIsNaN(Twin):
    """A row without tokens is 0/0."""

    def finish(self, query: Query, part: Part) -> Decoded:
        report = super().finish(query, part)
        with np.errstate(invalid="ignore", divide="ignore"):
            return replace(report, out=part.acc / part.moments.l[:, None])


@mutant("empty_sequences")
class EmptyReportsToAnotherRow(Twin):
    """The lse of an empty sequence lands in the row before."""

    def report_rows(self, query: Query) -> Ints:
        return query.rows - 1 if query.read.seq_lens[query.b] == 0 and query.b else query.rows


@mutant("unattended_slots_hold_anything")
class ZeroTimesNaN(Twin):
    """Whole pages are read, masked by weight 0, and 0 × NaN reaches the output."""

    def split_tokens(self, n: int, splits: int, page_size: int) -> list[Ints]:
        parts = super().split_tokens(n, splits, page_size)
        return [np.arange(p[0], -(-(p[-1] + 1) // page_size) * page_size) if len(p) else p for p in parts]

    def mask(self, query: Query, tokens: Ints) -> Mask:
        return super().mask(query, tokens) & (tokens < query.read.seq_lens[query.b])

    def bias(self, query: Query, tokens: Ints) -> tuple[Array, Mask]:
        if query.read.bias is None:
            return super().bias(query, tokens)
        return super().bias(query, np.minimum(tokens, query.read.bias.shape[2] - 1))

    def values(self, query: Query, slots: Ints) -> tuple[Array, Array, Mask]:
        clean, rho, lost = super().values(query, slots)
        if query.store.observatory:
            return clean, rho, lost
        step = query.store.at("v_scale", slots)[:, query.h].repeat(clean.shape[1] // query.layout.groups_v, -1)
        return np.where(np.isnan(step), np.nan, clean), rho, lost


# the dither


@mutant("dither_is_from_the_counter")
class DitherNotCentred(Twin):
    """The dither is drawn from [0, 1) on both sides."""

    def write_xi(self, store: TwinStore, positions: Ints) -> Array:
        return super().write_xi(store, positions) + 0.5

    def read_xi(self, query: Query, tokens: Ints) -> Array:
        return super().read_xi(query, tokens) + 0.5


@mutant("dither_is_from_the_counter")
class DitherOfTheWrongPage(Twin):
    """The dither of the next period, on both sides."""

    def write_xi(self, store: TwinStore, positions: Ints) -> Array:
        return super().write_xi(store, positions + store.layout.dither_period)

    def read_xi(self, query: Query, tokens: Ints) -> Array:
        return super().read_xi(query, tokens + query.layout.dither_period)


@mutant("dither_is_from_the_counter")
class DitherOfTheWrongLayer(Twin):
    """Every layer draws layer 0's dither."""

    def create(
        self, layout: Layout, pages: int, calibration: Calibration | None = None, layer: int = 0, seed: int = 0
    ) -> TwinStore:
        return super().create(layout, pages, calibration, 0, seed)


@mutant("dither_is_from_the_counter")
class DitherOfTheWrongHead(Twin):
    """Every kv head draws kv head 0's dither."""

    def write_xi(self, store: TwinStore, positions: Ints) -> Array:
        xi = super().write_xi(store, positions)
        return np.broadcast_to(xi[:, :1], xi.shape)

    def read_xi(self, query: Query, tokens: Ints) -> Array:
        return super().read_xi(replace(query, h=0), tokens)


@mutant("dither_ignores_batch_and_pages")
class DitherOfThePhysicalPage(Twin):
    """The dither is keyed by the page's place in the pool."""

    def quantize(self, store: TwinStore, k: Array, v: Array, slots: Ints, positions: Ints) -> None:
        super().quantize(store, k, v, slots, slots)

    def read_xi(self, query: Query, tokens: Ints) -> Array:
        return super().read_xi(query, self.slots(query, tokens))


@mutant("read_draws_the_same_dither")
class ReadDitherOffByOne(Twin):
    """The reader draws the dither of the next token."""

    def read_xi(self, query: Query, tokens: Ints) -> Array:
        return super().read_xi(query, tokens + 1)


@mutant("dither_is_from_the_counter")
class DitheredScaleLeavesNoRoom(Twin):
    """A dithered store uses plain INT8's scale, amax/127."""

    def levels(self, store: TwinStore) -> float:
        return 127.0


@mutant("residual_does_not_know_the_key")
class DitherOfFewBits(Twin):
    """A dither of one bit: the residual keeps what it knows of the key."""

    def write_xi(self, store: TwinStore, positions: Ints) -> Array:
        return np.where(super().write_xi(store, positions) < 0, -0.25, 0.25)


@mutant("radius_is_what_the_theorem_says")
class LogOfHalfTheEvents(Twin):
    """log(S/δ) for log(2 S/δ)."""

    def log_term(self, tokens: int, delta: float) -> float:
        return super().log_term(tokens, 2 * delta)


@mutant("radius_is_what_the_theorem_says")
class RadiusWithoutTheGrid(Twin):
    """The discrete dither's bias is left out."""

    def radius(self, query: Query, steps: Array, delta: float) -> Array:
        tokens = int(query.read.seq_lens[query.b])
        w = query.w * (1 + 2.0**-12)
        return np.sqrt(2 * self.log_term(tokens, delta) * (np.square(w) @ np.square(steps).T) / 12)


@mutant("budget_divides_by_layers_heads_and_steps")
class DeltaOverTokensOnly(Twin):
    """δ is not divided by layers, heads and steps."""

    def delta_local(self, budget: Budget) -> float:
        return budget.delta


@mutant("guarantee_is_the_weakest_used")
class RadiusForAnyQuery(Twin):
    """A number that used the radius is labelled any_query."""

    def guarantee(self, store: TwinStore, read: Read) -> str:
        return "any_query"


# the sketch


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

    def sketch_codes(self, calibration: Calibration, residual: Array, step: Array) -> Array:
        return np.clip(super().sketch_codes(calibration, residual * calibration.f, step), -127, 127)


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


@mutant("repaired_pages_have_no_sketch")
class SketchOnARepairedPage(Twin):
    """The sketch is still subtracted on a repaired page."""

    def repaired_logits(self, query: Query, keys: Array, slots: Ints) -> Array:
        exact = super().repaired_logits(query, keys, slots)
        if not query.layout.sketch or query.store.observatory:
            return exact
        scale = query.store.at("scale", slots)[:, query.h].repeat(query.layout.head_dim // query.layout.groups, -1)
        return exact - self.sm_scale(query) * self.correction(query, slots, scale)


# the witness


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


@mutant("logit_error_within_bound")
class WitnessInRawCoordinates(Twin):
    """The witness is the residual of k, not of (k − mu)/f."""

    def witness_codes(self, store: TwinStore, residual: Array, step: Array) -> Array:
        return np.minimum(super().witness_codes(store, residual * store.calibration.f, step), 255)


@mutant("repaired_pages_have_no_witness")
class RepairedWitnessKept(Twin):
    """A repaired page keeps the bound of its witness."""

    def exact_c(self, query: Query, slots: Ints, c: Array) -> Array:
        return c if query.layout.witness_bands and not query.store.observatory else np.zeros_like(c)


# the equaliser


@mutant("equaliser_goes_into_the_query_once")
class EqualiserTwice(Twin):
    """q is multiplied by f twice."""

    def fold(self, store: TwinStore, q: Array, h: int) -> Array:
        return super().fold(store, q, h) * store.calibration.f[h]


@mutant("equaliser_goes_into_the_query_once")
class LseOfCentredLogits(Twin):
    """lse lacks the common shift."""

    def lse(self, query: Query, lse: Array) -> Array:
        return lse


class _Unmixed(Twin):
    """The shift is left out although something uncentred meets it."""

    def without(self, read: Read) -> Read:
        """The read as the mutant sees it."""
        return read

    def mixed(self, query: Query) -> bool:
        return super().mixed(replace(query, read=self.without(query.read)))


@mutant("shift_meets_exact_pages")
class ShiftLeftOutBesideExactPages(_Unmixed):
    """The equaliser's shift is left out where exact pages meet compressed ones."""

    def without(self, read: Read) -> Read:
        return replace(read, exact_pages=None)


@mutant("shift_meets_the_own_chunk")
class ShiftLeftOutBesideTheChunk(_Unmixed):
    """The equaliser's shift is left out where the rows' own chunk meets compressed tokens."""

    def without(self, read: Read) -> Read:
        return replace(read, k_new=None)


@mutant("shift_meets_sinks")
class ShiftLeftOutBesideSinks(_Unmixed):
    """The equaliser's shift is left out where a sink meets compressed tokens."""

    def without(self, read: Read) -> Read:
        return replace(read, sinks=None)


@mutant("shift_meets_a_soft_cap")
class ShiftLeftOutUnderACap(_Unmixed):
    """The equaliser's shift is left out under a soft cap."""

    def without(self, read: Read) -> Read:
        return replace(read, soft_cap=0.0)


@mutant("equalised_keys_are_within_half_step")
class CentresInHalfPrecision(Twin):
    """The writer subtracts mu rounded to float16."""

    def equalise(self, store: TwinStore, k: Array) -> tuple[Array, Mask]:
        rounded = store.calibration.mu.astype(np.float16).astype(np.float64)
        return super().equalise(store, k + (store.calibration.mu - rounded) * ~self._bypassed(store))


@mutant("a_calibration_belongs_to_its_bytes")
class AnyCalibrationWillDo(Twin):
    """Bytes are read with whatever calibration is at hand."""

    def check_binding(self, store: TwinStore, calibration: Calibration) -> None:
        return


@mutant("constant_channels_have_a_step")
class ConstantChannelHasNoStep(Twin):
    """A channel that was constant in calibration gets f = 0."""

    def floor(self, half_range: Array) -> Array:
        return half_range


# the read


@mutant("lse_is_of_the_stored_keys")
class ScaleTwice(Twin):
    """sm_scale is applied twice."""

    def sm_scale(self, query: Query) -> float:
        return super().sm_scale(query) ** 2


@mutant("rows_see_no_later_token")
class RaggedPathForgetsTheScale(Twin):
    """The path of several query rows forgets sm_scale."""

    def sm_scale(self, query: Query) -> float:
        return 1.0 if query.path == "ragged" else super().sm_scale(query)


@mutant("own_chunk_is_exact")
class PrefillPathForgetsTheScale(Twin):
    """The prefill path forgets sm_scale."""

    def sm_scale(self, query: Query) -> float:
        return 1.0 if query.path == "extend" else super().sm_scale(query)


@mutant("query_heads_read_their_kv_head")
class FewRowsForgetTheScale(Twin):
    """The path for few query heads of several kv heads forgets sm_scale."""

    def sm_scale(self, query: Query) -> float:
        few = query.layout.kv_heads > 1 and query.path == "decode" and len(query.rows) == 1
        return 1.0 if few else super().sm_scale(query)


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


@mutant("query_heads_read_their_kv_head")
class WrongGroup(Twin):
    """Query head h reads kv head h mod kv_heads."""

    def group_heads(self, h: int, group: int, kv_heads: int) -> Ints:
        return np.arange(h, group * kv_heads, kv_heads)


@mutant("pages_in_any_order")
class PagesInARow(Twin):
    """A sequence's pages are taken to lie one after the other."""

    def slots(self, query: Query, tokens: Ints) -> Ints:
        return query.read.page_table[query.b, 0] * query.layout.page_size + tokens


@mutant("ragged_batches")
class FirstLengthForAll(Twin):
    """Beyond two sequences a batch is read at the first one's length, as far as a sequence goes."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        allowed = super().mask(query, tokens)
        lengths = query.read.seq_lens
        return allowed & (tokens < max(lengths[0], 1)) if len(lengths) > 2 else allowed


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


@mutant("rows_see_no_later_token")
class CausalOffByOne(Twin):
    """A row sees the token after its own."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        return super().mask(replace(query, position=query.position + 1), tokens)


@mutant("window_slides")
class WindowOffByOne(Twin):
    """The window is one token short."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        allowed = super().mask(query, tokens)
        left = query.read.window_left
        return allowed & (tokens > query.position[:, None] - left) if left >= 0 else allowed


@mutant("window_in_decode")
class DecodeHasNoWindow(Twin):
    """One row a sequence attends to everything, window or not."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        if query.path == "decode":
            query = replace(query, read=replace(query.read, window_left=-1))
        return super().mask(query, tokens)


@mutant("own_chunk_is_exact")
class ChunkHasABound(Twin):
    """The rows' own exact keys are given the bound of compressed ones."""

    def chunk_c(self, y: Array) -> Array:
        return np.full_like(y, 0.05)


@mutant("ragged_rows")
class SecondSequenceReadsTheFirstChunk(Twin):
    """With a sequence that has no rows, the next one's chunk starts one row late."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        allowed = super().mask(query, tokens)
        bounds = query.read.qo_indptr
        if query.path != "extend" or bounds is None or not (np.diff(bounds) == 0).any():
            return allowed
        return allowed & (tokens != query.read.seq_lens[query.b])


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


# the bound


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


# the merge


@mutant("splits_merge_by_their_weights")
class MergeWithoutWeights(Twin):
    """Splits are added without their LSE weights."""

    def merge_weights(self, x: Set, y: Set, m: Array) -> tuple[Array, Array]:
        return np.where(x.m > -np.inf, 1.0, 0.0), np.where(y.m > -np.inf, 1.0, 0.0)


@mutant("splits_merge_by_their_weights")
class MergeAveragesTheLargestC(Twin):
    """c_max of two splits is averaged."""

    def merge_max(self, x: Array, y: Array) -> Array:
        return np.where((x > 0) & (y > 0), (x + y) / 2, np.maximum(x, y))


@mutant("empty_splits")
class EmptySplitIsNaN(Twin):
    """An empty split's weight is e^(−∞ − −∞)."""

    def merge_weights(self, x: Set, y: Set, m: Array) -> tuple[Array, Array]:
        with np.errstate(invalid="ignore"):
            return np.exp(x.m - m), np.exp(y.m - m)


@mutant("flags_survive_the_merge")
class FlagsOfTheLastSplit(Twin):
    """Only the last split's flags are reported."""

    def merge(self, x: Part, y: Part) -> Part:
        return replace(super().merge(x, y), bad=y.bad, bad_v=y.bad_v)


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
        if (query.read.splits or 1) > 1 and query.layout.groups > 1:
            steps = np.broadcast_to(steps[:, :1], steps.shape)
        return super().correction(query, slots, steps)


# repair


@mutant("repaired_pages_are_exact")
class RepairedPagesKeepTheirBound(Twin):
    """A repaired page keeps its c."""

    def exact_c(self, query: Query, slots: Ints, c: Array) -> Array:
        return c


@mutant("a_wholly_repaired_read_is_exact")
class BackingStoreOfZeros(Twin):
    """The backing store was never filled."""

    def backing(self, exact: Array) -> Array:
        return np.zeros_like(exact)


@mutant("lost_keys_are_repaired")
class RepairedTokensStayLost(Twin):
    """A repaired page whose compressed key was lost keeps the flag."""

    def pool_part(self, query: Query, tokens: Ints) -> Part:
        part = super().pool_part(query, tokens)
        if query.store.observatory or not len(tokens):
            return part
        lost = np.isinf(query.store.at("scale", self.slots(query, tokens))[:, query.h]).any(1)
        return replace(part, bad=part.bad | (lost & self.mask(query, tokens)).any(1))


@mutant("gate_leaves_no_head_over")
class GateWaitsForAllHeads(Twin):
    """A kv head is over when all its query heads are."""

    def any_of_group(self, over: Mask) -> bool:
        return bool(over.all())


@mutant("gate_leaves_no_head_over")
class GateReportsBeforeTheRepair(Twin):
    """The certificate of the decode before the repair is reported."""

    def after_repair(self, first: Decoded, last: Decoded) -> Decoded:
        return first


@mutant("gate_leaves_no_head_over")
class GateTakesTheDropForExact(Twin):
    """After a repair the meter is the old one less the pages' share, not that of a new decode."""

    def after_repair(self, first: Decoded, last: Decoded) -> Decoded:
        return replace(first, meter=np.minimum(first.meter, last.meter))


@mutant("a_page_is_paged_in_once")
class PagesInTwice(Twin):
    """Keys and values of a page are fetched in two page-ins."""

    def gate(self, store: TwinStore, read: Read, tau: float) -> Gated:
        result = super().gate(store, read, tau)
        return replace(result, page_ins=tuple(p for p in result.page_ins for _ in range(2)))


# pages


@mutant("pages_move_whole")
class ReorderForgetsAPart(Twin):
    """A reorder moves everything but the scales."""

    def moved_fields(self, store: TwinStore) -> tuple[str, ...]:
        return tuple(name for name in store.fields if name not in ("scale", "v_scale", "witness"))

    def take_pages(self, store: TwinStore, pages: Ints) -> None:
        kept = {name: store.fields[name] for name in ("scale", "v_scale", "witness")}
        super().take_pages(store, pages)
        for name, x in kept.items():
            store.fields[name] = np.resize(x, (len(pages), *x.shape[1:]))


@mutant("a_page_forgets_its_last_owner")
class StaleScale(Twin):
    """A page that is written again keeps the larger of the old and the new scale, the codes are of the new one."""

    def quantize(self, store: TwinStore, k: Array, v: Array, slots: Ints, positions: Ints) -> None:
        before = store.fields["scale"].copy()
        super().quantize(store, k, v, slots, positions)
        store.fields["scale"] = np.where(
            np.isfinite(before), np.maximum(before, store.fields["scale"]), store.fields["scale"]
        )


@mutant("a_page_forgets_its_last_owner")
class StaleValueNorm(Twin):
    """A freed page keeps the largest value norm of its last owner."""

    def free(self, store: TwinStore, pages: Ints) -> None:
        return


@mutant("crop_leaves_the_rest")
class OverwrittenSlotKeepsItsCodes(Twin):
    """A slot that holds a token is not written again."""

    def quantize(self, store: TwinStore, k: Array, v: Array, slots: Ints, positions: Ints) -> None:
        free = (store.at("scale", slots) == 0).all((1, 2))
        super().quantize(store, k[free], v[free], slots[free], positions[free])


# telemetry, refusals


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


@mutant("wrong_arguments_are_refused_by_name")
class SlotsTwice(Twin):
    """A slot that is given twice is written twice."""

    def check_write(self, store: TwinStore, k: Array, v: Array, slots: Ints) -> None:
        _, first = np.unique(slots, return_index=True)
        super().check_write(
            store, k[first] if len(k) == len(slots) else k, v[first] if len(v) == len(slots) else v, slots[first]
        )


# digits: queries as balanced base-256 digits, as on int8 tensor cores


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


# the observatory


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


@mutant("one_part_meter_of_a_scheme")
class WitnessMeetsTheRawQuery(Twin):
    """Band norms of q meet a witness in equalised coordinates."""

    def observatory_bound(self, query: Query, part: Array, witness: Array) -> Array:
        return super().observatory_bound(query, query.q if part is query.z else part, witness)


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
