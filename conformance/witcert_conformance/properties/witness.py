"""The witness (Tier A): band norms of the residual, rounded up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from .. import checks
from ..adapter import Adapter, Info, Layout, optional
from ..case import Case, build
from ..checks import require, run
from ..exact import Dyadic, finite
from ..model import bypass_mask, steps_of, x_hat
from ..registry import prop
from ..strategies import ORDINARY, bands, plain
from .write import written

WITNESSED = Case(layout=Layout(head_dim=8, witness_bands=2), lengths=(7,), keys="normal")


@prop(
    "witness_covers_the_residual",
    plain(on=("witness",), keys=ORDINARY, maybe=("groups", "bypass"), lengths=(4, 16)),
    theorems=("abs_logit_error_le", "tierA_certificate"),
    needs=("witness",),
    pinned=(
        WITNESSED,
        replace(WITNESSED, lengths=(60,), layout=Layout(head_dim=8, witness_bands=4)),
        replace(WITNESSED, keys="edge"),
    ),
)
def _covers(adapter: Adapter, case: Case) -> None:
    """code · √(Σ s²)/508 ≥ the band's residual norm in exact arithmetic, by at most two codes."""
    scene = build(adapter, case)
    stored, at, layout = adapter.stored(scene.store), written(scene), case.layout
    assert stored.witness is not None
    band = np.eye(layout.witness_bands)[optional(adapter).bands(layout)]
    steps = steps_of(stored, layout)[at]
    lost = ~finite(stored.scale[at])[..., None]
    coded = ~bypass_mask(scene) & ~lost
    residual = Dyadic.of(np.where(coded, x_hat(scene, stored)[at], 0.0)) - Dyadic.of(np.where(coded, scene.k, 0.0))
    squares = ((residual * residual) @ Dyadic.of(band)) * Dyadic.of(508.0**2)
    units = (Dyadic.of(steps) * Dyadic.of(steps)) @ Dyadic.of(band)
    code = Dyadic.of(stored.witness[at])
    fine = squares.at_most(code * code * units) | lost
    for t, h, b in np.argwhere(~fine):
        norm = float((squares.near()[t, h, b] / units.near()[t, h, b]) ** 0.5)
        require(
            False,
            f"witness: got code {stored.witness[at][t, h, b]:.0f} at token {t}, band {b}, wants at least {norm!r}",
        )
    least = np.maximum(stored.witness[at] - 2, 0)
    loose = ~(Dyadic.of(least) * Dyadic.of(least) * units).at_most(squares) & ~lost
    require(not loose.any(), "witness: more than two codes above the residual's norm")


@prop(
    "witness_bounds_the_error",
    plain(
        on=("witness",),
        keys=("normal", "edge", "signs", "outlier"),
        queries=("normal", "signs", "one_hot"),
        scales=(1.0, 0.1),
    ),
    theorems=("tierA_certificate", "abs_dot_le_sum_bandNorm", "abs_logit_error_le"),
    needs=("witness",),
    pinned=(
        WITNESSED,
        replace(WITNESSED, lengths=(2,), scale=0.1, queries="signs"),
        replace(
            WITNESSED,
            lengths=(40,),
            layout=Layout(head_dim=8, witness_bands=4),
            keys="outlier",
            queries="one_hot",
            scale=4.0,
        ),
    ),
)
def _bounds(adapter: Adapter, case: Case) -> None:
    """c is the smaller of the half-step and Σ_b ‖w_b‖ ω_b: sound with the stored codes, and not loose."""
    run(build(adapter, case), (*checks.SOUND, checks.meter_is_useful))


BANDED = Layout(head_dim=16, witness_bands=4)


@dataclass(frozen=True)
class Bands:
    """Bands of a layout."""

    layout: Layout = BANDED

    def __repr__(self) -> str:
        from ..case import terse

        return terse(self)


@st.composite
def _bands(draw: st.DrawFn, info: Info) -> Bands:
    d = draw(st.sampled_from((*info.head_dims, 64)))
    rotary = draw(st.sampled_from((None, 2 * max(1, d // 4))))
    return Bands(
        Layout(
            head_dim=d, witness_bands=draw(bands(info, d)), rope_layout=draw(st.sampled_from(("half", "interleaved"))),
            rotary_dim=rotary,
        )
    )  # fmt: skip


@prop(
    "bands_keep_rope_pairs_together",
    _bands,
    theorems=("bandNorm_rope", "dot_rope_rope"),
    needs=("witness",),
    pinned=(Bands(),),
)
def _pairs(adapter: Adapter, case: Bands) -> None:
    """No band splits a RoPE pair, in either pair layout and with partial rotation; every band is used."""
    band = optional(adapter).bands(case.layout)
    split = band[case.layout.pairs[:, 0]] != band[case.layout.pairs[:, 1]]
    require(not split.any(), f"bands: pairs {case.layout.pairs[split].tolist()} are in two bands")
    require(set(band.tolist()) == set(range(case.layout.witness_bands)), f"bands: got {sorted(set(band.tolist()))}")
