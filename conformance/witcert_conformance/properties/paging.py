"""Heads, pages and rows: who reads what."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from .. import checks
from ..adapter import Adapter, Info, Layout
from ..case import Case, build
from ..checks import run
from ..registry import prop
from ..strategies import cases, plain

GROUPED = Case(layout=Layout(kv_heads=2), lengths=(6,), group_heads=3)


@prop(
    "query_heads_read_their_kv_head",
    plain(kv_heads=2, group_heads=(1, 16), batch=(1, 2)),
    theorems=("any_of_group",),
    pinned=(GROUPED, replace(GROUPED, layout=Layout(kv_heads=3), group_heads=2), replace(GROUPED, group_heads=32)),
)
def _gqa(adapter: Adapter, case: Case) -> None:
    """Query head h reads kv head h // G, at every ratio G."""
    run(build(adapter, case), checks.ALL)


@prop(
    "pages_in_any_order",
    plain(shuffled=True, lengths=(3, 14)),
    theorems=("sum_blockwise",),
    pinned=(replace(GROUPED, lengths=(13, 9), shuffled=True, seed=4),),
)
def _order(adapter: Adapter, case: Case) -> None:
    """Pages anywhere in the pool, table entries past a sequence's end anything: the same contracts, the same bits."""
    scene = build(adapter, case)
    decoded = run(scene, checks.ALL)
    checks.same(decoded, build(adapter, replace(case, shuffled=False)).decode(), what="the pages moved in the pool")


@prop(
    "ragged_batches",
    plain(batch=(3, 5), lengths=(0, 14)),
    theorems=("sum_blockwise",),
    pinned=(replace(GROUPED, lengths=(1, 13, 4)), replace(GROUPED, lengths=(9, 3, 0, 5, 7, 11))),
)
def _ragged(adapter: Adapter, case: Case) -> None:
    """Sequences of different lengths in one call."""
    run(build(adapter, case), checks.ALL)


@prop(
    "sequences_share_pages",
    plain(batch=(2, 3), lengths=(4, 14), maybe=("sketch", "witness", "dither", "splits"), shuffled=True),
    theorems=("sum_blockwise",),
    pinned=(replace(GROUPED, lengths=(13, 9), shuffled=True),),
)
def _shared(adapter: Adapter, case: Case) -> None:
    """Sequences whose page tables name the same pages, as with a shared prefix, read what copies of them would give."""
    scene = build(adapter, case)
    size, table = case.layout.page_size, scene.read.page_table.copy()
    k, v, slots = scene.k.copy(), scene.v.copy(), scene.slots.copy()
    for b in range(1, len(case.lengths)):
        pages = min(case.lengths[0], case.lengths[b]) // size
        here, there = (slice(scene.first[i], scene.first[i] + pages * size) for i in (b, 0))
        table[b, :pages] = table[0, :pages]
        k[here], v[here], slots[here] = k[there], v[there], slots[there]
    shared = replace(scene, k=k, v=v, slots=slots, read=replace(scene.read, page_table=table))
    decoded = run(shared, checks.ALL)
    pages = len(adapter.stored(scene.store).codes)
    copies = adapter.create(case.layout, pages, scene.calibration, layer=scene.layer, seed=scene.seed)
    adapter.quantize(copies, k, v, scene.slots, scene.positions)
    checks.same(adapter.decode(copies, scene.read), decoded, what="sequences share pages instead of holding copies")


TILE_ENDS = tuple(n for end in (16, 32, 64, 128) for n in (end - 1, end, end + 1))
"""Lengths about the ends of the tiles that kernels work in."""


@st.composite
def _ends(draw: st.DrawFn, info: Info) -> Case:
    drawn = draw(cases(info, maybe=("splits",), group_heads=(1, 2), batch=(1, 2)))
    return replace(drawn, lengths=tuple(draw(st.sampled_from(TILE_ENDS)) for _ in drawn.lengths))


@prop(
    "lengths_at_the_end_of_a_tile",
    _ends,
    theorems=("sum_blockwise", "merge_splits"),
    pinned=(
        Case(layout=Layout(page_size=1), lengths=(64, 65)),
        Case(layout=Layout(page_size=64), lengths=(129, 63), splits=2),
    ),
)
def _tiles(adapter: Adapter, case: Case) -> None:
    """One token fewer than a tile holds, as many, and one more, in pages of any size."""
    run(build(adapter, case), checks.ALL)


@st.composite
def _wide(draw: st.DrawFn, info: Info) -> Case:
    drawn = draw(
        cases(
            info, maybe=("sketch", "witness", "bypass", "equaliser"), lengths=(1, 3), batch=(1, 1), group_heads=(1, 1)
        )
    )
    widest = ((max(info.head_dims), max(info.head_dims_v)),)
    d, d_v = draw(st.sampled_from(info.wide_heads or widest))
    return replace(drawn, layout=replace(drawn.layout, head_dim=d, head_dim_v=d_v, rotary_dim=None))


@prop(
    "heads_of_real_models",
    _wide,
    theorems=("read_certificate",),
    pinned=(Case(layout=Layout(head_dim=80, head_dim_v=80), lengths=(5,)),),
    examples=5,
)
def _heads(adapter: Adapter, case: Case) -> None:
    """Heads wider than a power of two or a tile: 80, 192 beside 128, 256, absorbed MLA's 576 beside 512."""
    run(build(adapter, case), checks.ALL)
