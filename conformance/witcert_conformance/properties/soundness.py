"""The meter is a bound, for every error that the store allows, and not a useless one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from .. import checks, exact
from ..adapter import Adapter, Info, Layout
from ..case import Case, build
from ..checks import require
from ..exact import MP
from ..model import blocks
from ..registry import prop
from ..runner import profile
from ..strategies import plain

LAYOUT_FEATURES = ("groups", "sketch", "witness", "equaliser", "bypass", "dither")
PAIR = Case(layout=Layout(head_dim=2, head_dim_v=2), lengths=(2,), keys="edge", queries="signs", scale=0.1)
WITNESSED = Case(layout=Layout(head_dim=8, witness_bands=4), lengths=(12,), queries="after", equalised=True)
GROUPED = replace(WITNESSED, layout=Layout(head_dim=8, group=4, witness_bands=2))
MIDDLE = Case(layout=Layout(head_dim=8), lengths=(40,), keys="edge", values="edge", scale=0.25)
"""A sequence between the short ones that are drawn and a tile."""
CASES = (PAIR, replace(PAIR, keys="one_huge"), Case(lengths=(9,), keys="normal", queries="after"))


@prop(
    "logit_error_within_bound",
    plain(maybe=LAYOUT_FEATURES, queries=("normal", "after", "one_hot", "along_u", "peaked"), batch=(1, 1)),
    theorems=(
        "abs_corrected_error_le",
        "abs_logit_error_le_half_step",
        "abs_logit_error_le",
        "abs_scale_sum_le_half_step",
    ),
    pinned=(*CASES, WITNESSED, GROUPED, replace(WITNESSED, layout=Layout(head_dim=8, sketch=2, witness_bands=4))),
)
def _error(adapter: Adapter, case: Case) -> None:
    """Every token's logit error is at most c in exact rationals: from k, the stored bytes and q alone."""
    scene = build(adapter, case)
    for block in blocks(scene):
        for r in range(min(len(block.rows), 4)):
            fine = ~block.lost[: block.n]
            error = abs(block.error_exact(r))[: block.n]
            allowed = block.half_step_exact(r)
            broken = ~error.at_most(allowed) & fine & ~block.repaired
            for t in np.flatnonzero(broken)[:1]:
                require(
                    False,
                    f"logit error: got {error.near()[t] / 254!r} for token {t} at {checks.where(block, r)}, "
                    f"half a step and the sketch's own error allow {allowed.near()[t] / 254!r}",
                )
            if not block.witness.shape[1]:
                continue
            for t, c in zip(np.flatnonzero(block.attended[r]), block.bounds_mp(r), strict=True):
                got = abs(MP.mpf(int(error.ints[t])) * MP.mpf(2) ** error.exponent) / 254 if t < block.n else MP.zero
                require(
                    got <= c or not fine[t],
                    f"logit error: got {MP.nstr(got, 9)}, c is {MP.nstr(c, 9)} token {t}, {checks.where(block, r)}",
                )


FLAT = Case(layout=Layout(head_dim=2, head_dim_v=2), lengths=(2,), keys="nearly_equal", queries="signs")
MIXED = Case(layout=Layout(head_dim=8, head_dim_v=2), lengths=(6,), keys="massive", queries="signs", scale=16.0, seed=1)


@prop(
    "meter_covers_worst_case",
    plain(scales=(1.0, 0.1, 4.0, 16.0)),
    theorems=(
        "tv_softmax_le_meter",
        "tv_tilt_le_meter",
        "halfStep_certificate",
        "tv_softmax_le_meter_of_rounding",
        "sum_le_flSum_div",
    ),
    pinned=(
        *CASES,
        *(replace(FLAT, seed=s) for s in (3, 5, 6)),
        replace(FLAT, scale=0.25, seed=6),
        MIXED,
        replace(MIXED, scale=64.0),
        MIDDLE,
    ),
    examples=40,
)
def _worst(adapter: Adapter, case: Case) -> None:
    """The reported meter is at least the worst case over all errors within c, in any precision."""
    checks.run(build(adapter, case), (checks.meter_is_a_probability, checks.meter_covers_worst_case))


@prop(
    "meter_covers_any_query",
    plain(keys=("edge", "normal", "massive", "equal"), queries=("after", "signs", "one_hot", "peaked")),
    theorems=("halfStep_certificate", "read_certificate"),
    pinned=(Case(layout=Layout(head_dim=16), lengths=(12,), keys="edge", queries="after"),),
)
def _true(adapter: Adapter, case: Case) -> None:
    """Keys at the rounding edge and a query chosen after the cache was seen move attention by no more than reported."""
    checks.run(build(adapter, case), (checks.meter_covers_true_keys,))


@prop(
    "meter_is_useful",
    plain(queries=("normal", "after", "signs", "one_hot", "tiny", "zero"), scales=(1.0, 0.1, 0.01)),
    theorems=(
        "meter_lt_one",
        "meter_le_eform",
        "sharp_attained",
        "tv_tilt_le_phi",
        "tv_tilt_le_sharp",
        "tv_tilt_le_tanh",
    ),
    pinned=(
        *CASES,
        replace(PAIR, keys="massive", lengths=(12,), layout=Layout(head_dim=8)),
        MIDDLE,
    ),
    examples=40,
)
def _useful(adapter: Adapter, case: Case) -> None:
    """The reported meter is at most 1.01 of the exact meter, and rounding."""
    checks.run(build(adapter, case), (checks.meter_is_useful,))


@prop(
    "lse_is_of_the_stored_keys",
    plain(),
    theorems=("softmax_eq_tilt",),
    pinned=(*CASES, MIDDLE, Case(layout=Layout(head_dim=16), lengths=(9, 12), keys="signs", written=1, seed=373)),
)
def _lse(adapter: Adapter, case: Case) -> None:
    """lse is the natural log-sum-exp of the true logits of the stored keys."""
    checks.run(build(adapter, case), (checks.lse_is_of_the_stored_keys,))


@prop(
    "output_is_attention",
    plain(values=("normal", "edge", "large", "equal", "tiny"), maybe=("groups",)),
    theorems=("output_rounding_le",),
    pinned=(
        *CASES,
        MIDDLE,
        Case(lengths=(9,), values="large"),
        Case(layout=Layout(head_dim=2, head_dim_v=8, page_size=1), lengths=(9, 8, 3), values="tiny", seed=100000),
    ),
)
def _out(adapter: Adapter, case: Case) -> None:
    """The output is attention over the stored keys and values."""
    checks.run(build(adapter, case), (checks.output_is_attention,))


@prop(
    "risk_is_log_a",
    plain(scales=(1.0, 0.1, 8.0)),
    theorems=("one_le_expMean", "tv_tilt_le_eform"),
    needs=("risk",),
    pinned=(*CASES, MIDDLE, Case(lengths=(5,), keys="massive", queries="peaked")),
)
def _risk(adapter: Adapter, case: Case) -> None:
    """risk is log A, never truncated, and eform the paper's ½ (A² − 1)."""
    checks.run(build(adapter, case), (checks.risk_and_eform,))


@prop(
    "value_error_covers",
    plain(
        values=("normal", "edge", "large", "equal", "tiny", "zeros"),
        queries=("zero", "normal", "after", "peaked"),
        maybe=("groups",),
    ),
    theorems=("output_error_le", "output_rounding_le"),
    needs=("value_error",),
    pinned=(
        Case(lengths=(4,), values="edge", queries="zero"),
        Case(lengths=(1,), values="edge", queries="zero"),
        replace(MIDDLE, values="equal", queries="zero"),
    ),
)
def _value(adapter: Adapter, case: Case) -> None:
    """The value error covers the distance to exact attention over exact values, the output's rounding included."""
    checks.run(build(adapter, case), (checks.value_error_covers,))


@prop(
    "value_error_is_useful",
    plain(values=("normal", "edge", "large", "equal"), scales=(1.0, 0.1)),
    theorems=("output_error_le",),
    needs=("value_error",),
    pinned=(*CASES, replace(MIDDLE, scale=4.0)),
)
def _value_useful(adapter: Adapter, case: Case) -> None:
    """The reported value error is at most 1.02 · (2 · meter · R + Σ p̃ ρ), and rounding."""
    checks.run(build(adapter, case), (checks.value_error_is_useful,))


@prop(
    "long_sequences",
    plain(lengths=(500, 1600), batch=(1, 2), maybe=("splits", "equaliser"), group_heads=(1, 2), values=("normal",)),
    theorems=("merge_splits", "sum_blockwise"),
    pinned=(Case(lengths=(1300, 3), layout=Layout(head_dim=8), keys="normal"),),
    examples=6,
)
def _long(adapter: Adapter, case: Case) -> None:
    """All of it over more tokens than a tile holds."""
    if adapter.info.slow:
        case = replace(case, lengths=tuple(1 + n // 16 for n in case.lengths))
    checks.run(build(adapter, case), checks.ALL)


TOGETHER = Case(
    layout=Layout(kv_heads=2, head_dim=8, group=4, head_dim_v=4, page_size=2, sketch=2, witness_bands=2, bypass=1),
    lengths=(9, 0, 6), group_heads=2, keys="edge", queries="along_u", equalised=True, sinks=True, bias=True,
    repaired=0.3, shuffled=True,
)  # fmt: skip


@prop(
    "everything_together",
    plain(
        maybe=(*LAYOUT_FEATURES, "splits", "sinks", "soft_cap", "bias", "repair"),
        kv_heads=2,
        shuffled=True,
        lengths=(0, 14),
        values=("normal", "edge", "zeros"),
    ),
    theorems=("read_certificate",),
    pinned=tuple(replace(TOGETHER, splits=n, soft_cap=cap) for n in (None, 3) for cap in (0.0, 8.0)),
    examples=120,
)
def _together(adapter: Adapter, case: Case) -> None:
    """Every combination of what is offered, in one store and one read."""
    checks.run(build(adapter, case), checks.everything(adapter.info))


@dataclass(frozen=True)
class Cells:
    """Many cells at once: ``count`` of them (None: what the profile says), drawn from ``seed``."""

    seed: int = 0
    count: int | None = None


COUNTS = {"quick": 50_000, "mutants": 4_000, "ci": 500_000, "release": 200_000}
"""Cells of one example; the profile ``release`` draws five."""


def _cells(info: Info) -> st.SearchStrategy[Cells]:
    return st.builds(Cells, seed=st.integers(0, 2**20))


@prop(
    "meter_covers_half_a_million_cells",
    _cells,
    theorems=("tv_softmax_le_meter", "sharp_attained"),
    examples=1,
)
def _many(adapter: Adapter, case: Cells) -> None:
    """Half a million adversarial cells (10^6 in the profile ``release``): each is covered, none is useless."""
    info = adapter.info
    left = case.count or int(COUNTS[profile()] * info.cell_share)
    rng = np.random.default_rng(case.seed)
    group = 8 if info.cell_share < 1 else 256
    small = [d for d in info.head_dims if d <= 16] or list(info.head_dims)
    while left > 0:
        lengths = tuple(int(n) for n in rng.choice((1, 2, 3, 5, 16, 48), 8))
        one = Case(
            layout=Layout(
                head_dim=int(rng.choice(small)), head_dim_v=info.head_dims_v[0], page_size=max(info.page_sizes)
            ),
            lengths=lengths,
            group_heads=group,
            keys=str(rng.choice(("edge", "normal", "equal", "one_huge", "signs", "outlier", "constant", "zeros"))),
            queries=str(rng.choice(("signs", "normal", "after", "one_hot"))),
            scale=float(np.exp(rng.uniform(-5, 3))),
            seed=int(rng.integers(2**31)),
        )
        scene = build(adapter, one)
        # every head its own magnitude: flat and peaked attention, small and large c in one call
        size = np.exp(rng.normal(size=(1, scene.read.q.shape[1], 1)))
        scene = replace(scene, read=replace(scene.read, q=(scene.read.q * size).astype(np.float32).astype(np.float64)))
        decoded = scene.decode()
        for block in blocks(scene):
            checks.meter_covers_worst_case(block, decoded)
            checks.meter_is_useful(block, decoded)
            if rng.random() < 1 / len(lengths):
                _sampled(block, decoded, rng)
        left -= len(lengths) * group


def _sampled(block: checks.Block, decoded: checks.Decoded, rng: np.random.Generator) -> None:
    """One cell in mpmath, whatever float64 says."""
    r = int(rng.integers(len(block.rows)))
    least = exact.worst_case_mp(exact.softmax_mp(block.logits_mp(r)), block.bounds_mp(r))
    got = float(decoded.meter[block.rows[r], block.heads[r]])
    require(
        MP.mpf(got) >= least, f"meter: got {got!r} at {checks.where(block, r)}, wants at least {MP.nstr(least, 12)}"
    )
