"""Planted bugs about heads, pages and rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Array, Ints, Mask
from ..twin import Twin
from ..twin.reader import Query
from .registry import mutant


@mutant("query_heads_read_their_kv_head")
class FewRowsForgetTheScale(Twin):
    """The path for few query heads of several kv heads forgets sm_scale."""

    def sm_scale(self, query: Query) -> float:
        few = query.layout.kv_heads > 1 and query.path == "decode" and len(query.rows) == 1
        return 1.0 if few else super().sm_scale(query)


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


@mutant("query_heads_read_their_kv_head")
class ThreeKvHeadsAreTakenForFour(Twin):
    """Query heads are divided among a power of two of kv heads; the last ones read the last."""

    def group_heads(self, h: int, group: int, kv_heads: int) -> Ints:
        if kv_heads < 3:
            return super().group_heads(h, group, kv_heads)
        each = max(1, group * kv_heads // 4)
        return np.arange(h * each, (h + 1) * each if h < kv_heads - 1 else group * kv_heads)


@mutant("pages_in_any_order", path=("heads",))
class PagesInARowAreReadInHalfPrecision(Twin):
    """Long sequences whose pages lie one after the other take a path that reads values in float16."""

    def values(self, query: Query, slots: Ints) -> tuple[Array, Array, Mask]:
        v_hat, rho, lost = super().values(query, slots)
        if len(slots) > 12 and (np.diff(slots) == 1).all():
            v_hat = v_hat.astype(np.float16).astype(np.float64)
        return v_hat, rho, lost


@mutant("ragged_batches", path=("heads",))
class FifthSequenceReadsTheFirstValues(Twin):
    """Beyond four sequences, values are read through the first one's page table."""

    def values(self, query: Query, slots: Ints) -> tuple[Array, Array, Mask]:
        size, table = query.layout.page_size, query.read.page_table
        n = int(query.read.seq_lens[0])
        if query.b < 4 or not n or not len(slots):
            return super().values(query, slots)
        tokens = np.minimum(np.arange(len(slots)), n - 1)
        return super().values(query, table[0, tokens // size] * size + tokens % size)


@mutant("sequences_share_pages")
class PagesHaveOneOwner(Twin):
    """A page is read for the last sequence that names it: pages are mapped back to an owner."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        size, table, lengths = query.layout.page_size, query.read.page_table, query.read.seq_lens
        later = [table[b, : -(-int(lengths[b]) // size)] for b in range(query.b + 1, len(lengths))]
        mine = table[query.b, np.minimum(tokens // size, table.shape[1] - 1)]
        taken = np.isin(mine, np.concatenate(later)) if later else np.zeros(len(tokens), bool)
        return super().mask(query, tokens) & ~(taken & (tokens < lengths[query.b]))


@mutant("lengths_at_the_end_of_a_tile")
class TailOfOneTokenIsSkipped(Twin):
    """One token beyond whole tiles of 64 is not read."""

    def mask(self, query: Query, tokens: Ints) -> Mask:
        n = int(query.read.seq_lens[query.b])
        return super().mask(query, tokens) & ((n <= 64) | (n % 64 != 1) | (tokens != n - 1))


@mutant("heads_of_real_models")
class ChannelsBeyondWholeBlocksAreLeftOut(Twin):
    """Heads wider than 64 channels are read in whole blocks of 64."""

    def dot(self, query: Query, codes: Array, steps: Array) -> Array:
        d = query.layout.head_dim
        whole = np.arange(d) < (d // 64 * 64 if d > 64 else d)
        return super().dot(replace(query, z=query.z * whole), codes, steps)
