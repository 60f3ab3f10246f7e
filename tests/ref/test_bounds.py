"""The bounds: sound against the worst case, in the order that the theorems give, and right where float64 ends."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp

from witcert_ref import bounds, golden, tv

from .strategies import FLOAT, cells, down, enumerated, examples

NAMES = ["eform", "two_sided", "rc_tanh", "tanh", "phi", "sharp", "meter"]


@examples(100)
@given(cells(5))
def test_every_bound_covers_the_worst_case(cell: tuple[list[float], list[float]]) -> None:
    y, c = cell
    p = golden.softmax(y)
    worst = golden.worst_case_relaxed(p, c)
    assert worst >= enumerated(p, c)
    for name in NAMES:
        assert getattr(golden, name)(p, c) >= worst, name


@examples(100)
@given(cells(12))
def test_the_meter_covers_what_an_error_attains(cell: tuple[list[float], list[float]]) -> None:
    y, c = cell
    p = golden.softmax(y)
    _, eps = bounds.worst_case_lower(tv.softmax(y), c)
    assert (np.abs(eps) <= c).all()
    attained = down(golden.total_variation(golden.tilt(p, eps), p))
    assert golden.meter(p, c) >= golden.worst_case_relaxed(p, c) >= attained


@examples(100)
@given(cells())
def test_the_meter_is_below_one_and_below_the_paper(cell: tuple[list[float], list[float]]) -> None:
    y, c = cell
    p = golden.softmax(y)
    meter = golden.meter(p, c)
    assert meter <= golden.eform(p, c)
    assert meter < 1
    assert golden.tanh(p, c) <= golden.rc_tanh(p, c)


@examples(150)
@given(cells(), st.sampled_from([*NAMES, "worst_case_relaxed"]))
def test_float64_agrees_with_fifty_digits(cell: tuple[list[float], list[float]], name: str) -> None:
    p, c = tv.softmax(cell[0]), cell[1]
    assert getattr(bounds, name)(p, c) == pytest.approx(float(getattr(golden, name)(p, c)), rel=FLOAT, abs=1e-300)


@examples(50)
@given(cells())
def test_moments_agree_and_give_the_meter(cell: tuple[list[float], list[float]]) -> None:
    p, c = tv.softmax(cell[0]), cell[1]
    a1, a2, c_max, log_a = bounds.moments(p, c)
    expected = golden.moments(p, c)
    for got, want in zip((a1, a2, c_max, log_a), expected, strict=True):
        assert got == pytest.approx(float(want), rel=FLOAT, abs=1e-300)
    # the variance loses the digits that a2 and a1² share
    slack = float(1e-7 * a1)
    assert bounds.meter_of_moments(a1, a2, c_max) == pytest.approx(bounds.meter(p, c), rel=FLOAT, abs=slack)


def test_two_tokens_of_equal_error_attain_the_sharp_bound() -> None:
    for c in (1e-12, 0.1, 1.0, 20.0):
        p = np.array([1, np.exp(c)]) / (1 + np.exp(c))
        tight = np.tanh(c / 2)
        for bound in (bounds.sharp, bounds.tanh, bounds.meter, bounds.worst_case, bounds.worst_case_relaxed):
            assert bound(p, [c, c]) == pytest.approx(tight, rel=1e-12), (bound, c)


@pytest.mark.parametrize(("a", "want"), [(1.5, 1 / 3), (2, 1 / 2), (3, 9 / 13), (10, 100 / 104)])
def test_phi_has_two_branches(a: float, want: float) -> None:
    p, c = [0.5, 0.5], [np.log(2 * a - 1), 0]
    assert bounds.phi(p, c) == pytest.approx(want, rel=1e-14)
    assert float(golden.phi(p, c)) == pytest.approx(want, rel=1e-14)


def test_the_dispersion_form_is_refuted() -> None:
    p, c, eps = [0.5, 0.5], [0.1, 0.1], [0.1, -0.1]
    truth, claimed = tv.total_variation(tv.tilt(p, eps), p), bounds.dispersion_unsound(p, c)
    assert (round(float(truth), 6), round(float(claimed), 6)) == (0.049834, 0.006423)
    assert bounds.meter(p, c) >= truth


def test_averaging_variances_is_refuted() -> None:
    mass = np.exp(-20)
    p, c = [1 - mass, mass], [0.0, 20.0]
    truth = tv.total_variation(tv.tilt(p, [0, -20]), p)
    assert bounds.variance_averaged_unsound(p, c) < 0.01 < 0.49 < truth <= bounds.meter(p, c)


def test_the_guards_are_not_exported() -> None:
    assert not {"dispersion_unsound", "variance_averaged_unsound"} & set(bounds.__all__)
    assert set(NAMES) | {"moments", "worst_case", "worst_case_relaxed", "worst_case_lower"} <= set(bounds.__all__)


@pytest.mark.parametrize("c", [[800, 800], [1e5, 0.1], [np.inf, 0.1], [np.inf, np.inf]])
def test_overflow_becomes_its_limit(c: list[float]) -> None:
    p = [0.5, 0.5]
    assert bounds.eform(p, c) == bounds.two_sided(p, c) == np.inf
    assert bounds.meter(p, c) == bounds.phi(p, c) == bounds.tanh(p, c) == bounds.worst_case_relaxed(p, c) == 1
    assert bounds.worst_case(p, c) == 0.5
    log_a = bounds.moments(p, c)[3]
    assert log_a == (np.inf if np.isinf(c).any() else pytest.approx(c[0] + np.log(np.exp(np.array(c) - c[0]).mean())))


def test_no_bound_is_truncated_where_its_token_hardly_weighs() -> None:
    p, c = [1 - 1e-300, 1e-300], [0.0, 690.0]
    assert bounds.moments(p, c)[0] == pytest.approx(1e-300 * np.exp(690.0))
    assert bounds.meter(p, c) == pytest.approx(bounds.worst_case_relaxed(p, c), rel=1e-12)
    assert bounds.moments([1.0, 0.0], [0.0, 1e6])[0] == 0
    assert bounds.meter([1.0, 0.0], [0.0, np.inf]) == 1  # the weight may have underflowed


def test_tiny_and_zero_bounds_keep_their_digits() -> None:
    p = [0.25, 0.75]
    assert bounds.meter(p, [1e-300, 1e-300]) == pytest.approx(5e-301, rel=1e-12)
    for name in [*NAMES, "worst_case", "worst_case_relaxed"]:
        assert getattr(bounds, name)(p, [0, 0]) == 0


def test_leading_axes_are_rows() -> None:
    rng = np.random.default_rng(0)
    p, c = rng.dirichlet(np.ones(7), (3, 4)), rng.exponential(size=(3, 4, 7))
    for name in [*NAMES, "worst_case_relaxed"]:
        bound: Callable[..., Any] = getattr(bounds, name)
        each = [[bound(p[i, j], c[i, j]) for j in range(4)] for i in range(3)]
        np.testing.assert_array_equal(bound(p, c), each)
        assert bound(p, c[0, 0]).shape == (3, 4)
    lower, eps = bounds.worst_case_lower(p, c)
    assert lower.shape == (3, 4) and eps.shape == p.shape


def test_adversarial_rows_at_scale() -> None:
    rng = np.random.default_rng(1)
    for alpha in (0.05, 1.0, 20.0):
        for spread in (1e-3, 0.1, 1.0, 8.0):
            p = rng.dirichlet(np.full(24, alpha), 4000)
            c = rng.exponential(spread, p.shape) * rng.choice([0, 1, 5], p.shape, p=[0.1, 0.8, 0.1])
            meter, relaxed = bounds.meter(p, c), bounds.worst_case_relaxed(p, c)
            lower, eps = bounds.worst_case_lower(p, c)
            assert (meter >= relaxed * (1 - 1e-12)).all()
            assert (relaxed >= lower * (1 - 1e-12)).all()
            assert (tv.total_variation(tv.tilt(p, eps), p) >= lower - 1e-14).all()


@pytest.mark.parametrize(
    ("p", "c", "name"),
    [
        ([0.5, 0.6], [0, 0], "p_tilde"),
        ([1.5, -0.5], [0, 0], "p_tilde"),
        ([], [], "p_tilde"),
        ([1.0, 0.0], [0.1], "c"),
        ([1.0, 0.0], [-0.1, 0], "c"),
        ([1.0, 0.0], [np.nan, 0], "c"),
        ([[1.0, 0.0]] * 3, [[0, 0]] * 2, "c"),
    ],
)
def test_bad_rows_are_refused(p: list[float], c: list[float], name: str) -> None:
    for bound in (bounds.moments, bounds.meter, bounds.worst_case_relaxed, bounds.worst_case_lower):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            bound(p, c)


def test_golden_takes_rationals_exactly() -> None:
    third = Fraction(1, 3)
    with mp.workdps(golden.DIGITS):
        assert golden.total_variation([third, 1 - third], [0.5, 0.5]) == mp.mpf(1) / 6
