"""What shifts a logit without changing its bound: sinks, soft cap, bias."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import checks
from ..adapter import Adapter, Layout
from ..case import Case, build
from ..checks import run
from ..registry import prop
from ..strategies import plain

SEEN = Case(lengths=(5, 7), group_heads=2)


@prop(
    "sinks_are_in_the_denominator",
    plain(on=("sinks",), lengths=(0, 10)),
    theorems=("read_certificate", "tv_tilt_le_meter_of_repaired"),
    needs=("sinks",),
    pinned=(replace(SEEN, sinks=True), replace(SEEN, sinks=True, lengths=(0, 2))),
)
def _sinks(adapter: Adapter, case: Case) -> None:
    """A sink is a token with value 0 and c = 0 in the denominator."""
    kinds = [*checks.ALL]
    if "value_error" in adapter.info.offers:
        kinds.append(checks.value_error_covers)
    run(build(adapter, case), kinds)


@prop(
    "sinks_count_once",
    plain(on=("sinks", "splits"), lengths=(2, 12)),
    theorems=("merge_splits",),
    needs=("sinks", "splits"),
    pinned=(replace(SEEN, sinks=True, splits=3),),
)
def _once(adapter: Adapter, case: Case) -> None:
    """A sink counts once, never once a split."""
    run(build(adapter, case), checks.ALL)


@prop(
    "soft_cap_is_on_the_logit",
    plain(on=("soft_cap",), scales=(1.0, 4.0)),
    theorems=("abs_softcap_sub_le", "abs_tanh_sub_le"),
    needs=("soft_cap",),
    pinned=(
        replace(SEEN, soft_cap=2.0, scale=4.0),
        replace(SEEN, soft_cap=30.0),
        *(
            replace(SEEN, soft_cap=2.0, keys="edge", lengths=(2,), queries="signs", scale=s)
            for s in (64.0, 128.0, 256.0)
        ),
    ),
)
def _cap(adapter: Adapter, case: Case) -> None:
    """κ tanh(x/κ) is taken of the whole logit and never of its bound."""
    run(build(adapter, case), checks.ALL)


@prop(
    "bias_is_inside_the_cap",
    plain(on=("bias",), maybe=("soft_cap",)),
    theorems=("abs_softcap_sub_le",),
    needs=("bias",),
    pinned=(replace(SEEN, bias=True), replace(SEEN, bias=True, soft_cap=2.0)),
)
def _bias(adapter: Adapter, case: Case) -> None:
    """A bias is added before the cap and changes no bound."""
    run(build(adapter, case), checks.ALL)


@prop(
    "minus_infinity_masks",
    plain(on=("bias", "masked"), maybe=("soft_cap", "splits"), lengths=(1, 10)),
    theorems=("softmax_isProb",),
    needs=("bias",),
    pinned=(
        replace(SEEN, masked=True),
        replace(SEEN, masked=True, soft_cap=2.0),
        replace(SEEN, masked=True, lengths=(1,)),
    ),
)
def _masked(adapter: Adapter, case: Case) -> None:
    """A bias of −Inf masks a token, under a cap too; where it masks all, the row is empty."""
    run(build(adapter, case), checks.ALL)


@prop(
    "sm_scale_is_the_callers",
    plain(sm_scales=(1.0, 0.0625, 0.3), maybe=("groups", "witness")),
    theorems=("read_certificate", "abs_logit_error_le_half_step"),
    pinned=(replace(SEEN, sm_scale=0.0625), replace(SEEN, sm_scale=1.0, queries="after")),
)
def _scale(adapter: Adapter, case: Case) -> None:
    """The scale of a logit is the caller's, whatever the head's width, in the logit and in its bound."""
    run(build(adapter, case), checks.ALL)


@prop(
    "terms_that_cancel",
    plain(keys=("normal",), queries=("normal",), batch=(1, 1), maybe=("soft_cap",)),
    theorems=("tv_softmax_le_meter_of_rounding", "abs_add_le_of_rounding"),
    needs=("bypass", "bias", "equaliser", "sinks", "value_error"),
    pinned=(Case(layout=Layout(head_dim=8, head_dim_v=2), lengths=(9,)),),
)
def _cancel(adapter: Adapter, case: Case) -> None:
    """Large terms that leave a small logit: what float32 or float64 lost on the way is in the report."""
    kinds = (checks.meter_is_a_probability, checks.meter_covers_true_keys, checks.value_error_covers)
    layout = replace(case.layout, dtype="float32", head_dim=max(4, case.layout.head_dim), bypass=1)
    scene = build(adapter, replace(case, layout=layout, bias=True))
    # a bypass pair of 1000 against queries of 4003, and a bias that takes it back
    channels = scene.calibration.bypass_channels(layout)[0]
    k, q = scene.k * 2.0**-6, scene.read.q * 2.0**-6
    k[..., channels], q[..., channels] = 1000 + np.abs(k[..., channels]) * 2.0**-4, 4003.0
    k, q = (x.astype(np.float32).astype(np.float64) for x in (k, q))
    assert scene.read.bias is not None
    bias = (scene.read.bias - scene.read.sm_scale * 2 * 4003e3).astype(np.float32).astype(np.float64)
    adapter.quantize(scene.store, k, scene.v, scene.slots, scene.positions)
    run(replace(scene, k=k, read=replace(scene.read, q=q, bias=bias)), kinds)
    # q·mu = 2^60 + 1.5 - 2^60, beside a sink
    scene = build(
        adapter, replace(case, layout=replace(layout, bypass=0), equalised=True, sinks=True, bias=True, soft_cap=0.0)
    )
    big = 2.0**30
    mu, f, q = np.zeros_like(scene.calibration.mu), np.full_like(scene.calibration.f, 1 / big), 0 * scene.read.q
    mu[:, :3], q[..., :3] = (big, 1.5, big), (big, 1.0, -big)
    calibration = replace(scene.calibration, mu=mu, f=f)
    pages = len(adapter.stored(scene.store).codes)
    store = adapter.create(scene.case.layout, pages, calibration, layer=scene.layer, seed=scene.seed)
    k = 0 * scene.k + mu
    adapter.quantize(store, k, scene.v, scene.slots, scene.positions)
    read = replace(scene.read, q=q, sm_scale=1.0)
    run(replace(scene, k=k, store=store, calibration=calibration, read=read), kinds)
