"""Heads, pages and rows: who reads what."""

from __future__ import annotations

from dataclasses import replace

from .. import checks
from ..adapter import Adapter, Layout
from ..case import Case, build
from ..checks import run
from ..registry import prop
from ..strategies import plain

GROUPED = Case(layout=Layout(kv_heads=2), lengths=(6,), group_heads=3)


@prop(
    "query_heads_read_their_kv_head",
    plain(kv_heads=2, group_heads=(1, 8), batch=(1, 2)),
    theorems=("any_of_group",),
    pinned=(GROUPED, replace(GROUPED, layout=Layout(kv_heads=3), group_heads=2)),
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
    pinned=(replace(GROUPED, lengths=(1, 13, 4)),),
)
def _ragged(adapter: Adapter, case: Case) -> None:
    """Sequences of different lengths in one call."""
    run(build(adapter, case), checks.ALL)
