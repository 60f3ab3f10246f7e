"""The writer: what is stored is within half a step of what came, whatever came."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Adapter, Array, Layout
from ..case import Case, Scene, build
from ..checks import require
from ..exact import Dyadic, finite
from ..model import bypass_mask, steps_of, x_hat
from ..registry import prop
from ..strategies import ORDINARY, plain

EDGE = Case(layout=Layout(head_dim=8), lengths=(6,), keys="edge")


def written(scene: Scene) -> tuple[Array, Array]:
    """Page and offset of every token of the scene."""
    page, offset = np.divmod(scene.slots, scene.case.layout.page_size)
    return page, offset


def residual_within_half_step(scene: Scene) -> None:
    """|f x̂ + mu − k| ≤ f s/2 (1 + widening) in exact arithmetic, on every coded channel of every finite key."""
    stored, at = scene.adapter.stored(scene.store), written(scene)
    x, steps = x_hat(scene, stored)[at], steps_of(stored, scene.case.layout)[at]
    f, mu = Dyadic.of(scene.calibration.f), Dyadic.of(scene.calibration.mu)
    lost = ~finite(stored.scale[at])
    k = np.where(lost[..., None], 0.0, scene.k)
    off = abs(Dyadic.of(x) * f + mu - Dyadic.of(k))
    allowed = Dyadic.of(steps) * f * Dyadic.of((1 + scene.adapter.info.step_widening) / 2)
    fine = off.at_most(allowed) | bypass_mask(scene) | lost[..., None]
    if not fine.all():
        t, h, j = np.argwhere(~fine)[0]
        share = float(off.near()[t, h, j] / max(steps[t, h, j] * scene.calibration.f[h, j], 5e-324))
        require(
            False,
            f"residual: got {share:.6g} steps at token {t}, kv head {h}, channel {j} (k = {scene.k[t, h, j]!r}, code "
            f"{stored.codes[at][t, h, j]:.0f}, step {steps[t, h, j]!r}), wants at most half a step",
        )


@prop(
    "residual_within_half_step",
    plain(keys=ORDINARY),
    theorems=("abs_residual_le", "abs_dequantize_sub_le", "abs_code_le"),
    pinned=(
        EDGE,
        replace(EDGE, keys="constant"),
        replace(EDGE, layout=Layout(head_dim=16), lengths=(60,), keys="normal"),
    ),
)
def _residual(adapter: Adapter, case: Case) -> None:
    """A stored key is within half a step of the key, in exact arithmetic."""
    residual_within_half_step(build(adapter, case))


@prop(
    "groups_have_their_own_scale",
    plain(on=("groups",), keys=ORDINARY),
    theorems=("abs_residual_le", "abs_dequantize_sub_le"),
    needs=("groups",),
)
def _groups(adapter: Adapter, case: Case) -> None:
    """With channel groups, a stored key is within half of its own group's step."""
    residual_within_half_step(build(adapter, case))


def scale_covers_amax(scene: Scene) -> None:
    """scale · levels ≥ the group's amax, and no more than two units in the last place above it."""
    layout, info = scene.case.layout, scene.adapter.info
    scale = scene.adapter.stored(scene.store).scale[written(scene)]
    lost = ~finite(scale)
    k = np.where(lost[..., None], 0.0, scene.k)
    coded = ~bypass_mask(scene)
    top = abs(Dyadic.of(k) - Dyadic.of(scene.calibration.mu))
    grouped = (*k.shape[:-1], layout.groups, -1)
    levels = info.levels_dither if layout.dither else info.levels
    room = Dyadic.of(
        np.repeat(np.where(lost[..., None], 0.0, scale), layout.head_dim // layout.groups, -1)
    ) * Dyadic.of(levels)
    # (k − mu)/f is rounded before its amax is taken
    allowed = room * Dyadic.of(scene.calibration.f) * Dyadic.of(1 + 2.0**-22)
    fine = (top.at_most(allowed) | ~coded | lost[..., None]).reshape(grouped).all(-1)
    amax = np.where(coded, np.abs((k - scene.calibration.mu) / scene.calibration.f), 0.0).reshape(grouped).max(-1)
    for t, h, g in np.argwhere(~fine):
        require(
            False,
            f"scale: got {scale[t, h, g]!r} at token {t}, kv head {h}, group {g}: {levels} of it do not cover the amax "
            f"{amax[t, h, g]!r}",
        )
    waste = scale > amax / levels * (1 + 2.0**-9) + 2.0**-23
    for t, h, g in np.argwhere(waste & ~lost[..., None]):
        require(
            False,
            f"scale: got {scale[t, h, g]!r} at token {t}, kv head {h}, group {g}, wants {amax[t, h, g] / levels!r}",
        )


@prop(
    "scale_covers_amax",
    plain(keys=ORDINARY),
    theorems=("abs_code_le_of_rounded_scale",),
    pinned=(replace(EDGE, keys="normal", lengths=(24,)),),
)
def _scale(adapter: Adapter, case: Case) -> None:
    """The stored scale is rounded up: it covers the group's amax, and is not wasteful."""
    scale_covers_amax(build(adapter, case))


@prop(
    "zero_groups_have_a_scale",
    plain(keys=("zeros", "tiny", "subnormal"), values=("zeros",)),
    theorems=("abs_residual_le",),
    pinned=(replace(EDGE, keys="zeros", values="zeros"), replace(EDGE, keys="subnormal")),
)
def _zeros(adapter: Adapter, case: Case) -> None:
    """A zero or tiny group gets a small positive scale, and no division by zero reaches a code or the output."""
    scene = build(adapter, case)
    stored, at = adapter.stored(scene.store), written(scene)
    for name, scale in (("scale", stored.scale[at]), ("v_scale", stored.v_scale[at])):
        require(
            (scale > 0).all() and np.isfinite(scale).all(),
            f"{name}: got {scale.min()!r}, wants a small positive number",
        )
    residual_within_half_step(scene)
    decoded = scene.decode()
    require(np.isfinite(decoded.out).all(), "out: got a number that is not finite for finite keys and values")


@prop(
    "writer_is_a_pure_function",
    plain(
        keys=(*ORDINARY, "zeros"),
        values=("normal", "edge"),
        lengths=(2, 12),
        maybe=("sketch", "witness", "bypass", "equaliser"),
    ),
    theorems=("abs_dequantize_sub_le",),
    pinned=(replace(EDGE, lengths=(24,)), replace(EDGE, lengths=(64,))),
)
def _pure(adapter: Adapter, case: Case) -> None:
    """The same key makes the same bytes in any batch, page order or chunking."""
    one, other = (build(adapter, replace(case, written=n, shuffled=s)) for n, s in ((64, False), (1, True)))
    a, b = adapter.stored(one.store), adapter.stored(other.store)
    for name in ("codes", "scale", "sketch", "witness", "bypass", "v_codes", "v_scale"):
        x, y = getattr(a, name), getattr(b, name)
        if x is not None and y is not None:
            x, y = x[written(one)], y[written(other)]
            require(
                np.array_equal(x, y), f"{name}: got other bytes for the same key, one token a call and in other pages"
            )


@prop(
    "values_within_half_step",
    plain(keys=("normal",), values=("normal", "edge", "large", "equal"), maybe=("groups",)),
    theorems=("abs_dequantize_sub_le", "output_error_le"),
    pinned=(replace(EDGE, keys="normal", values="edge"),),
)
def _values(adapter: Adapter, case: Case) -> None:
    """A stored value is within half a step of the value, in exact arithmetic."""
    scene = build(adapter, case)
    stored, at, layout = adapter.stored(scene.store), written(scene), case.layout
    steps = np.repeat(stored.v_scale[at], layout.head_dim_v // layout.groups_v, -1)
    off = abs(Dyadic.of(stored.v_codes[at]) * Dyadic.of(steps) - Dyadic.of(scene.v))
    fine = off.at_most(Dyadic.of(steps) * Dyadic.of((1 + adapter.info.step_widening) / 2))
    require(fine.all(), f"value: off by {float((off.near() / steps).max()):.6g} steps, wants at most half a step")


@prop(
    "dequantize_is_what_is_stored",
    plain(maybe=("groups", "equaliser", "bypass"), values=("normal", "edge")),
    theorems=("abs_dequantize_sub_le",),
    pinned=(EDGE, replace(EDGE, values="edge")),
)
def _dequantize(adapter: Adapter, case: Case) -> None:
    """``dequantize`` gives f x̂ + mu and v̂ of the stored bytes, up to float32's rounding."""
    scene = build(adapter, case)
    stored, at, layout = adapter.stored(scene.store), written(scene), case.layout
    x = x_hat(scene, stored)[at]
    steps_v = np.repeat(stored.v_scale[at], layout.head_dim_v // layout.groups_v, -1)
    want = x * scene.calibration.f + scene.calibration.mu, stored.v_codes[at] * steps_v
    lost = ~finite(stored.scale[at])[..., None]
    for name, got, wanted in zip(("k_hat", "v_hat"), adapter.dequantize(scene.store), want, strict=True):
        size = np.abs(x * scene.calibration.f) + np.abs(scene.calibration.mu) if name == "k_hat" else np.abs(wanted)
        fine = (np.abs(got[at] - wanted) <= 2.0**-21 * size + 1e-37) | (lost if name == "k_hat" else False)
        require(fine.all(), f"{name}: got {got[at][~fine].tolist()[:4]}, wants {wanted[~fine].tolist()[:4]}")


@prop(
    "byte_account_is_measured",
    plain(maybe=("groups", "sketch", "witness", "bypass"), lengths=(1, 6)),
    pinned=(EDGE,),
)
def _bytes(adapter: Adapter, case: Case) -> None:
    """The byte account is what the tensors take."""
    scene = build(adapter, case)
    account, layout = adapter.account(scene.store), case.layout
    pages = len(adapter.stored(scene.store).codes)
    want = pages * layout.kv_heads * (layout.page_size * (account.key + account.value) + account.page)
    got = adapter.allocated(scene.store)
    require(got == want, f"account: got {account}, {want} bytes for {pages} pages, but the tensors take {got}")
    least = layout.head_dim + layout.sketch + layout.witness_bands + 2 * layout.bypass * layout.itemsize + layout.groups
    require(account.key >= least, f"account: got {account.key} bytes a key, less than its entries: {least}")
