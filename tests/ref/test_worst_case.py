"""The three worst cases against each other, brute force, and an optimiser that knows none of their algebra."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray
from scipy.optimize import minimize

from witcert_ref import bounds, tv

from .strategies import cells, examples


def draw(seed: int, most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, most + 1))
    c = rng.exponential(rng.choice([0.05, 0.5, 3.0]), n)
    return rng.dirichlet(np.full(n, rng.choice([0.3, 1.0, 5.0]))), np.full(n, c[0]) if seed % 3 == 0 else c


@examples(100)
@given(cells(7))
def test_they_are_ordered(cell: tuple[list[float], list[float]]) -> None:
    p, c = tv.softmax(cell[0]), cell[1]
    relaxed, exact, (lower, eps) = (
        bounds.worst_case_relaxed(p, c),
        bounds.worst_case(p, c),
        bounds.worst_case_lower(p, c),
    )
    assert relaxed >= exact * (1 - 1e-12)
    assert exact >= lower * (1 - 1e-12)
    assert tv.total_variation(tv.tilt(p, eps), p) >= lower - 1e-15


@pytest.mark.parametrize("seed", range(30))
def test_exact_is_the_largest_total_variation_at_a_corner(seed: int) -> None:
    p, c = draw(seed, 7)
    corners = np.array(list(itertools.product([-1.0, 1.0], repeat=len(p)))) * c
    brute = tv.total_variation(tv.tilt(np.broadcast_to(p, corners.shape), corners), p).max()
    assert bounds.worst_case(p, c) == pytest.approx(brute, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_no_error_within_the_bounds_exceeds_exact(seed: int) -> None:
    p, c = draw(seed, 5)
    worst = bounds.worst_case(p, c)
    rng = np.random.default_rng(seed)
    found = []
    for start in rng.uniform(-1, 1, (6, len(p))):
        done = minimize(
            lambda x: -tv.total_variation(tv.tilt(p, np.clip(x, -1, 1) * c), p), start, bounds=[(-1, 1)] * len(p)
        )
        found.append(-done.fun)
    assert max(found) <= worst + 1e-12
    assert max(found) >= 0.5 * worst


def split_gain(x: NDArray[np.float64], p: NDArray[np.float64], c: NDArray[np.float64]) -> float:
    """P(S) - p̃(S) for the fractional set x in [0, 1]^n."""
    inside, outside = np.sum(x * p * np.exp(c)), np.sum((1 - x) * p * np.exp(-c))
    return float(inside / (inside + outside) - np.sum(x * p))


@pytest.mark.parametrize("seed", range(40))
def test_relaxed_is_the_optimum_over_fractional_sets(seed: int) -> None:
    p, c = draw(seed, 6)
    relaxed = bounds.worst_case_relaxed(p, c)
    rng = np.random.default_rng(seed)
    starts = [np.full(len(p), 0.5), *(np.exp(np.minimum(c - level, 0) * 20) for level in c), *rng.random((4, len(p)))]
    found = max(
        -minimize(
            lambda x: -split_gain(x, p, c),
            start,
            method="SLSQP",
            bounds=[(0, 1)] * len(p),
            options={"ftol": 1e-14, "maxiter": 500},
        ).fun
        for start in starts
    )
    assert found <= relaxed * (1 + 1e-10)
    assert found >= relaxed * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_relaxed_does_not_see_a_split_and_is_approached_by_splitting(seed: int) -> None:
    p, c = draw(seed, 3)
    relaxed = bounds.worst_case_relaxed(p, c)
    fine = np.repeat(p / 5, 5), np.repeat(c, 5)
    assert bounds.worst_case_relaxed(*fine) == pytest.approx(relaxed, rel=1e-12)
    assert bounds.worst_case(p, c) * (1 - 1e-12) <= bounds.worst_case(*fine) <= relaxed * (1 + 1e-12)
    many = bounds.worst_case_lower(np.repeat(p / 2000, 2000), np.repeat(c, 2000))[0]
    assert many == pytest.approx(relaxed, rel=1e-3)


def test_equal_bounds_are_a_subset_sum_that_no_order_solves() -> None:
    p, c = [0.6, 0.27, 0.13], [1.0, 1.0, 1.0]
    exact, (lower, _) = bounds.worst_case(p, c), bounds.worst_case_lower(p, c)
    assert lower < exact < bounds.worst_case_relaxed(p, c) == pytest.approx(np.tanh(0.5))


def test_what_is_attained_is_a_total_variation() -> None:
    """Sums of weights under large bounds round to more than 1."""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        n = int(rng.integers(2, 400))
        x = 10 * rng.standard_normal(n)
        assert bounds.worst_case_lower(tv.softmax(x), 300 * rng.random(n))[0] <= 1


def test_a_reference_moves_the_target() -> None:
    p, c = np.array([0.2, 0.3, 0.5]), np.array([0.1, 0.4, 0.2])
    q = np.array([0.4, 0.1, 0.5])
    assert bounds.worst_case(p, c, p) == bounds.worst_case(p, c)
    assert bounds.worst_case(p, np.zeros(3), q) == pytest.approx(tv.total_variation(p, q))
    corners = np.array(list(itertools.product([-1.0, 1.0], repeat=3))) * c
    brute = tv.total_variation(tv.tilt(np.broadcast_to(p, corners.shape), corners), q).max()
    assert bounds.worst_case(p, c, q) == pytest.approx(brute, rel=1e-12)


def test_what_cannot_be_enumerated_or_attained_is_refused() -> None:
    p = np.full(17, 1 / 17)
    with pytest.raises(ValueError, match=r"^p_tilde: got .* at most 16 tokens"):
        bounds.worst_case(p, p)
    with pytest.raises(ValueError, match=r"^c: got \+Inf"):
        bounds.worst_case_lower([0.5, 0.5], [np.inf, 0])
    with pytest.raises(ValueError, match=r"^reference: got"):
        bounds.worst_case([0.5, 0.5], [0, 0], [1.0])
