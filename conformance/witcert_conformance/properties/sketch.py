"""The query sketch: the residual's coordinates along a few directions, subtracted from the logit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import checks
from ..adapter import Adapter, Layout
from ..case import Case, build
from ..checks import require, run
from ..exact import Dyadic, finite
from ..model import bypass_mask, steps_of, x_hat
from ..registry import prop
from ..strategies import ORDINARY, plain
from .write import written

SKETCHED = Case(layout=Layout(head_dim=8, sketch=2), lengths=(7,), keys="edge")


@prop(
    "sketch_codes_are_nearest",
    plain(on=("sketch",), keys=ORDINARY, maybe=("groups", "bypass")),
    theorems=("abs_corrected_error_le", "sketch_certificate", "sketch_single"),
    needs=("sketch",),
    pinned=(SKETCHED, replace(SKETCHED, keys="normal", lengths=(60,))),
)
def _codes(adapter: Adapter, case: Case) -> None:
    """|u·(x̂ − x) − code · unit| ≤ unit/2 (1 + widening) in exact arithmetic, and no code clamps."""
    scene = build(adapter, case)
    stored, at = adapter.stored(scene.store), written(scene)
    assert stored.sketch is not None
    steps = steps_of(stored, case.layout)[at]
    lost = ~finite(stored.scale[at])
    coded = ~bypass_mask(scene)
    x = np.where(coded & ~lost[..., None], x_hat(scene, stored)[at], 0.0)
    k = np.where(coded & ~lost[..., None], scene.k, 0.0)
    # without an equaliser (k − mu)/f is k itself
    residual = Dyadic.of(x) - Dyadic.of(k)
    for h in range(case.layout.kv_heads):
        u = Dyadic.of(scene.calibration.u[h])
        unit = Dyadic.of(steps[:, h]) @ abs(u).T
        got = Dyadic.of(stored.sketch[at][:, h]) * unit
        off = abs((residual[:, h] @ u.T) * Dyadic.of(254.0) - got)
        fine = off.at_most(unit * Dyadic.of((1 + adapter.info.sketch_widening) / 2)) | lost[:, h, None]
        require(
            fine.all(),
            f"sketch: off by {float((off.near() / unit.near())[~fine].max(initial=0)):.6g} units, wants half a unit",
        )


@prop(
    "sketch_is_subtracted",
    plain(on=("sketch",), maybe=("groups",), queries=("normal", "after", "along_u", "one_hot", "signs")),
    theorems=("sketch_certificate", "read_certificate"),
    needs=("sketch",),
    pinned=(SKETCHED, replace(SKETCHED, queries="along_u"), replace(SKETCHED, queries="along_u", scale=8.0)),
)
def _read(adapter: Adapter, case: Case) -> None:
    """The logit lacks the token's own coordinates along its own directions, with the right sign."""
    run(build(adapter, case), checks.READS)


@prop(
    "sketch_error_is_in_the_bound",
    plain(
        on=("sketch",),
        keys=("edge", "normal", "equal", "signs"),
        queries=("along_u", "normal", "signs"),
        scales=(1.0, 0.1),
    ),
    theorems=("sketch_certificate",),
    needs=("sketch",),
    pinned=(
        replace(SKETCHED, queries="along_u", lengths=(2,)),
        Case(layout=Layout(head_dim=2, sketch=1), lengths=(2,), keys="equal", queries="along_u", scale=0.1),
        *(
            Case(layout=Layout(head_dim=8, sketch=8), lengths=(2,), keys="equal", queries=q, scale=0.1)
            for q in ("along_u", "signs", "normal")
        ),
    ),
)
def _bound(adapter: Adapter, case: Case) -> None:
    """c counts what the query has outside the directions and the codes' own rounding, no less and no more."""
    run(build(adapter, case), (*checks.SOUND, checks.meter_is_useful))


@prop(
    "sketch_lives_in_equalised_coordinates",
    plain(on=("sketch", "equaliser"), maybe=("bypass", "groups", "soft_cap"), kv_heads=2),
    theorems=("read_certificate",),
    needs=("sketch", "equaliser"),
    pinned=(
        replace(SKETCHED, equalised=True),
        replace(SKETCHED, equalised=True, queries="along_u", soft_cap=2.0),
        replace(SKETCHED, equalised=True, layout=Layout(kv_heads=3, head_dim=8, sketch=2)),
    ),
)
def _equalised(adapter: Adapter, case: Case) -> None:
    """Residual, directions and coefficients are those of (k − mu)/f and q∘f; the correction is inside the cap."""
    run(build(adapter, case), checks.ALL)


@prop(
    "sketch_under_a_soft_cap",
    plain(on=("sketch", "soft_cap"), scales=(1.0, 4.0)),
    theorems=("read_certificate", "abs_softcap_sub_le"),
    needs=("sketch", "soft_cap"),
    pinned=(replace(SKETCHED, soft_cap=2.0, scale=4.0, queries="after"),),
)
def _capped(adapter: Adapter, case: Case) -> None:
    """The correction is applied before the soft cap."""
    run(build(adapter, case), checks.ALL)


@prop(
    "directions_stay_off_the_bypass",
    plain(on=("sketch", "bypass"), batch=(1, 1)),
    theorems=("read_certificate",),
    needs=("sketch", "bypass"),
    pinned=(replace(SKETCHED, layout=Layout(head_dim=8, sketch=2, bypass=1)),),
)
def _off_bypass(adapter: Adapter, case: Case) -> None:
    """Directions with a part on bypass channels are refused, or read soundly."""
    scene = build(adapter, case)
    u = scene.calibration.u.copy()
    channels = scene.calibration.bypass_channels(case.layout)
    for h in range(len(u)):
        u[h, :, channels[h]] = 0.5
    wrong = replace(scene.calibration, u=u)
    try:
        store = adapter.create(
            case.layout, len(adapter.stored(scene.store).codes), wrong, layer=scene.layer, seed=scene.seed
        )
    except ValueError:
        return
    adapter.quantize(store, scene.k, scene.v, scene.slots, scene.positions)
    run(
        replace(scene, store=store, calibration=wrong),
        (checks.meter_covers_true_keys, checks.lse_is_of_the_stored_keys),
    )
