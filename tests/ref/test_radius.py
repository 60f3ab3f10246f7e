"""Tier B's radius, over every dither vector of tiny grids; nothing is sampled."""

import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp

from witcert_ref import attention, dither, golden, radius, sketch

from .strategies import FLOAT, dot, examples, quarters, rationals

grids = st.sampled_from([1, 2, 3, 4, 6])


def grid_values(n: int) -> list[Fraction]:
    return [Fraction(2 * i + 1, 2 * n) - Fraction(1, 2) for i in range(n)]


def residual(y: Fraction, xi: Fraction) -> Fraction:
    return round(y + xi) - xi - y  # Python rounds a Fraction's ties to even, as the writer does


@examples(100)
@given(st.fractions(-20, 20, max_denominator=64), grids, st.sampled_from([-9, -1, -0.25, 0.5, 3]))
def test_the_residual_is_subgaussian_up_to_its_bias(y: Fraction, n: int, rate: float) -> None:
    residuals = [residual(y, xi) for xi in grid_values(n)]
    assert all(abs(r) <= Fraction(1, 2) for r in residuals)
    gaps = {b - a for a, b in itertools.pairwise(sorted(residuals))}
    assert gaps <= {Fraction(1, n)}
    with mp.workdps(50):
        mean = mp.fsum(mp.exp(rate * golden.number(r)) for r in residuals) / n
        assert mean <= mp.exp(mp.mpf(rate) ** 2 / 24 + abs(mp.mpf(rate)) / (2 * n))


@examples(60)
@given(
    st.lists(quarters(-3, 3), min_size=3, max_size=3),
    st.lists(st.lists(st.fractions(-4, 4, max_denominator=32), min_size=3, max_size=3), min_size=1, max_size=3),
    st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=3, max_size=3),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([0.9, 0.3, 0.02]),
)
def test_few_dither_vectors_exceed_the_radius(
    q: list[float], keys: list[list[Fraction]], steps: list[float], n: int, delta: float
) -> None:
    u = golden.radius(q, steps, 0.5, len(keys), delta, n)
    weights = [a * s / 2 for a, s in zip(rationals(q), rationals(steps), strict=True)]
    failures = 0
    for xi in itertools.product(grid_values(n), repeat=3):
        errors = [dot(weights, [residual(y, x) for y, x in zip(key, xi, strict=True)]) for key in keys]
        with mp.workdps(70):
            failures += any(golden.number(abs(error)) > u for error in errors)
    assert failures <= delta * n**3
    assert radius.radius(q, [steps], 0.5, len(keys), delta, n)[0] == pytest.approx(float(u), rel=FLOAT)


@pytest.mark.parametrize("with_sketch", [False, True])
def test_the_tier_b_certificate_fails_on_few_dither_vectors(with_sketch: bool) -> None:
    rng = np.random.default_rng(0)
    n, d, delta = 6, 3, 0.5
    scale = np.array([[0.5], [0.25]])
    keys = rng.integers(-40, 40, (2, d)) / 16
    q = np.array([1.0, -2.0, 0.5])
    u = np.array([[0.8, -0.6, 0.0]])
    exact = golden.softmax(keys @ q / 2)
    failures, meters = 0, []
    for xi in itertools.product((2 * np.arange(n) + 1) / (2 * n) - 0.5, repeat=d):
        k_hat = dither.dequantize(dither.quantize(keys, scale, xi), scale, xi)
        extra = {"u": u, "codes": sketch.encode(k_hat - keys, u, scale)} if with_sketch else {}
        certificate = attention.certify_tier_b(q, k_hat, scale, 0.5, delta, n, **extra)
        failures += bool(golden.total_variation(exact, certificate.p_tilde) > certificate.meter)
        meters.append(certificate.meter)
    assert failures <= delta * n**d
    assert certificate.guarantee == "fixed_trajectory"
    assert max(meters) < 0.5


def test_the_radius_of_known_numbers() -> None:
    q, s = np.array([3.0, -4.0]), 0.1
    want = 0.5 * (np.sqrt(2 * np.log(2 * 100 / 1e-3) * 25 * s**2 / 12) + 7 * s / 2**16)
    assert radius.radius(q, [[s]], 0.5, 100, 1e-3)[0] == pytest.approx(want, rel=1e-14)
    assert radius.radius(q, [[s], [np.inf]], 0.5, 100, 1e-3)[1] == np.inf
    assert radius.radius(np.zeros(2), [[np.inf]], 0.5, 100, 1e-3)[0] == np.inf


def test_the_budget_divides_by_layers_heads_and_steps() -> None:
    assert radius.delta_local(0.01, 4, 8, 32) == pytest.approx(0.01 / 1024)


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda: radius.delta_local(0, 1, 1, 1), ValueError, "delta_req"),
        (lambda: radius.delta_local(1.5, 1, 1, 1), ValueError, "delta_req"),
        (lambda: radius.delta_local(0.1, 0, 1, 1), ValueError, "layers"),
        (lambda: radius.delta_local(0.1, 1, 1, 1.5), TypeError, "steps"),  # type: ignore[arg-type]
        (lambda: radius.radius([1.0], [[1.0]], 1.0, 0, 0.1), ValueError, "tokens"),
        (lambda: radius.radius([1.0], [[1.0]], 1.0, 1, 0.0), ValueError, "delta_local"),
        (lambda: radius.radius([1.0], [[-1.0]], 1.0, 1, 0.1), ValueError, "scale"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=f"^{name}: got"):
        call()
