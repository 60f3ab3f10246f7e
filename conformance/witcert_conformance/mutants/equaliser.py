"""Planted bugs about the equaliser and the bypass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Array, Calibration, Ints, Mask, Read
from ..twin import Twin
from ..twin.reader import Query
from ..twin.writer import TwinStore
from .registry import mutant


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


@mutant("a_calibration_belongs_to_its_bytes")
class DirectionsAreNotCompared(Twin):
    """A calibration is told from another by its equaliser alone."""

    def check_binding(self, store: TwinStore, calibration: Calibration) -> None:
        super().check_binding(store, replace(calibration, u=store.calibration.u))


@mutant("constant_channels_have_a_step")
class ConstantChannelHasNoStep(Twin):
    """A channel that was constant in calibration gets f = 0."""

    def floor(self, half_range: Array) -> Array:
        return half_range


@mutant("equalised_keys_are_within_half_step", path=("equaliser", "heads"))
class SecondHeadCentresInHalfPrecision(Twin):
    """All kv heads but the first subtract mu rounded to float16."""

    def equalise(self, store: TwinStore, k: Array) -> tuple[Array, Mask]:
        off = store.calibration.mu - store.calibration.mu.astype(np.float16).astype(np.float64)
        off[0] = 0
        return super().equalise(store, k + off)


@mutant("equaliser_goes_into_the_query_once", path=("equaliser", "heads"))
class FactorsOfTheFirstKvHead(Twin):
    """Queries of the third kv head and later ones are multiplied by the first one's f."""

    def fold(self, store: TwinStore, q: Array, h: int) -> Array:
        return super().fold(store, q, h if h < 2 else 0)


@mutant("shift_meets_a_soft_cap", path=("equaliser", "soft_cap"))
class PlainCapWithoutTheShift(Twin):
    """The path with an equaliser, a soft cap and nothing else leaves the shift out."""

    def mixed(self, query: Query) -> bool:
        return False


@mutant("shift_meets_sinks", path=("equaliser", "sinks"))
class PlainSinksWithoutTheShift(Twin):
    """The path with an equaliser, a sink and nothing else leaves the shift out."""

    def mixed(self, query: Query) -> bool:
        return False


@mutant("shift_meets_the_own_chunk", path=("equaliser", "rows", "chunk"))
class PlainChunkWithoutTheShift(Twin):
    """The path with an equaliser, the rows' own chunk and nothing else leaves the shift out."""

    def mixed(self, query: Query) -> bool:
        return False


@mutant("shift_meets_exact_pages", path=("equaliser", "repair"))
class SomeExactPagesWithoutTheShift(Twin):
    """The shift is left out unless all of a sequence's pages are exact."""

    def mixed(self, query: Query) -> bool:
        pages = -(-int(query.read.seq_lens[query.b]) // query.layout.page_size)
        return super().mixed(query) and bool(self.repaired_pages(query)[:pages].all())


@mutant("bypass_is_read_exactly", path=("bypass", "heads"))
class BypassOfTheFirstKvHead(Twin):
    """The bypass channels of the third kv head's queries and later ones are the first one's."""

    def logits(self, query: Query, slots: Ints, tokens: Ints, steps: Array) -> Array:
        mine, first = query.store.calibration.bypass_channels(query.layout)[[query.h, 0 if query.h > 1 else query.h]]
        kept = query.store.at("bypass", slots)[:, query.h].T
        wrong = query.q[:, first] @ kept - query.q[:, mine] @ kept
        return super().logits(query, slots, tokens, steps) + self.sm_scale(query) * wrong
