"""Pages that are freed, written again, gathered, repeated and dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .. import checks
from ..adapter import Adapter, Array, Layout, optional
from ..case import Case, build
from ..checks import require, run, same
from ..registry import prop
from ..strategies import plain

FULL = Case(layout=Layout(head_dim=8, sketch=2, witness_bands=2, bypass=1), lengths=(7, 9), keys="normal")


@prop(
    "a_page_forgets_its_last_owner",
    plain(maybe=("sketch", "witness", "bypass"), keys=("normal", "tiny", "zeros"), values=("normal", "zeros")),
    needs=("page_reuse",),
    pinned=(FULL, replace(FULL, layout=Layout())),
)
def _reuse(adapter: Adapter, case: Case) -> None:
    """Freed pages that are written again report what a fresh store does, bit for bit."""
    fresh = build(adapter, case)
    want = fresh.decode()
    pages = len(adapter.stored(fresh.store).codes)
    store = adapter.create(case.layout, pages, fresh.calibration, layer=fresh.layer, seed=fresh.seed)
    rng = np.random.default_rng(case.seed)
    every = np.arange(pages * case.layout.page_size)
    big_k, big_v = (1000.0 * rng.normal(size=(len(every), *x.shape[1:])).astype(np.float16) for x in (fresh.k, fresh.v))
    adapter.quantize(store, big_k, big_v, every, every)
    optional(adapter).free(store, np.arange(pages))
    adapter.quantize(store, fresh.k, fresh.v, fresh.slots, fresh.positions)
    same(want, run(replace(fresh, store=store), checks.ALL), what="the pages held other tokens before")


@prop(
    "pages_move_whole",
    plain(maybe=("sketch", "witness", "bypass", "groups"), lengths=(3, 12), batch=(2, 3)),
    needs=("reorder",),
    pinned=(FULL, replace(FULL, repaired=0.5)),
)
def _reorder(adapter: Adapter, case: Case) -> None:
    """Gathering, repeating and dropping pages moves every part of the store: the reads are bit-identical."""
    scene = build(adapter, replace(case, shuffled=True, repaired=0.0))
    want = scene.decode()
    size, table = case.layout.page_size, scene.read.page_table
    used = -(-scene.read.seq_lens // size)
    order = np.concatenate([table[b, : used[b]] for b in reversed(range(len(used)))])
    rng = np.random.default_rng(case.seed)
    order = np.concatenate([order, rng.choice(order, 2)])
    moved = np.zeros_like(table)
    start = 0
    for b in reversed(range(len(used))):
        moved[b, : used[b]] = np.arange(start, start + used[b])
        start += int(used[b])
    optional(adapter).take_pages(scene.store, order)
    got = scene.decode(page_table=moved)
    same(want, got, what="the pages were gathered in another order")
    if "repair" in adapter.info.offers:
        for b, p in ((b, 0) for b in range(len(used)) if used[b]):
            slot = optional(adapter).page_in(scene.store, int(moved[b, p]), 0)
            pages = np.full((len(used), case.layout.kv_heads, table.shape[1]), -1)
            pages[b, 0, p] = slot
            n = min(size, int(scene.read.seq_lens[b]))
            token = slice(scene.first[b], scene.first[b] + n)
            k, v = np.zeros((slot + 1, size, case.layout.head_dim)), np.zeros((slot + 1, size, case.layout.head_dim_v))
            k[slot, :n], v[slot, :n] = scene.k[token, 0], scene.v[token, 0]
            decoded = scene.decode(page_table=moved, exact_pages=pages)
            unmoved = replace(
                scene, read=replace(scene.read, page_table=moved, exact_pages=pages), exact_k=k, exact_v=v
            )
            relocated = replace(unmoved, slots=_slots(scene, moved))
            run(relocated, checks.READS, decoded)


def _slots(scene: Any, table: Array) -> Array:
    size = scene.case.layout.page_size
    slots = scene.slots.copy()
    for b, n in enumerate(scene.read.seq_lens):
        at = np.arange(n)
        slots[scene.first[b] : scene.first[b] + n] = table[b, at // size] * size + at % size
    return slots


@prop(
    "crop_leaves_the_rest",
    plain(lengths=(4, 12), maybe=("sketch",)),
    needs=("reorder",),
    pinned=(FULL, replace(FULL, layout=Layout(head_dim=8, sketch=2))),
)
def _crop(adapter: Adapter, case: Case) -> None:
    """A shorter read of the same pages, and a second turn written behind it, see only what they should."""
    scene = build(adapter, case)
    shorter = tuple(max(1, n - 2) for n in case.lengths)
    for b, n in enumerate(shorter):
        part = slice(scene.first[b] + n, scene.first[b] + case.lengths[b])
        count = part.stop - part.start
        scene.k[part] *= -0.5
        if count:
            adapter.quantize(scene.store, scene.k[part], scene.v[part], scene.slots[part], scene.positions[part])
    run(scene, checks.ALL)
    fresh = adapter.create(
        case.layout, len(adapter.stored(scene.store).codes), scene.calibration, layer=scene.layer, seed=scene.seed
    )
    adapter.quantize(fresh, scene.k, scene.v, scene.slots, scene.positions)
    at = np.divmod(scene.slots, case.layout.page_size)
    for name, want in vars(adapter.stored(fresh)).items():
        got = getattr(adapter.stored(scene.store), name)
        require(got is None or np.array_equal(got[at], want[at]), f"{name}: not what a fresh store holds")
    cut = replace(scene, read=replace(scene.read, seq_lens=np.asarray(shorter)))
    run(cut, checks.ALL)
