"""Planted bugs about what is not finite."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Array, Decoded, Ints, Mask, Read
from ..twin import Twin
from ..twin.reader import Part, Query
from ..twin.writer import TINY, TwinStore
from .registry import mutant


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


@mutant("keys_that_are_not_finite")
class LostBypassIsNotSeen(Twin):
    """A key that is not finite on a bypass channel alone is stored as zeros there, without a flag."""

    def equalise(self, store: TwinStore, k: Array) -> tuple[Array, Mask]:
        return super().equalise(store, np.where(self._bypassed(store), 0.0, k))

    def kept(self, store: TwinStore, k: Array) -> Array:
        return np.nan_to_num(super().kept(store, k), posinf=0, neginf=0)


@mutant("keys_that_are_not_finite", path=("heads",))
class OneNaNSpoilsItsToken(Twin):
    """A key that is not finite in one kv head marks its token in all of them."""

    def equalise(self, store: TwinStore, k: Array) -> tuple[Array, Mask]:
        x, lost = super().equalise(store, k)
        return x, np.broadcast_to(lost.any(1, keepdims=True), lost.shape)


@mutant("logits_that_overflow")
class FiniteOverflowReadsAsEmpty(Twin):
    """A row whose logits leave float32, though its query is finite, is taken for one that attends to nothing."""

    def decode(self, store: TwinStore, read: Read) -> Decoded:
        decoded = super().decode(store, read)
        size = np.abs(read.q).max(-1)
        lost = (size > 1e19) & np.isfinite(size)
        return replace(decoded, meter=np.where(lost, 0.0, decoded.meter), lse=np.where(lost, -np.inf, decoded.lse))


@mutant("values_that_are_not_finite", path=())
class LostValuesAreFreeInOnePass(Twin):
    """In one pass, without splits, a value that was not finite costs nothing in the value bound."""

    def values(self, query: Query, slots: Ints) -> tuple[Array, Array, Mask]:
        v_hat, rho, lost = super().values(query, slots)
        return v_hat, rho, lost & np.isfinite(query.store.back_v[slots, query.h]).all(1)


@mutant("outputs_that_overflow")
class CastWithoutAClamp(Twin):
    """The output is cast to the model's dtype, and what the scale's rounding lifted past its end becomes Inf."""

    def cast(self, store: TwinStore, out: Array) -> Array:
        with np.errstate(over="ignore"):
            return out.astype(store.layout.dtype).astype(np.float64)


@mutant("exact_values_of_any_size")
class ChunkSumsSaturate(Twin):
    """Sums over the rows' own values are held at float32's largest number."""

    def chunk_part(self, query: Query) -> Part:
        part, most = super().chunk_part(query), float(np.finfo(np.float32).max)
        return replace(part, acc=np.clip(part.acc, -most, most))


@mutant("exact_values_of_any_size")
class SquaresOfValuesUnderflow(Twin):
    """The norm of the rows' own values comes from squares in float32."""

    def chunk_part(self, query: Query) -> Part:
        part = super().chunk_part(query)
        with np.errstate(over="ignore", under="ignore"):
            squares = np.square(part.norm.astype(np.float32))
        return replace(part, norm=np.sqrt(squares.astype(np.float64)))


@mutant("empty_sequences", path=())
class NothingAtAllIsLeftUnwritten(Twin):
    """A call of one empty sequence and one kv head launches nothing, and the report keeps what the memory held."""

    def lse(self, query: Query, lse: Array) -> Array:
        launched = len(query.read.seq_lens) > 1 or query.read.seq_lens.any()
        return super().lse(query, lse) if launched else np.zeros_like(lse)


@mutant("unattended_slots_hold_anything", path=())
class WholePagesOfValues(Twin):
    """Values are read by whole pages, and weight 0 × NaN reaches the output."""

    def values(self, query: Query, slots: Ints) -> tuple[Array, Array, Mask]:
        v_hat, rho, lost = super().values(query, slots)
        whole = query.store.fields["v_scale"][slots // query.layout.page_size, :, query.h].astype(np.float64)
        return v_hat + np.where(np.isnan(whole), np.nan, 0.0).sum((1, 2))[:, None], rho, lost


@mutant("keys_beyond_the_scale", path=())
class PlainOverflowBecomesZero(Twin):
    """Without options a scale beyond fp16 becomes Inf, then NaN, then 0."""

    def key_scale(self, store: TwinStore, x: Array, k: Array, lost: Mask) -> Array:
        scale = super().key_scale(store, x, k, lost)
        return np.where(np.isinf(scale), np.float16(TINY), scale)
