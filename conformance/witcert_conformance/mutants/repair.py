"""Planted bugs about repair and the gate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Array, Decoded, Gated, Ints, Mask, Read
from ..twin import Twin
from ..twin.reader import Part, Query
from ..twin.writer import TwinStore
from .registry import mutant


@mutant("repaired_pages_have_no_sketch")
class SketchOnARepairedPage(Twin):
    """The sketch is still subtracted on a repaired page."""

    def repaired_logits(self, query: Query, keys: Array, slots: Ints) -> Array:
        exact = super().repaired_logits(query, keys, slots)
        if not query.layout.sketch or query.store.observatory:
            return exact
        scale = query.store.at("scale", slots)[:, query.h].repeat(query.layout.head_dim // query.layout.groups, -1)
        return exact - self.sm_scale(query) * self.correction(query, slots, scale)


@mutant("repaired_pages_have_no_witness")
class RepairedWitnessKept(Twin):
    """A repaired page keeps the bound of its witness."""

    def exact_c(self, query: Query, slots: Ints, c: Array) -> Array:
        return c if query.layout.witness_bands and not query.store.observatory else np.zeros_like(c)


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


@mutant("repair_of_one_sequence_changes_no_other")
class ABatchWithExactPagesTakesAnotherKernel(Twin):
    """With an exact page in the batch all sequences go through another kernel, whose meter is an ulp larger."""

    def stored_meter(self, meter: Array) -> Array:
        above = np.minimum(np.nextafter(meter.astype(np.float32), np.float32(2)), 1.0).astype(np.float64)
        return np.where(meter > 0, above, meter) if self._mixed else super().stored_meter(meter)

    def decode(self, store: TwinStore, read: Read) -> Decoded:
        self._mixed = read.exact_pages is not None and bool((read.exact_pages >= 0).any())
        return super().decode(store, read)

    _mixed = False


@mutant("lost_keys_are_repaired", path=("repair",))
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


@mutant("gate_leaves_no_head_over")
class GateOnThePapersScale(Twin):
    """A threshold below 1 too is compared with ½ (A² − 1), and pages are repaired that the meter clears."""

    def over(self, decoded: Decoded, tau: float) -> Mask:
        assert decoded.risk is not None
        return decoded.risk > np.log1p(2 * tau) / 2


@mutant("gate_ranks_by_risk_from_one_on")
class GateLooksAtTheMeterAlone(Twin):
    """A threshold of 1 and more is compared with the meter, which is never above it."""

    def over(self, decoded: Decoded, tau: float) -> Mask:
        return decoded.meter > tau


@mutant("a_page_is_paged_in_once")
class PagesInTwice(Twin):
    """Keys and values of a page are fetched in two page-ins."""

    def gate(self, store: TwinStore, read: Read, tau: float) -> Gated:
        result = super().gate(store, read, tau)
        return replace(result, page_ins=tuple(p for p in result.page_ins for _ in range(2)))


@mutant("repaired_pages_are_exact", path=("repair",))
class SomeRepairedPagesKeepTheirBound(Twin):
    """With one kv head, repaired pages keep their c unless all are repaired."""

    def exact_c(self, query: Query, slots: Ints, c: Array) -> Array:
        pages = -(-int(query.read.seq_lens[query.b]) // query.layout.page_size)
        return super().exact_c(query, slots, c) if self.repaired_pages(query)[:pages].all() else c


@mutant("repaired_pages_have_no_witness", path=("repair", "witness"))
class PlainRepairedWitnessKept(Twin):
    """Without other options a repaired page keeps the bound of its witness."""

    def exact_c(self, query: Query, slots: Ints, c: Array) -> Array:
        return c


@mutant("repaired_pages_have_no_sketch", path=("repair", "sketch"))
class PlainSketchOnARepairedPage(Twin):
    """Several pages are repaired, not all of a sequence, and the sketch is still subtracted on them."""

    def repaired_logits(self, query: Query, keys: Array, slots: Ints) -> Array:
        exact, pages = (
            super().repaired_logits(query, keys, slots),
            -(-int(query.read.seq_lens[query.b]) // query.layout.page_size),
        )
        assert query.read.exact_pages is not None
        if self.repaired_pages(query)[:pages].all() or (query.read.exact_pages >= 0).sum() < 2:
            return exact
        scale = query.store.at("scale", slots)[:, query.h].repeat(query.layout.head_dim // query.layout.groups, -1)
        return exact - self.sm_scale(query) * self.correction(query, slots, scale)


@mutant("a_wholly_repaired_read_is_exact", path=("repair", "equaliser", "bypass"))
class BypassOnARepairedPage(Twin):
    """The bypass channels are added to a repaired page's logits, which have them already."""

    def repaired_logits(self, query: Query, keys: Array, slots: Ints) -> Array:
        channels = query.store.calibration.bypass_channels(query.layout)[query.h]
        twice = query.q[:, channels] @ query.store.at("bypass", slots)[:, query.h].T
        return super().repaired_logits(query, keys, slots) + self.sm_scale(query) * twice
