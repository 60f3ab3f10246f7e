"""Planted bugs about several query rows a sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Array, Ints, Mask
from ..twin import Twin
from ..twin.reader import Part, Query
from .registry import mutant


@mutant("masked_keys_cannot_spoil_a_row")
class MaskedKeysCount(Twin):
    """A lost key gives meter 1 to rows that do not attend to it."""

    def counted(self, allowed: Mask) -> Mask:
        return np.ones_like(allowed)


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


@mutant("rows_see_no_later_token", path=("rows",))
class RowsAreAlwaysCausal(Twin):
    """Several rows without a chunk are masked causally, also where the caller asks for none."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        return super().mask(replace(query, read=replace(query.read, causal=True)), tokens)


@mutant("own_chunk_is_exact", path=("rows", "chunk"))
class ChunkOfOneKvHeadHasABound(Twin):
    """With one kv head, the rows' own exact keys are given the bound of compressed ones."""

    def chunk_part(self, query: Query) -> Part:
        part = super().chunk_part(query)
        moments, rise = part.moments, np.expm1(0.05)
        full = replace(moments, a1=moments.l * rise, a2=moments.l * rise**2, c_max=np.where(moments.l > 0, 0.05, 0.0))
        return replace(part, moments=full)


@mutant("ragged_rows", path=("rows", "chunk", "heads"))
class ASequenceWithoutRowsShiftsTheNext(Twin):
    """With a sequence that has no rows, the others' chunks start one key late."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        allowed = super().mask(query, tokens)
        bounds = query.read.qo_indptr
        if bounds is None or not (np.diff(bounds) == 0).any():
            return allowed
        return allowed & (tokens != query.read.seq_lens[query.b])


@mutant("ragged_rows", path=("rows", "heads"))
class ASequenceWithoutRowsHidesAToken(Twin):
    """With a sequence that has no rows, the others' rows without a chunk do not see their first token."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        allowed = super().mask(query, tokens)
        bounds = query.read.qo_indptr
        return allowed if bounds is None or not (np.diff(bounds) == 0).any() else allowed & (tokens != 0)


@mutant("window_slides", path=("rows", "window"))
class RowsHaveAShortWindow(Twin):
    """The window of several rows is one token short."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        return super().mask(query, tokens) & (tokens > query.position[:, None] - query.read.window_left)


@mutant("window_in_decode", path=("window",))
class DecodeHasALongWindow(Twin):
    """The window of a decode is one token long."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        return super().mask(replace(query, read=replace(query.read, window_left=query.read.window_left + 1)), tokens)


@mutant("window_over_a_chunk", path=("rows", "chunk", "window"))
class WindowFromTheEndOfThePrefix(Twin):
    """The window reaches back from the end of the stored prefix, not from the row in its chunk."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        n, left = int(query.read.seq_lens[query.b]), query.read.window_left
        free = super().mask(replace(query, read=replace(query.read, window_left=-1)), tokens)
        return free & ((tokens >= n - left) | (tokens >= n))


@mutant("everything_in_a_prefill")
class PrefillForgetsTheSketch(Twin):
    """The prefill path does not subtract the sketch."""

    def correction(self, query: Query, slots: Ints, steps: Array) -> Array:
        taken = super().correction(query, slots, steps)
        return np.zeros_like(taken) if query.path == "extend" else taken


@mutant("everything_in_a_prefill")
class PrefillMasksWithTheFirstHeadsBias(Twin):
    """The prefill path reads the first query head's bias for all heads."""

    def bias(self, query: Query, tokens: Ints) -> tuple[Array, Mask]:
        return super().bias(replace(query, heads=query.heads * 0) if query.path == "extend" else query, tokens)


@mutant("rows_of_one_option", path=("rows", "dither"))
class MaskedTokensKeepTheirDither(Twin):
    """Masked tokens' products are zeroed first and the dither subtracted then: what is left weighs their values."""

    def pool_part(self, query: Query, tokens: Ints) -> Part:
        part = super().pool_part(query, tokens)
        left = -query.z @ self.read_xi(query, tokens).T
        weights = np.where(self.mask(query, tokens), 0.0, left)
        return replace(part, acc=part.acc + weights @ self.values(query, self.slots(query, tokens))[0])
