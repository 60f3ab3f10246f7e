"""Arguments that are refused by name, before anything is written."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from ..adapter import Adapter, Budget, Layout
from ..case import Case, build
from ..checks import require
from ..registry import prop
from ..strategies import plain


def refused(name: str, call: object) -> None:
    """The call raises ValueError or TypeError and its text names the argument."""
    try:
        call()  # type: ignore[operator]
    except (ValueError, TypeError) as error:
        require(re.search(rf"\b{name}\b", str(error)) is not None, f"{name}: refused without naming it: {error}")
        return
    require(False, f"{name}: accepted")


@prop(
    "wrong_arguments_are_refused_by_name",
    plain(lengths=(3, 8), batch=(2, 2)),
    needs=("refusals",),
    pinned=(Case(layout=Layout(kv_heads=2), lengths=(5, 3)),),
    examples=8,
)
def _refusals(adapter: Adapter, case: Case) -> None:
    """Slots, shapes, pages, lengths and budgets out of range are refused by the argument's name; no byte changes."""
    scene = build(adapter, case)
    before, store, read = adapter.stored(scene.store), scene.store, scene.read
    k, v, at, positions = scene.k, scene.v, scene.slots, scene.positions
    beyond = np.where(np.arange(len(at)) == 0, len(before.codes) * case.layout.page_size, at)
    refused("slots", lambda: adapter.quantize(store, k, v, beyond, positions))
    refused("slots", lambda: adapter.quantize(store, k, v, np.where(beyond == beyond[0], -1, at), positions))
    refused("slots", lambda: adapter.quantize(store, k, v, np.zeros_like(at), positions))
    refused("k", lambda: adapter.quantize(store, k[..., :-1], v, at, positions))
    refused("v", lambda: adapter.quantize(store, k, v[:-1], at, positions))
    after = adapter.stored(store)
    require(
        np.array_equal(before.codes, after.codes) and np.array_equal(before.scale, after.scale),
        "store: written before the refusal",
    )
    for page in (len(before.codes), -1):
        table = read.page_table.copy()
        table[0, 0] = page
        refused("page_table", lambda table=table: adapter.decode(store, replace(read, page_table=table)))
    for length in (10**6, -1):
        lengths = np.where(np.arange(len(read.seq_lens)) == 0, length, read.seq_lens)
        refused("seq_lens", lambda lengths=lengths: adapter.decode(store, replace(read, seq_lens=lengths)))
    if case.layout.dither:
        refused("delta", lambda: adapter.decode(store, replace(read, budget=Budget(0.0, 1, 1, 1))))
