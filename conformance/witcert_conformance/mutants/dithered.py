"""Planted bugs about the dither, its radius, its budget and its label."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Array, Budget, Calibration, Ints, Layout, Read
from ..twin import Twin
from ..twin.reader import Query
from ..twin.writer import TwinStore
from .registry import mutant


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


@mutant("dither_ignores_batch_and_pages", path=("dither",))
class DitherOfTheSlotOutOfOrder(Twin):
    """A prompt whose pages do not ascend, as after others were freed, has its dither keyed by the slot."""

    def quantize(self, store: TwinStore, k: Array, v: Array, slots: Ints, positions: Ints) -> None:
        prompt = len(slots) > 3 and bool((np.diff(positions) == 1).all() and (np.diff(slots) < 0).any())
        super().quantize(store, k, v, slots, slots if prompt else positions)


@mutant("read_draws_the_same_dither", path=("dither", "heads"))
class ReadDitherOfTheFirstKvHead(Twin):
    """From the third kv head on, the reader draws the first one's dither."""

    def read_xi(self, query: Query, tokens: Ints) -> Array:
        return super().read_xi(query if query.h < 2 else replace(query, h=0), tokens)


@mutant("budget_divides_by_layers_heads_and_steps")
class CellsWrapInInt32(Twin):
    """Layers · heads · steps are multiplied in int32."""

    def delta_local(self, budget: Budget) -> float:
        cells = (budget.layers * budget.heads * budget.steps + 2**31) % 2**32 - 2**31
        return budget.delta / max(cells, 1)


@mutant("residual_does_not_know_the_key")
class PageOfEightBits(Twin):
    """The counter holds eight bits of the page: a dither comes back after 256 pages."""

    def write_xi(self, store: TwinStore, positions: Ints) -> Array:
        return super().write_xi(store, positions % (256 * store.layout.dither_period))

    def read_xi(self, query: Query, tokens: Ints) -> Array:
        return super().read_xi(query, tokens % (256 * query.layout.dither_period))
