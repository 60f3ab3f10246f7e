"""Hypothesis strategies. A property draws what it is about and leaves out the rest, so a failure names one cause."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from hypothesis import strategies as st

from .adapter import Info, Layout
from .arrays import KEYS, QUERIES
from .case import Case

LAYOUT_FEATURES = ("groups", "sketch", "witness", "equaliser", "bypass", "dither")
ORDINARY = ("normal", "edge", "outlier", "massive", "constant", "equal", "nearly_equal", "one_huge", "large", "signs")
"""Keys whose groups are neither zero nor tiny."""


def bands(info: Info, head_dim: int) -> st.SearchStrategy[int]:
    """Numbers of witness bands for a head of ``head_dim`` channels."""
    pairs = head_dim // 2
    return st.sampled_from([n for n in range(1, pairs + 1) if not info.even_bands or pairs % n == 0])


@st.composite
def layouts(draw: st.DrawFn, info: Info, features: Collection[str], kv_heads: int) -> Layout:
    """A layout with these features on, the others off."""
    d, d_v = draw(st.sampled_from(info.head_dims)), draw(st.sampled_from(info.head_dims_v))
    bypass = draw(st.integers(1, max(1, d // 4))) if "bypass" in features else 0
    widths = [g for g in (1, 2, 4, 8, 16, 32) if d % g == 0 and d_v % g == 0 and g < d]
    return Layout(
        kv_heads=kv_heads,
        head_dim=d,
        head_dim_v=d_v,
        page_size=draw(st.sampled_from(info.page_sizes)),
        dtype=draw(st.sampled_from(info.dtypes)),
        group=draw(st.sampled_from(widths)) if "groups" in features and widths else None,
        sketch=draw(st.integers(1, max(1, min(4, d - 2 * bypass)))) if "sketch" in features else 0,
        witness_bands=draw(bands(info, d)) if "witness" in features else 0,
        bypass=bypass,
        dither="dither" in features,
        dither_period=draw(st.sampled_from((1, 2, 4, 64))) if "dither" in features else 4,
        rope_layout=draw(st.sampled_from(("half", "interleaved"))),
        rotary_dim=draw(st.sampled_from((None, 2 * max(1, d // 4)))),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    info: Info,
    *,
    on: Collection[str] = (),
    maybe: Collection[str] = (),
    keys: Collection[str] = KEYS,
    queries: Collection[str] = QUERIES,
    values: Collection[str] = ("normal",),
    kv_heads: int = 1,
    group_heads: tuple[int, int] = (1, 3),
    lengths: tuple[int, int] = (1, 12),
    batch: tuple[int, int] = (1, 3),
    rows: tuple[int, int] | None = None,
    chunk: bool = False,
    shuffled: bool = False,
    delta: bool = False,
    scales: Collection[float] = (1.0, 0.1, 4.0),
    sm_scales: Collection[float | None] = (None,),
) -> Case:
    """A case. Features ``on`` are there always, ``maybe`` sometimes where offered.

    Besides those of a layout: splits, sinks, soft_cap, window, bias, masked, repair.
    """
    extra = [
        f for f in maybe if (f in info.offers or (f == "masked" and "bias" in info.offers)) and draw(st.booleans())
    ]
    features = {*on, *extra}
    count = draw(st.integers(*batch))
    tokens = draw(st.lists(st.integers(*lengths), min_size=count, max_size=count))
    per_row = None
    if rows is not None:
        per_row = tuple(draw(st.integers(rows[0], rows[1] if chunk else min(rows[1], max(n, rows[0])))) for n in tokens)
    return Case(
        layout=draw(layouts(info, features, kv_heads)),
        lengths=tuple(tokens),
        group_heads=draw(st.integers(*group_heads)),
        keys=draw(st.sampled_from(tuple(keys))),
        queries=draw(st.sampled_from(tuple(queries))),
        values=draw(st.sampled_from(tuple(values))),
        scale=draw(st.sampled_from(tuple(scales))),
        sm_scale=draw(st.sampled_from(tuple(sm_scales))),
        equalised="equaliser" in features,
        rows=per_row,
        chunk=chunk,
        causal=draw(st.sampled_from((True, True, False))) if rows is not None else True,
        sinks="sinks" in features,
        soft_cap=draw(st.sampled_from((2.0, 8.0, 30.0))) if "soft_cap" in features else 0.0,
        window_left=draw(st.integers(0, 6)) if "window" in features else -1,
        bias="bias" in features,
        masked="masked" in features,
        repaired=draw(st.sampled_from((0.3, 0.6, 1.0))) if "repair" in features else 0.0,
        delta=draw(st.sampled_from((0.5, 1e-2, 1e-6))) if delta else 0.0,
        splits=draw(st.integers(1, 6)) if "splits" in features else None,
        written=draw(st.sampled_from((64, 1, 3))),
        shuffled=shuffled,
        seed=draw(st.integers(0, 2**20)),
    )


def plain(**arguments: object) -> Callable[[Info], st.SearchStrategy[Case]]:
    """:func:`cases` waiting for an implementation's :class:`Info`."""
    return partial(cases, **arguments)  # type: ignore[arg-type]
