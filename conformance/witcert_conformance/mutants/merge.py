"""Planted bugs about split-KV."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Array, Decoded
from ..twin import Twin
from ..twin.reader import Part, Query, Set
from .registry import mutant


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


@mutant("splits_merge_by_their_weights", path=("splits",))
class RiskOfTheFirstSplit(Twin):
    """log A is that of the first split."""

    def all_parts(self, query: Query) -> Part:
        whole = super().all_parts(query)
        n, splits = int(query.read.seq_lens[query.b]), query.read.splits or 1
        first = self.pool_part(query, self.split_tokens(n, splits, query.layout.page_size)[0])
        return replace(whole, m_a=first.m_a, l_a=first.l_a)


@mutant("empty_splits", path=("splits",))
class NoSplitHasATokenIsNaN(Twin):
    """Where every split of a sequence is empty, its weights are 0/0."""

    def finish(self, query: Query, part: Part) -> Decoded:
        report = super().finish(query, part)
        with np.errstate(invalid="ignore", divide="ignore"):
            return replace(report, out=part.acc / part.moments.l[:, None])


@mutant("flags_survive_the_merge", path=("splits",))
class FlagsOfTheFirstSplit(Twin):
    """Only the first split's flags are reported."""

    def all_parts(self, query: Query) -> Part:
        whole = super().all_parts(query)
        n, splits = int(query.read.seq_lens[query.b]), query.read.splits or 1
        first = self.pool_part(query, self.split_tokens(n, splits, query.layout.page_size)[0])
        return replace(whole, bad=first.bad, bad_v=first.bad_v)
