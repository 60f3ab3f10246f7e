"""What is not finite is marked, bounded by 1, counted, and stays where it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import checks
from ..adapter import Adapter, Dtype, Layout, optional
from ..arrays import round_to
from ..case import Case, Scene, build
from ..checks import require, same
from ..model import blocks
from ..registry import prop
from ..strategies import plain

TWO = Case(lengths=(5, 6))
BAD = (np.nan, np.inf, -np.inf)
KINDS = ("normal", "edge", "massive", "equal")


def spoiled(
    adapter: Adapter, case: Case, key: float | None = None, value: float | None = None
) -> tuple[Scene, int, int]:
    """The scene with one entry of one token of the first sequence replaced; the token and its kv head."""
    scene = build(adapter, case)
    rng = np.random.default_rng(case.seed)
    t, h = int(rng.integers(case.lengths[0])), int(rng.integers(case.layout.kv_heads))
    k, v = scene.k.copy(), scene.v.copy()
    if key is not None:
        k[t, h, rng.integers(k.shape[-1])] = key
    if value is not None:
        v[t, h, rng.integers(v.shape[-1])] = value
    adapter.quantize(scene.store, k, v, scene.slots, scene.positions)
    return replace(scene, k=k, v=v), t, h


def others_unchanged(case: Case, before: checks.Decoded, after: checks.Decoded, kv_head: int, what: str) -> None:
    """Rows of the other sequences, and other kv heads, report the same bits."""
    same(before, after, slice(1, None), what=what)
    heads = [h for h in range(before.meter.shape[1]) if h // case.group_heads != kv_head]
    if heads:
        same(before, after, slice(0, 1), heads, what=what)


@prop(
    "keys_that_are_not_finite",
    plain(keys=KINDS, batch=(2, 3), kv_heads=2),
    theorems=("tv_le_of_forall",),
    pinned=(
        TWO,
        *(replace(TWO, seed=s) for s in (1, 2)),
        *(replace(TWO, layout=Layout(head_dim=8, bypass=2), seed=s) for s in range(4)),
    ),
)
def _keys(adapter: Adapter, case: Case) -> None:
    """NaN or Inf in a key: meter 1 for rows that attend to it, finite output, and no other bit changes."""
    before = build(adapter, case).decode()
    for bad in BAD:
        scene, _, h = spoiled(adapter, case, key=bad)
        after = checks.run(scene, (*checks.READS, checks.meter_is_a_probability, checks.meter_covers_worst_case))
        others_unchanged(case, before, after, h, f"a key of another sequence or kv head became {bad}")
        group = slice(h * case.group_heads, (h + 1) * case.group_heads)
        require(
            (after.meter[0, group] == 1).all(),
            f"meter: got {after.meter[0, group].tolist()} with a key of {bad}, wants 1",
        )


@prop(
    "keys_beyond_the_scale",
    plain(keys=("normal",), batch=(2, 2), maybe=("equaliser",)),
    theorems=("tv_le_of_forall",),
    pinned=(TWO,),
)
def _overflow(adapter: Adapter, case: Case) -> None:
    """A finite key whose scale overflows is a lost key: meter 1, never NaN turned into 0."""
    case = replace(case, layout=replace(case.layout, dtype="float32"))
    for size in (3e38, -1e30, 1e9):
        scene, _, h = spoiled(adapter, case, key=size)
        stored = adapter.stored(scene.store)
        page, offset = np.divmod(scene.slots, case.layout.page_size)
        scale = stored.scale[page, offset]
        require(not np.isnan(scale).any(), "scale: got NaN, wants Inf for a key whose scale overflows")
        decoded = checks.run(scene, (*checks.READS, checks.meter_is_a_probability, checks.meter_covers_worst_case))
        lost = np.isinf(scale[: case.lengths[0], h]).any()
        covered = np.abs(scale[: case.lengths[0], h]).max() * 127 * scene.calibration.f.max() >= abs(size) / 4
        require(lost or covered, f"scale: got {scale[: case.lengths[0], h].tolist()} for a key of {size}, wants Inf")
        require(np.isfinite(decoded.out).all(), f"out: not finite with a key of {size}")


@prop(
    "logits_that_overflow",
    plain(keys=("normal",), batch=(2, 2)),
    theorems=("tv_le_of_forall",),
    needs=("bypass",),
    pinned=(replace(TWO, layout=Layout(head_dim=8, bypass=1)),),
)
def _logits(adapter: Adapter, case: Case) -> None:
    """A finite bypass key and a finite query whose product leaves float32: never an empty row, never NaN."""
    case = replace(case, layout=replace(case.layout, dtype="float32", bypass=max(1, case.layout.bypass)))
    scene = build(adapter, case)
    channel = scene.calibration.bypass_channels(case.layout)[0, 0]
    k = scene.k.copy()
    k[0, 0, channel] = 1e30
    adapter.quantize(scene.store, k, scene.v, scene.slots, scene.positions)
    for size in (1e20, -1e20):
        q = scene.read.q.copy()
        q[0, 0, channel] = size
        after = scene.decode(q=q)
        meter = after.meter[0, 0]
        require(0 < meter <= 1, f"meter: got {meter!r} with a logit of {size * 1e30:g}, wants a number in (0, 1]")
        require(not np.isnan(after.lse).any(), "lse: got NaN for finite keys and queries")
        require(not np.isnan(after.out).any(), "out: got NaN for finite keys and queries")


@prop(
    "queries_that_are_not_finite",
    plain(keys=KINDS, batch=(2, 3)),
    theorems=("tv_le_of_forall",),
    pinned=(TWO,),
)
def _queries(adapter: Adapter, case: Case) -> None:
    """NaN or Inf in a query: meter 1 for its cell, finite output, and no other cell changes."""
    scene = build(adapter, case)
    before = scene.decode()
    for bad in BAD:
        q = scene.read.q.copy()
        q[0, -1, -1] = bad
        after = scene.decode(q=q)
        require(after.meter[0, -1] == 1, f"meter: got {after.meter[0, -1]!r} with {bad} in the query, wants 1")
        require(not np.isnan(after.out).any(), f"out: got NaN with {bad} in the query")
        same(before, after, slice(1, None), what=f"a query of another row became {bad}")
        if q.shape[1] > 1:
            same(before, after, slice(0, 1), slice(0, -1), what=f"a query of another head became {bad}")


@prop(
    "values_that_are_not_finite",
    plain(keys=KINDS, batch=(2, 3)),
    theorems=("output_error_le",),
    needs=("value_error",),
    pinned=(TWO,),
)
def _values(adapter: Adapter, case: Case) -> None:
    """NaN or Inf in a value: value error +Inf, the meter as before, finite output, and no other row changes."""
    before = build(adapter, case).decode()
    for bad in BAD:
        scene, _, h = spoiled(adapter, case, value=bad)
        after = checks.run(scene, (checks.value_error_covers,))
        others_unchanged(case, before, after, h, f"a value of another sequence became {bad}")
        require(np.array_equal(before.meter, after.meter), f"meter: changed when a value became {bad}")
        require(not np.isnan(after.out).any(), f"out: got NaN with a value of {bad}")


LARGEST: dict[Dtype, float] = {"float32": 2.0**128 - 2.0**104, "float16": 65504.0, "bfloat16": 2.0**128 - 2.0**120}
"""Largest number of each dtype."""


@prop(
    "outputs_that_overflow",
    plain(keys=("normal", "equal"), batch=(1, 2), values=("normal",)),
    theorems=("output_error_le", "output_rounding_le"),
    needs=("value_error",),
    pinned=tuple(Case(layout=Layout(head_dim=2, head_dim_v=2, dtype=d), lengths=(4,)) for d in LARGEST),
)
def _outputs(adapter: Adapter, case: Case) -> None:
    """Values at the dtype's end: never NaN, and an output that is not finite has value error +Inf."""
    kinds = [False, *([True] if "extend" in adapter.info.offers else [])]
    for chunk in kinds:
        scene = build(adapter, replace(case, chunk=chunk, rows=tuple(1 for _ in case.lengths) if chunk else None))
        sign = np.where(np.random.default_rng(case.seed).random(case.layout.head_dim_v) < 0.5, -1.0, 1.0)
        end = LARGEST[case.layout.dtype] * sign
        if chunk:
            assert scene.read.v_new is not None
            scene = replace(scene, read=replace(scene.read, v_new=0 * scene.read.v_new + end))
        scene = replace(scene, v=0 * scene.v + end)
        adapter.quantize(scene.store, scene.k, scene.v, scene.slots, scene.positions)
        decoded = checks.run(scene, (checks.value_error_covers,))
        assert decoded.value_error is not None
        require(not np.isnan(decoded.out).any(), f"out: got NaN with values of {abs(end[0])!r}")
        lost = ~np.isfinite(decoded.out).all(-1)
        require(
            np.isinf(decoded.value_error[lost]).all(),
            f"value_error: got {decoded.value_error[lost].tolist()} for an output that is not finite, wants inf",
        )


@prop(
    "exact_values_of_any_size",
    plain(batch=(1, 2)),
    theorems=("output_error_le", "output_rounding_le"),
    needs=("value_error", "extend"),
    pinned=tuple(Case(layout=Layout(head_dim=2, head_dim_v=2, dtype=d)) for d in LARGEST),
)
def _sizes(adapter: Adapter, case: Case) -> None:
    """A chunk's values whose squares are below float32's range, and some whose sum is above it."""
    batch = len(case.lengths)
    scene = build(adapter, replace(case, lengths=(0,) * batch, rows=(4,) * batch, chunk=True))
    assert scene.read.v_new is not None
    spread = 0.8 + 0.2 * np.random.default_rng(case.seed).random(scene.read.v_new.shape)
    for size, q in ((2.0**-80, scene.read.q), (0.9 * LARGEST[case.layout.dtype], 0 * scene.read.q)):
        v = round_to(size * spread, case.layout.dtype)
        decoded = checks.run(replace(scene, read=replace(scene.read, q=q, v_new=v)), (checks.value_error_covers,))
        require(not np.isnan(decoded.out).any(), f"out: got NaN with values up to {v.max()!r}")


@prop(
    "empty_sequences",
    plain(lengths=(0, 3), batch=(2, 4)),
    theorems=("softmax_isProb",),
    pinned=(Case(lengths=(0,)), Case(lengths=(3, 0, 2)), Case(lengths=(0, 4))),
)
def _empty(adapter: Adapter, case: Case) -> None:
    """A sequence without tokens has out 0, lse −Inf and meter 0, and its neighbours are not disturbed."""
    checks.run(build(adapter, case), (*checks.READS, checks.meter_is_a_probability, checks.meter_covers_worst_case))


@prop(
    "unattended_slots_hold_anything",
    plain(keys=KINDS, batch=(1, 2), maybe=("sketch", "witness", "bypass")),
    needs=("page_reuse",),
    pinned=(Case(lengths=(5,)), Case(lengths=(1, 6), layout=Layout(page_size=4))),
)
def _poison(adapter: Adapter, case: Case) -> None:
    """NaN and extreme bytes in slots that nobody attends to change no bit."""
    scene = build(adapter, replace(case, spare_pages=2))
    before = scene.decode()
    pages = len(adapter.stored(scene.store).codes)
    unused = np.setdiff1d(np.arange(pages * case.layout.page_size), scene.slots)
    optional(adapter).poison(scene.store, unused)
    after = scene.decode()
    same(before, after, what="bytes changed in slots that no row attends to")
    for block in blocks(scene):
        checks.meter_is_a_probability(block, after)
