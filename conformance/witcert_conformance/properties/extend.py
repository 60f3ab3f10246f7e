"""Several query rows a sequence: behind a stored prefix, or with their own exact chunk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from .. import checks
from ..adapter import Adapter, Info, Layout
from ..case import Case, build
from ..checks import require, run
from ..registry import prop
from ..strategies import LAYOUT_FEATURES, cases, plain
from .nonfinite import spoiled

ROWS = Case(lengths=(6, 4), rows=(3, 1))


@prop(
    "rows_see_no_later_token",
    plain(rows=(1, 4), lengths=(1, 10)),
    theorems=("tv_softmax_le_meter",),
    needs=("extend",),
    pinned=(ROWS, replace(ROWS, causal=False)),
)
def _causal(adapter: Adapter, case: Case) -> None:
    """Without a chunk of their own the rows are the pool's last tokens; a causal row sees none after its own."""
    run(build(adapter, case), checks.ALL)


@prop(
    "own_chunk_is_exact",
    plain(rows=(1, 4), lengths=(0, 8), chunk=True),
    theorems=("read_certificate", "tv_tilt_eq_zero_of_all_repaired"),
    needs=("extend",),
    pinned=(
        replace(ROWS, chunk=True),
        replace(ROWS, chunk=True, lengths=(0, 5)),
        replace(ROWS, chunk=True, causal=False),
    ),
)
def _chunk(adapter: Adapter, case: Case) -> None:
    """A row's own chunk is read exactly (c = 0) behind the compressed prefix."""
    kinds = [*checks.ALL]
    if "value_error" in adapter.info.offers:
        kinds += [checks.value_error_covers, checks.value_error_is_useful]
    run(build(adapter, case), kinds)


@prop(
    "ragged_rows",
    plain(rows=(0, 3), lengths=(0, 8), batch=(2, 4), chunk=True, kv_heads=2),
    theorems=("read_certificate",),
    needs=("extend",),
    pinned=(
        replace(ROWS, layout=Layout(kv_heads=2), lengths=(3, 0, 5), rows=(0, 2, 3), chunk=True),
        replace(ROWS, layout=Layout(kv_heads=2), lengths=(3, 4, 5), rows=(0, 2, 3)),
        replace(ROWS, layout=Layout(kv_heads=2), lengths=(3, 4, 5), rows=(1, 0, 0)),
    ),
)
def _ragged(adapter: Adapter, case: Case) -> None:
    """Sequences with no row, one or many, with and without a prefix, in one call."""
    run(build(adapter, case), checks.ALL)


@prop(
    "masked_keys_cannot_spoil_a_row",
    plain(rows=(2, 4), lengths=(4, 8), keys=("normal", "edge")),
    needs=("extend",),
    pinned=(replace(ROWS, rows=(4, 1)),),
)
def _spoiled(adapter: Adapter, case: Case) -> None:
    """A key that is not finite gives meter 1 to the rows that see it, and to none that the mask keeps from it."""
    case = replace(case, causal=True)
    scene, t, h = spoiled(adapter, case, key=np.nan)
    decoded = run(scene, checks.ALL)
    rows, n = case.rows[0] if case.rows else 1, case.lengths[0]
    sees = n - rows + np.arange(rows) >= t
    group = slice(h * case.group_heads, (h + 1) * case.group_heads)
    require((decoded.meter[:rows, group][sees] == 1).all(), "meter: below 1 for a row that attends to a NaN key")


@prop(
    "window_slides",
    plain(on=("window",), rows=(1, 3), lengths=(1, 12)),
    theorems=("tv_softmax_le_meter",),
    needs=("extend", "window"),
    pinned=(replace(ROWS, window_left=2), replace(ROWS, window_left=0)),
)
def _window(adapter: Adapter, case: Case) -> None:
    """A row at position p attends to positions from p − window_left."""
    run(build(adapter, case), checks.ALL)


@prop(
    "window_in_decode",
    plain(on=("window",), lengths=(1, 14), maybe=("splits",)),
    theorems=("tv_softmax_le_meter",),
    needs=("window",),
    pinned=(Case(lengths=(9,), window_left=3), Case(lengths=(9,), window_left=0, splits=3)),
)
def _window_decode(adapter: Adapter, case: Case) -> None:
    """The same for one row a sequence."""
    run(build(adapter, case), checks.ALL)


@prop(
    "window_over_a_chunk",
    plain(on=("window",), rows=(1, 4), lengths=(0, 10), chunk=True),
    theorems=("tv_softmax_le_meter",),
    needs=("extend", "window"),
    pinned=(replace(ROWS, chunk=True, window_left=1), replace(ROWS, chunk=True, window_left=4, rows=(3, 4))),
)
def _window_chunk(adapter: Adapter, case: Case) -> None:
    """A window reaches from the row's own position in its chunk back into the stored prefix."""
    run(build(adapter, case), checks.ALL)


def _prefills(info: Info) -> st.SearchStrategy[Case]:
    features = (*LAYOUT_FEATURES, "splits", "sinks", "soft_cap", "window", "bias", "repair")
    both = (
        cases(info, rows=(1, 3), chunk=chunk, maybe=features, kv_heads=2, lengths=(1, 14), shuffled=True)
        for chunk in (True, False)
    )
    return st.one_of(*both)


PREFILL = Case(
    layout=Layout(kv_heads=2, head_dim=8, head_dim_v=4, group=4, page_size=2, sketch=2, witness_bands=2, bypass=1),
    lengths=(9, 5), group_heads=2, keys="edge", queries="along_u", equalised=True, rows=(3, 2), chunk=True, sinks=True,
    bias=True, window_left=6, repaired=0.3, shuffled=True,
)  # fmt: skip


@prop(
    "everything_in_a_prefill",
    _prefills,
    theorems=("read_certificate",),
    needs=("extend",),
    pinned=(PREFILL, replace(PREFILL, chunk=False, soft_cap=8.0, splits=3)),
    examples=60,
)
def _prefill(adapter: Adapter, case: Case) -> None:
    """Several rows a sequence, with or without a chunk of their own, over every combination of what is offered."""
    run(build(adapter, case), checks.everything(adapter.info))


def _one_option(info: Info) -> st.SearchStrategy[Case]:
    offered = [feature for feature in LAYOUT_FEATURES if feature in info.offers]
    each = (cases(info, on=(f,), maybe=("window",), rows=(2, 4), lengths=(3, 14), kv_heads=2) for f in offered)
    return st.one_of(*each)


@prop(
    "rows_of_one_option",
    _one_option,
    theorems=("read_certificate",),
    needs=("extend",),
    pinned=tuple(
        replace(ROWS, layout=layout, equalised=layout == Layout())
        for layout in (
            Layout(dither=True, dither_period=4),
            Layout(sketch=1),
            Layout(witness_bands=2),
            Layout(bypass=1),
            Layout(group=2),
            Layout(),
        )
    ),
)
def _rows_of_one_option(adapter: Adapter, case: Case) -> None:
    """Several rows of a store with one option and no other: fast paths that a mix of options does not take."""
    run(build(adapter, case), checks.everything(adapter.info))
