"""Repair: exact pages in place of compressed ones, and the gate that asks for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import checks
from ..adapter import Adapter, Array, Gated, Layout, optional
from ..case import Case, Scene, build, page_in
from ..checks import require, run
from ..model import blocks
from ..registry import prop
from ..strategies import plain

REPAIRED = Case(layout=Layout(head_dim=8), lengths=(11, 6), repaired=0.6, queries="after")
GATED = Case(
    layout=Layout(head_dim=8, kv_heads=2), lengths=(13, 6), group_heads=2, keys="massive", queries="after", scale=2.0
)


@prop(
    "repaired_pages_are_exact",
    plain(on=("repair",), lengths=(4, 14)),
    theorems=("tv_tilt_le_meter_of_repaired", "page_drop_not_exact", "read_certificate"),
    needs=("repair",),
    pinned=(REPAIRED, replace(REPAIRED, seed=1), replace(REPAIRED, repaired=1.0)),
)
def _exact(adapter: Adapter, case: Case) -> None:
    """A repaired page is read exactly, by its flag: c = 0, and the meter is that of the attention after the repair."""
    kinds = [*checks.ALL]
    if "value_error" in adapter.info.offers:
        kinds += [checks.value_error_covers, checks.value_error_is_useful]
    run(build(adapter, case), kinds)


@prop(
    "repaired_pages_have_no_sketch",
    plain(on=("repair", "sketch"), lengths=(4, 14)),
    theorems=("read_certificate",),
    needs=("repair", "sketch"),
    pinned=(replace(REPAIRED, layout=Layout(head_dim=8, sketch=2)),),
)
def _sketch(adapter: Adapter, case: Case) -> None:
    """No sketch correction reaches a repaired page."""
    run(build(adapter, case), checks.ALL)


@prop(
    "repaired_pages_have_no_witness",
    plain(on=("repair", "witness"), lengths=(4, 14)),
    theorems=("read_certificate",),
    needs=("repair", "witness"),
    pinned=(replace(REPAIRED, layout=Layout(head_dim=8, witness_bands=2)),),
)
def _witness(adapter: Adapter, case: Case) -> None:
    """No witness is left on a repaired page."""
    run(build(adapter, case), checks.ALL)


@prop(
    "a_wholly_repaired_read_is_exact",
    plain(lengths=(1, 14), values=("normal", "edge"), maybe=("sketch", "bypass", "equaliser")),
    theorems=("tv_tilt_eq_zero_of_all_repaired",),
    needs=("repair",),
    pinned=(Case(lengths=(6,)), Case(layout=Layout(head_dim=8, bypass=1), lengths=(6,), equalised=True)),
)
def _backing(adapter: Adapter, case: Case) -> None:
    """The backing store holds the very keys and values: with all pages in, attention is exact, the meter rounding."""
    scene = build(adapter, case)
    size = case.layout.page_size
    pages = -(-max(case.lengths) // size)
    table, k, v = page_in(scene, np.ones((len(case.lengths), case.layout.kv_heads, pages), bool))
    scene = replace(scene, read=replace(scene.read, exact_pages=table), exact_k=k, exact_v=v)
    decoded = run(scene, (*checks.READS, checks.meter_covers_true_keys))
    for block in blocks(scene):
        got = checks.cell(block, decoded.meter, "meter")
        worst = got - 2 * block.slack
        require((worst <= 0).all(), f"meter: got {got.max()!r} with every page exact, wants rounding only")


@prop(
    "repair_of_one_sequence_changes_no_other",
    plain(lengths=(1, 12), batch=(2, 3), kv_heads=2),
    theorems=("tv_tilt_le_meter_of_repaired",),
    needs=("repair",),
    pinned=(Case(lengths=(6, 5)), Case(layout=Layout(kv_heads=2), lengths=(9, 3, 7), group_heads=2)),
)
def _isolated(adapter: Adapter, case: Case) -> None:
    """Pages of one sequence become exact: not a bit of what the others report changes."""
    scene = build(adapter, case)
    pages = -(-max(case.lengths) // case.layout.page_size)
    wanted = np.zeros((len(case.lengths), case.layout.kv_heads, pages), bool)
    none, _, _ = page_in(scene, wanted)
    before = scene.decode(exact_pages=none)
    wanted[0] = True
    table, k, v = page_in(scene, wanted)
    after = replace(scene, read=replace(scene.read, exact_pages=table), exact_k=k, exact_v=v).decode()
    checks.same(before, after, rows=slice(1, None), what="another sequence's pages were repaired")


@prop(
    "lost_keys_are_repaired",
    plain(keys=("normal",), lengths=(4, 12), batch=(1, 2)),
    theorems=("tv_tilt_le_meter_of_repaired",),
    needs=("repair",),
    pinned=(Case(lengths=(6,)),),
)
def _lost(adapter: Adapter, case: Case) -> None:
    """A key beyond the scale is finite in the backing store: its repaired page no longer forces meter 1."""
    from .nonfinite import spoiled

    case = replace(case, layout=replace(case.layout, dtype="float32"))
    scene, t, h = spoiled(adapter, case, key=3e8)
    wanted = np.zeros((len(case.lengths), case.layout.kv_heads, -(-max(case.lengths) // case.layout.page_size)), bool)
    wanted[0, h, t // case.layout.page_size] = True
    table, k, v = page_in(scene, wanted)
    q = scene.read.q * 1e-8
    scene = replace(
        scene,
        read=replace(scene.read, q=q.astype(np.float32).astype(np.float64), exact_pages=table),
        exact_k=k,
        exact_v=v,
    )
    run(scene, (*checks.READS, checks.meter_covers_worst_case, checks.meter_is_useful))


def gated(adapter: Adapter, case: Case, tau: float) -> tuple[Scene, Gated]:
    """The scene and what the gate did; the scene's exact pages are those of the gate."""
    scene = build(adapter, case)
    return scene, optional(adapter).gate(scene.store, scene.read, tau)


def _tau(adapter: Adapter, case: Case) -> tuple[float, Array]:
    """A threshold between the meters of the ungated read, so that some heads are over and some are not."""
    meter = build(adapter, case).decode().meter
    seen = np.unique(meter[(meter > 0) & (meter < 1)])
    return (float(seen[len(seen) // 2]) if len(seen) else 0.5), meter


@prop(
    "gate_leaves_no_head_over",
    plain(
        kv_heads=2,
        group_heads=(1, 3),
        lengths=(4, 14),
        queries=("after", "one_head", "normal"),
        keys=("normal", "massive", "edge"),
    ),
    theorems=("any_of_group", "tv_tilt_le_meter_of_repaired"),
    needs=("gate", "repair"),
    pinned=(GATED, replace(GATED, queries="one_head"), replace(GATED, queries="one_head", seed=5)),
)
def _gate(adapter: Adapter, case: Case) -> None:
    """Any query head over the threshold repairs its kv head; what is reported is the decode after the last repair."""
    tau, before = _tau(adapter, case)
    scene, result = gated(adapter, case, tau)
    pages = -(-np.asarray(case.lengths) // case.layout.page_size)
    for b, h in np.ndindex(len(case.lengths), case.layout.kv_heads):
        heads = slice(h * case.group_heads, (h + 1) * case.group_heads)
        everything = result.repaired[b, h, : pages[b]].all()
        over = result.decoded.meter[b, heads] > tau
        require(everything or not over.any(), f"gate: sequence {b}, kv head {h} is over {tau} and has pages left")
        touched = result.repaired[b, h].any()
        require(touched == (before[b, heads] > tau).any(), f"gate: sequence {b}, kv head {h}: repaired {touched}")
    table, k, v = page_in(scene, result.repaired[..., : int(pages.max(initial=0))])
    again = replace(scene, read=replace(scene.read, exact_pages=table), exact_k=k, exact_v=v)
    run(again, checks.ALL, result.decoded)


@prop(
    "gate_ranks_by_risk_from_one_on",
    plain(kv_heads=2, group_heads=(1, 3), lengths=(4, 14), queries=("after", "one_head"), scales=(2.0, 8.0)),
    theorems=("any_of_group", "tv_tilt_le_eform"),
    needs=("gate", "repair", "risk"),
    pinned=(GATED, replace(GATED, scale=8.0), replace(GATED, queries="one_head", scale=8.0)),
)
def _ranked(adapter: Adapter, case: Case) -> None:
    """A threshold of 1 and more is on the paper's scale ½ (A² − 1), which the meter never reaches: risk is compared."""
    before = build(adapter, case).decode().risk
    assert before is not None
    seen = np.unique(before[np.isfinite(before) & (before > np.log(3) / 2)])
    level = float(seen[len(seen) // 2] + seen[len(seen) // 2 - 1]) / 2 if len(seen) > 1 else 1.0
    _, result = gated(adapter, case, float(np.expm1(2 * level) / 2))
    after = result.decoded.risk
    assert after is not None
    for b, h in np.ndindex(len(case.lengths), case.layout.kv_heads):
        heads = slice(h * case.group_heads, (h + 1) * case.group_heads)
        everything = result.repaired[b, h, : -(-case.lengths[b] // case.layout.page_size)].all()
        require(
            everything or not (after[b, heads] > level).any(),
            f"gate: sequence {b}, kv head {h} has risk {after[b, heads].tolist()} over {level} and has pages left",
        )
        touched = result.repaired[b, h].any()
        require(touched == (before[b, heads] > level).any(), f"gate: sequence {b}, kv head {h}: repaired {touched}")


@prop(
    "a_page_is_paged_in_once",
    plain(kv_heads=2, lengths=(6, 14), queries=("after",), keys=("normal", "massive")),
    theorems=("tv_tilt_le_meter_of_repaired",),
    needs=("gate", "repair"),
    pinned=(GATED,),
)
def _once(adapter: Adapter, case: Case) -> None:
    """No page of a kv head is paged in twice for one read, and at least a quarter of what is left goes each round."""
    _, result = gated(adapter, case, 1e-6)
    require(len(set(result.page_ins)) == len(result.page_ins), f"gate: paged in twice: {result.page_ins}")
    require(len(result.page_ins) == int(result.repaired.sum()), "gate: page-ins and repaired pages differ in number")
