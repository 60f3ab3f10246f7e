"""The equaliser and the bypass: which coordinates keys are stored in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from .. import checks
from ..adapter import Adapter, Info, Layout, optional
from ..case import Case, build
from ..checks import require, run, same
from ..exact import finite
from ..model import bypass_mask
from ..registry import prop
from ..strategies import ORDINARY, plain
from .write import residual_within_half_step, scale_covers_amax, written

SHIFTED = Case(layout=Layout(head_dim=8), lengths=(6, 3), equalised=True)


@prop(
    "equalised_keys_are_within_half_step",
    plain(on=("equaliser",), keys=ORDINARY, kv_heads=2),
    theorems=("abs_dequantize_sub_le",),
    needs=("equaliser",),
    pinned=(SHIFTED,),
)
def _written(adapter: Adapter, case: Case) -> None:
    """(k − mu)/f is what is quantised: within half of f times the step of the key, exactly, with a scale that fits."""
    scene = build(adapter, case)
    residual_within_half_step(scene)
    scale_covers_amax(scene)


@prop(
    "equaliser_goes_into_the_query_once",
    plain(on=("equaliser",), kv_heads=2, maybe=("groups",)),
    theorems=("read_certificate", "softmax_add_const"),
    needs=("equaliser",),
    pinned=(SHIFTED, replace(SHIFTED, queries="peaked"), replace(SHIFTED, layout=Layout(kv_heads=3, head_dim=8))),
)
def _read(adapter: Adapter, case: Case) -> None:
    """z = q∘f, and lse is of the true logits: the common shift sm_scale·q·mu is in it."""
    run(build(adapter, case), checks.ALL)


@prop(
    "shift_meets_a_soft_cap",
    plain(on=("equaliser", "soft_cap")),
    theorems=("read_certificate",),
    needs=("equaliser", "soft_cap"),
    pinned=(replace(SHIFTED, soft_cap=2.0),),
)
def _cap(adapter: Adapter, case: Case) -> None:
    """sm_scale·q·mu is inside the soft cap."""
    run(build(adapter, case), checks.ALL)


@prop(
    "shift_meets_sinks",
    plain(on=("equaliser", "sinks")),
    theorems=("read_certificate",),
    needs=("equaliser", "sinks"),
    pinned=(replace(SHIFTED, sinks=True),),
)
def _sinks(adapter: Adapter, case: Case) -> None:
    """Centred logits are shifted back where a sink is among them."""
    run(build(adapter, case), checks.ALL)


@prop(
    "shift_meets_the_own_chunk",
    plain(on=("equaliser",), rows=(1, 3), chunk=True),
    theorems=("read_certificate",),
    needs=("equaliser", "extend"),
    pinned=(replace(SHIFTED, rows=(2, 1), chunk=True),),
)
def _chunk(adapter: Adapter, case: Case) -> None:
    """Centred logits are shifted back where the rows' own exact keys are among them."""
    run(build(adapter, case), checks.ALL)


@prop(
    "shift_meets_exact_pages",
    plain(on=("equaliser", "repair"), lengths=(6, 14)),
    theorems=("read_certificate",),
    needs=("equaliser", "repair"),
    pinned=(
        replace(SHIFTED, lengths=(12,), repaired=0.5, seed=2),
        replace(SHIFTED, lengths=(12,), repaired=0.5, seed=3),
    ),
)
def _exact(adapter: Adapter, case: Case) -> None:
    """Centred logits are shifted back where exact pages are among them."""
    run(build(adapter, case), checks.ALL)


@prop(
    "bypass_channels_are_kept",
    plain(on=("bypass",), keys=ORDINARY, kv_heads=2, maybe=("groups",)),
    theorems=("read_certificate",),
    needs=("bypass",),
    pinned=(Case(layout=Layout(head_dim=8, bypass=1), lengths=(6,), keys="outlier"),),
)
def _bypass(adapter: Adapter, case: Case) -> None:
    """Bypass channels keep the key's own bits, have code 0, and are left out of the group's amax."""
    scene = build(adapter, case)
    stored, at = adapter.stored(scene.store), written(scene)
    assert stored.bypass is not None
    lost = ~finite(stored.scale[at])[..., None]
    channels = np.broadcast_to(scene.calibration.bypass_channels(case.layout), stored.bypass[at].shape)
    want = np.take_along_axis(scene.k, channels, -1)
    require(((stored.bypass[at] == want) | lost).all(), "bypass: not the key's own bits")
    require(
        not stored.codes[at][np.broadcast_to(bypass_mask(scene), scene.k.shape)].any(),
        "codes: not 0 on a bypass channel",
    )
    residual_within_half_step(scene)
    scale_covers_amax(scene)


@prop(
    "bypass_is_read_exactly",
    plain(on=("bypass",), kv_heads=2, maybe=("groups", "equaliser", "witness")),
    theorems=("read_certificate",),
    needs=("bypass",),
    pinned=(
        Case(layout=Layout(head_dim=8, bypass=1), lengths=(6,), keys="outlier"),
        *(Case(layout=Layout(kv_heads=3, head_dim=8, bypass=1), lengths=(6,), keys="outlier", seed=n) for n in (0, 1)),
    ),
)
def _bypass_read(adapter: Adapter, case: Case) -> None:
    """Bypass channels are in the logit once, exactly, and not in c."""
    run(build(adapter, case), checks.ALL)


@prop(
    "a_calibration_belongs_to_its_bytes",
    plain(on=("equaliser",), maybe=("sketch",), batch=(1, 1)),
    theorems=("read_certificate",),
    needs=("binding", "equaliser"),
    pinned=(SHIFTED,),
)
def _binding(adapter: Adapter, case: Case) -> None:
    """Bytes are read with the calibration that wrote them; another one is refused."""
    scene = build(adapter, case)
    mine = scene.calibration
    same(scene.decode(), optional(adapter).read_with(scene.store, mine, scene.read), what="read with the writer's own")
    others = {"mu": replace(mine, mu=mine.mu + 1), "f": replace(mine, f=mine.f * 2)}
    if case.layout.sketch:
        others["u"] = replace(mine, u=-mine.u)
    for name, other in others.items():
        try:
            optional(adapter).read_with(scene.store, other, scene.read)
        except ValueError:
            continue
        require(False, f"calibration: one of another {name} than the writer's was accepted")


WIDE = Layout(head_dim=8)


@dataclass(frozen=True)
class Fitted:
    """Keys to fit an equaliser to; some channels constant."""

    layout: Layout = WIDE
    constant: float = 0.0
    seed: int = 0

    def __repr__(self) -> str:
        from ..case import terse

        return terse(self)


def _fits(info: Info) -> st.SearchStrategy[Fitted]:
    layouts = st.builds(
        Layout,
        kv_heads=st.integers(1, 2),
        head_dim=st.sampled_from((4, 8, 16)),
        rope_layout=st.sampled_from(("half", "interleaved")),
    )
    return st.builds(Fitted, layouts, st.sampled_from((0.0, 7.5, -3e4)), st.integers(0, 99))


@prop(
    "constant_channels_have_a_step",
    _fits,
    theorems=("read_certificate",),
    needs=("fit",),
    pinned=(Fitted(), Fitted(constant=7.5)),
)
def _fit(adapter: Adapter, case: Fitted) -> None:
    """A fitted f is positive, finite and equal within a RoPE pair, also where a channel never moved."""
    rng, layout = np.random.default_rng(case.seed), case.layout
    keys = rng.normal(size=(20, layout.kv_heads, layout.head_dim)) + 5 * rng.normal(size=layout.head_dim)
    still = layout.pairs[rng.integers(len(layout.pairs))]
    keys[..., still] = case.constant
    keys = keys.astype(np.float32).astype(np.float64)
    mu, f = optional(adapter).fit(keys, layout)
    require(np.isfinite(mu).all() and np.isfinite(f).all(), "mu, f: not finite")
    require((f > 0).all(), f"f: got {f.min()!r}, wants numbers above 0")
    require((f[:, layout.pairs[:, 0]] == f[:, layout.pairs[:, 1]]).all(), "f: differs within a RoPE pair")
    # every key of the text is in reach: |k − mu| ≤ f up to rounding, but where f is the floor
    moving = np.setdiff1d(np.arange(layout.head_dim), still)
    reach = (np.abs(keys - mu) / f)[..., moving].max()
    require(reach <= 1 + 1e-4, f"f: a key of the text is {reach:.4g} half-ranges from mu, wants at most 1")
