"""Formal modules `Merge`, `Rounding` and `Output`, and the pending two-part meter: what a read adds up and reports."""

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st
from mpmath import mp

from witcert_ref import attention, golden, sketch, values

from .table import (
    Cell,
    Row,
    agrees,
    all_agree,
    bounds_of,
    cells,
    follows,
    matrix,
    minus,
    norm,
    rows,
    shares,
    vector,
)


def certify(y: list[Any], c: list[float], zeta: list[float] | None = None) -> Any:
    """The reported meter at 50 digits, min(1, meter(softmax y, c + ζ) + tanh(½ max ζ)); the reference has to agree."""
    rounding = [golden.number(z) for z in zeta or [0.0] * len(c)]
    meter = golden.meter(golden.softmax(y), [golden.number(a) + z for a, z in zip(c, rounding, strict=True)])
    exact = min(mp.mpf(1), meter + mp.tanh(max(rounding) / 2))
    agrees(attention.certify([float(t) for t in y], c, zeta=0.0 if zeta is None else zeta).meter, exact)
    return exact


@follows("tv_softmax_le_meter", "attention.certify", inputs=rows())
def any_difference_is_certified(row: Row) -> None:
    assert row.tv <= certify(row.y, row.c)


@follows("tv_tilt_le_meter_of_repaired", "attention.certify", inputs=st.tuples(rows(), st.sets(st.integers(0, 5))))
def repaired_tokens_have_no_bound_and_no_error(case: tuple[Row, set[int]]) -> None:
    row, repaired = case
    c = [0.0 if t in repaired else bound for t, bound in enumerate(row.c)]
    x = [Fraction(row.y[t]) if t in repaired else exact for t, exact in enumerate(row.x)]
    assert Row(row.y, c, x).tv <= certify(row.y, c)


@follows("tv_tilt_eq_zero_of_all_repaired", "attention.certify", inputs=rows())
def when_everything_is_repaired_attention_is_exact(row: Row) -> None:
    nothing = [0.0] * len(row.y)
    assert certify(row.y, nothing) == 0
    all_agree(attention.certify(row.y, nothing).p_tilde, golden.softmax(row.y))


@dataclasses.dataclass(frozen=True)
class Computed:
    """A row whose logits a kernel computed as z, |z - y| <= ζ."""

    row: Row
    zeta: list[float]
    z: list[float]


@st.composite
def computed(draw: st.DrawFn) -> Computed:
    row = draw(rows())
    zeta = draw(st.lists(st.sampled_from([0.0, 2.0**-20, 0.5]), min_size=len(row.y), max_size=len(row.y)))
    moved = draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=len(row.y), max_size=len(row.y)))
    return Computed(row, zeta, [y + s * e for y, s, e in zip(row.y, moved, zeta, strict=True)])


@follows("abs_add_le_of_rounding", "attention.certify", inputs=computed())
@follows("tv_softmax_le_meter_of_rounding", "attention.certify", inputs=computed())
def the_meter_covers_the_kernels_rounding(case: Computed) -> None:
    exact, stored, kernel = (golden.softmax(x) for x in (case.row.x, case.row.y, case.z))
    total = [Fraction(c) + Fraction(z) for c, z in zip(case.row.c, case.zeta, strict=True)]
    assert all(abs(e) <= most for e, most in zip(minus(case.z, case.row.x), total, strict=True))
    meter = certify(case.z, case.row.c, case.zeta)
    assert golden.total_variation(exact, kernel) <= meter
    assert golden.total_variation(exact, stored) <= meter


@dataclasses.dataclass(frozen=True)
class Known:
    """Logits y whose error has a known part r; what is left is at most c."""

    row: Row
    r: list[float]

    @property
    def x(self) -> list[Fraction]:
        return minus(self.row.x, self.r)


known = rows().flatmap(lambda row: st.builds(Known, st.just(row), vector(len(row.y), 4)))


def two_part_meter(case: Known, c: list[float]) -> Any:
    exact = golden.two_part_meter(case.row.y, case.r, c)
    # relative to 1: a known part that is nearly constant leaves the difference of two log-sum-exps
    agrees(sketch.two_part_meter(case.row.y, case.r, c), min(exact, 1), size=1)
    return exact


@follows("tv_softmax_le_known_add_meter", "sketch.two_part_meter", inputs=known)
def the_two_part_meter_certifies(case: Known) -> None:
    tv = golden.total_variation(golden.softmax(case.x), golden.softmax(case.row.y))
    assert tv <= two_part_meter(case, case.row.c)


@follows("tv_tilt_le_relative_deviation", "sketch.two_part_meter", inputs=known)
def the_known_part_is_bounded_by_its_deviation(case: Known) -> None:
    w, y = golden.softmax(minus(case.row.y, case.r)), golden.softmax(case.row.y)
    assert golden.total_variation(w, y) <= two_part_meter(case, [0.0] * len(case.r))


@dataclasses.dataclass(frozen=True)
class Splits:
    """Tokens and the split that each belongs to."""

    y: list[float]
    c: list[float]
    v: list[list[float]]
    split: list[int]


@st.composite
def splits(draw: st.DrawFn) -> Splits:
    tokens = draw(st.integers(1, 8))
    split = draw(st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens))
    return Splits(draw(vector(tokens, 8)), draw(bounds_of(tokens)), draw(matrix(tokens, 2)), split)


@follows("merge_splits", "attention.merge", inputs=splits())
def splits_merge_into_the_whole(case: Splits) -> None:
    members = [[t for t, s in enumerate(case.split) if s == label] for label in range(3)]  # some may be empty
    parts = [
        attention.part(
            [case.y[t] for t in ts], [case.c[t] for t in ts], np.reshape([case.v[t] for t in ts], (len(ts), 2))
        )
        for ts in members
    ]
    merged = attention.merge(parts)
    p = golden.softmax(case.y)
    out = [mp.fsum(w * golden.number(v[j]) for w, v in zip(p, case.v, strict=True)) for j in range(2)]
    all_agree(merged.out, out, size=2)
    a1, a2, c_max, log_a = golden.moments(p, case.c)
    agrees(merged.a1, a1)
    agrees(merged.a2, a2)
    agrees(merged.log_a, log_a, size=8 + log_a)  # a difference of log-sum-exps
    assert merged.c_max == c_max
    agrees(merged.lse, mp.log(mp.fsum(mp.exp(golden.number(y)) for y in case.y)), size=8)


@dataclasses.dataclass(frozen=True)
class Values:
    """Attention p over v against p̃ over v̂."""

    cell: Cell
    v: list[list[float]]
    v_hat: list[list[float]]
    center: list[float]
    eta: float
    moved: list[Fraction]


@st.composite
def value_cells(draw: st.DrawFn) -> Values:
    cell = draw(cells())
    n = len(cell.c)
    eta = draw(st.sampled_from([0.0, 2.0**-8, 0.5]))
    return Values(cell, draw(matrix(n, 3)), draw(matrix(n, 3)), draw(vector(3)), eta, draw(shares(n)))


def average(p: list[Any], v: list[list[float]]) -> list[Any]:
    return [mp.fsum(golden.number(w) * golden.number(x[j]) for w, x in zip(p, v, strict=True)) for j in range(3)]


@follows("output_error_le", "values.output_bound", inputs=value_cells())
def the_output_is_bounded_through_total_variation(case: Values) -> None:
    p, cell = golden.tilt(case.cell.p, case.cell.eps), case.cell
    tv = cell.tv
    reach = max(norm(minus(v, case.center)) for v in case.v)
    stored = mp.fsum(golden.number(w) * norm(minus(h, v)) for w, v, h in zip(cell.p, case.v, case.v_hat, strict=True))
    exact = 2 * tv * reach + stored
    agrees(values.output_bound(cell.weights, float(tv), case.v, case.v_hat, case.center), exact)
    error = norm([a - b for a, b in zip(average(p, case.v), average(cell.p, case.v_hat), strict=True)])
    assert error <= exact * (1 + mp.mpf(10) ** -golden.DIGITS)


@follows("output_rounding_le", "values.output_bound", inputs=value_cells())
def rounded_weights_move_the_output_little(case: Values) -> None:
    p, eta = case.cell.p, Fraction(case.eta)
    rounded = [w * (1 + eta * m) for w, m in zip(p, case.moved, strict=True)]
    exact = golden.number(eta) * mp.fsum(golden.number(w) * norm(h) for w, h in zip(p, case.v_hat, strict=True))
    agrees(values.output_bound(case.cell.weights, 0.0, case.v_hat, case.v_hat, weight_error=case.eta), exact)
    error = norm([a - b for a, b in zip(average(rounded, case.v_hat), average(p, case.v_hat), strict=True)])
    assert error <= exact * (1 + mp.mpf(10) ** -golden.DIGITS)
