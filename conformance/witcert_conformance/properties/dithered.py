"""Tier B: the dither, its radius, its budget and its label."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from .. import checks
from ..adapter import Adapter, Array, Budget, Info, Layout, optional
from ..case import Case, Scene, build
from ..checks import require, run
from ..model import blocks, delta_local, slot_dither
from ..registry import prop
from ..strategies import ORDINARY, plain
from .write import residual_within_half_step, scale_covers_amax

DITHERED = Case(layout=Layout(head_dim=8, dither=True, dither_period=4, page_size=4), lengths=(9, 5))
TWO_TOKENS = Case(
    layout=Layout(head_dim=8, dither=True),
    lengths=(2,),
    keys="equal",
    queries="signs",
    scale=0.01,
    delta=0.5,
    group_heads=2,
)


@prop(
    "dither_is_from_the_counter",
    plain(on=("dither",), keys=ORDINARY, kv_heads=2, lengths=(1, 20)),
    theorems=("mgf_residual", "abs_residual_le"),
    needs=("dither",),
    pinned=(DITHERED, replace(DITHERED, layout=replace(DITHERED.layout, kv_heads=2), keys="edge")),
)
def _written(adapter: Adapter, case: Case) -> None:
    """ξ is drawn from Philox at (channel, period, kv head, layer) and centred: half-step residuals, nothing clips."""
    scene = build(adapter, case)
    residual_within_half_step(scene)
    scale_covers_amax(scene)


@prop(
    "dither_ignores_batch_and_pages",
    plain(on=("dither",), keys=ORDINARY, lengths=(6, 20), shuffled=True),
    theorems=("mgf_residual",),
    needs=("dither",),
    pinned=(
        replace(DITHERED, shuffled=True, written=3),
        *(replace(DITHERED, lengths=(15,), shuffled=True, seed=s) for s in (1, 2)),
    ),
)
def _anywhere(adapter: Adapter, case: Case) -> None:
    """Positions key the dither, wherever the page lies and however many tokens a call writes, on both sides."""
    scene = build(adapter, case)
    residual_within_half_step(scene)
    run(scene, checks.READS)


@prop(
    "read_draws_the_same_dither",
    plain(on=("dither",), keys=ORDINARY, kv_heads=2, maybe=("groups", "bypass", "splits"), lengths=(1, 20)),
    theorems=("read_certificate",),
    needs=("dither",),
    pinned=(
        DITHERED,
        replace(DITHERED, layout=replace(DITHERED.layout, dither_period=1)),
        replace(DITHERED, layout=replace(DITHERED.layout, kv_heads=3)),
    ),
)
def _read(adapter: Adapter, case: Case) -> None:
    """The reader subtracts the dither that the writer added; without a budget the half-step bounds any query."""
    run(build(adapter, case), checks.ALL)


@prop(
    "radius_is_what_the_theorem_says",
    plain(
        on=("dither",),
        delta=True,
        keys=ORDINARY,
        queries=("signs", "normal", "one_hot"),
        scales=(0.01, 0.1, 1.0),
        batch=(1, 2),
    ),
    theorems=("tierB_token", "tierB_all_tokens", "tierB_certificate", "sinh_le_mul_exp"),
    needs=("dither",),
    pinned=(
        TWO_TOKENS,
        replace(TWO_TOKENS, scale=1e-3),
        replace(TWO_TOKENS, delta=1e-6, lengths=(12,)),
        replace(TWO_TOKENS, layout=Layout(head_dim=16, dither=True)),
    ),
    examples=40,
)
def _radius(adapter: Adapter, case: Case) -> None:
    """The meter covers every error within the radius, with L = log(2 S/δ) and δ the local one, and is useful."""
    run(build(adapter, case), (checks.meter_covers_worst_case, checks.meter_is_useful))


@prop(
    "guarantee_is_the_weakest_used",
    plain(on=("dither",), delta=True, keys=("normal", "edge"), queries=("signs", "normal"), scales=(0.1, 0.01)),
    theorems=("tierB_certificate", "halfStep_certificate"),
    needs=("dither",),
    pinned=(TWO_TOKENS, replace(TWO_TOKENS, layout=Layout(head_dim=16, dither=True))),
)
def _label(adapter: Adapter, case: Case) -> None:
    """A number that used the radius is never labelled ``any_query``."""
    scene = build(adapter, case)
    decoded = scene.decode()
    require(decoded.guarantee in ("any_query", "fixed_trajectory"), f"guarantee: got {decoded.guarantee!r}")
    if decoded.guarantee == "any_query":
        for block in blocks(scene, read=replace(scene.read, budget=None)):
            checks.meter_covers_worst_case(block, decoded)
    plain_read = scene.decode(budget=None)
    require(
        plain_read.guarantee == "any_query",
        f"guarantee: got {plain_read.guarantee!r} without a budget, wants 'any_query'",
    )


@dataclass(frozen=True)
class Shares:
    """A budget."""

    delta: float = 0.01
    layers: int = 28
    heads: int = 16
    steps: int = 256


def _shares(info: Info) -> st.SearchStrategy[Shares]:
    whole = st.integers(1, 10_000)
    return st.builds(Shares, st.sampled_from((1.0, 0.01, 1e-9)), whole, whole, whole)


@prop(
    "budget_divides_by_layers_heads_and_steps",
    _shares,
    theorems=("request_budget", "deltaLocal_budget"),
    needs=("dither",),
    pinned=(Shares(),),
)
def _budget(adapter: Adapter, case: Shares) -> None:
    """δ of one certificate is δ over layers, heads and steps."""
    budget = Budget(case.delta, case.layers, case.heads, case.steps)
    got, want = optional(adapter).delta_local(budget), delta_local(budget)
    require(abs(got - want) <= 1e-12 * want, f"delta_local: got {got!r} for {budget}, wants {want!r}")


@prop(
    "residual_does_not_know_the_key",
    plain(on=("dither",), keys=("constant", "normal"), batch=(1, 1), lengths=(1, 1)),
    theorems=("mgf_residual", "frac_le_mean"),
    needs=("dither",),
    pinned=(Case(layout=Layout(head_dim=16, dither=True)),),
    examples=4,
)
def _uniform(adapter: Adapter, case: Case) -> None:
    """Over many pages the residual of one key is uniform on half a step either side: mean 0, variance 1/12."""
    scene = build(adapter, case)
    layout = replace(case.layout, dither_period=1)
    n = 2000 if not adapter.info.slow else 64
    pages = -(-n // layout.page_size)
    store = adapter.create(layout, pages, scene.calibration, layer=3, seed=scene.seed)
    k, v = np.repeat(scene.k, n, 0), np.repeat(scene.v, n, 0)
    adapter.quantize(store, k, v, np.arange(n), np.arange(n))
    stored = adapter.stored(store)
    repeated = replace(
        scene,
        k=k,
        v=v,
        slots=np.arange(n),
        positions=np.arange(n),
        store=store,
        layer=3,
        case=replace(case, layout=layout),
    )
    residual_within_half_step(repeated)
    ratio = k.reshape(n, -1) / stored.scale.reshape(-1, layout.kv_heads)[:n, :1]
    xi = _xi_of_head_0(repeated, n)
    residual = stored.codes.reshape(-1, layout.head_dim)[:n] - xi - ratio
    count = residual.size
    mean, spread = residual.mean(), np.square(residual).mean()
    require(abs(mean) < 6 * (1 / 12 / count) ** 0.5, f"residual: mean {mean:.4g} steps over {count}, wants 0")
    require(abs(spread - 1 / 12) < 6 * (1 / 180 / count) ** 0.5, f"residual: mean square {spread:.5g}, wants 1/12")


def _xi_of_head_0(scene: Scene, n: int) -> Array:
    """The dither of the first n slots in kv head 0, ``[n, d]``."""
    xi = slot_dither(scene)
    return xi.reshape(-1, *xi.shape[2:])[:n, 0]
