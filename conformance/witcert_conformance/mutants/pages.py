"""Planted bugs about pages that are freed, gathered and written again."""

from __future__ import annotations

import numpy as np

from ..adapter import Array, Ints
from ..twin import Twin
from ..twin.writer import TwinStore
from .registry import mutant


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


@mutant("crop_leaves_the_rest", path=("sketch",))
class OverwrittenTokenKeepsItsSketch(Twin):
    """A token that is written over, its page never freed, keeps the old one's sketch."""

    def quantize(self, store: TwinStore, k: Array, v: Array, slots: Ints, positions: Ints) -> None:
        held = (store.at("scale", slots) > 0).all((1, 2)) & (
            store.fields["v_norm"][slots // store.layout.page_size] > 0
        ).all(1)
        before = store.at("sketch", slots)[held]
        super().quantize(store, k, v, slots, positions)
        store.put("sketch", slots[held], before)
