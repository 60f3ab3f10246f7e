"""The golden specification and this implementation, written independently, agree to 40 digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import chain, combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from witcert_ref import golden

from . import implementation as ours
from .cases import Tilted, at_most, bound, check, dyadic, prob, tilted, vector
from .implementation import CTX, Real

Certificate = Callable[[ours.Vector, ours.Vector], Real]
TOLERANCE = CTX.mpf(10) ** -40
FLOOR = CTX.mpf(10) ** -55

CERTIFICATES: dict[str, Certificate] = {
    "eform": lambda p, c: ours.eform(ours.exp_mean(p, c)),
    "two_sided": ours.twosided,
    "sharp": lambda p, c: ours.sharp(ours.exp_mean(p, c), ours.exp_sd(p, c)),
    "phi": lambda p, c: ours.phi(ours.exp_mean(p, c)),
    "tanh": lambda _, c: ours.tanh(max(c)),
    "rc_tanh": lambda _, c: ours.rc_tanh(max(c)),
    "meter": lambda p, c: ours.tv_tilt_le_meter(p, c, max(c)),
}


def agree(theirs: Real, mine: Real) -> bool:
    """Equality to 40 significant digits."""
    return bool(abs(CTX.convert(theirs) - mine) <= TOLERANCE * abs(mine) + FLOOR)


def all_agree(theirs: Sequence[Real], mine: Sequence[Real]) -> bool:
    """Equality of vectors to 40 significant digits."""
    return all(agree(a, b) for a, b in zip(theirs, mine, strict=True))


def largest_excess(p: ours.Vector, c: ours.Vector) -> Real:
    """The largest excess that `mass_tilt_le` allows, over all sets of tokens."""
    tokens = range(len(p))
    members = chain.from_iterable(combinations(tokens, k) for k in range(len(p)))
    return max(ours.mass_tilt_le(p, c, m) - ours.total(p[t] for t in m) for m in members)


def sized(
    low: int, high: int, x: Callable[[int], st.SearchStrategy[list[float]]]
) -> st.SearchStrategy[tuple[list[float], list[float]]]:
    """A probability vector and a vector of the same size."""
    return st.integers(low, high).flatmap(lambda k: st.tuples(prob(k), x(k)))


@pytest.mark.parametrize("name", CERTIFICATES)
@check
@given(case=st.one_of(sized(1, 8, bound), sized(1, 8, lambda k: vector(k, 0, 40))))
@example(case=([1.0], [0.0]))
@example(case=([0.5, 0.5], [0.1, 0.1]))
@example(case=([1.0, 0.0], [0.5, 6.0]))
@example(case=([1 - 2**-40, 2**-40], [0.0, 60.0]))
@example(case=([0.25] * 4, [2.0**-40] * 4))
def test_certificate(name: str, case: tuple[list[float], list[float]]) -> None:
    p, c = case
    assert agree(getattr(golden, name)(p, c), CERTIFICATES[name](p, c))


@check
@given(sized(1, 6, bound))
def test_relaxed_worst_case(case: tuple[list[float], list[float]]) -> None:
    """It is at least the excess of every set, and `tv_tilt_le_meter` for tokens cut in two bounds it."""
    p, c = case
    worst = golden.worst_case_relaxed(p, c)
    assert at_most(largest_excess(p, c), worst)
    assert at_most(worst, ours.sharp_mad(p, c))
    assert at_most(worst, ours.tv_tilt_le_meter(p, c, max(c)))


@check
@given(dyadic(0, 20))
def test_relaxed_worst_case_is_attained(c_max: float) -> None:
    """`sharp_attained`, for one token cut in two."""
    assert agree(golden.worst_case_relaxed([1.0], [c_max]), ours.tanh(c_max))


@check
@given(sized(1, 8, bound))
def test_moments(case: tuple[list[float], list[float]]) -> None:
    p, c = case
    a = ours.exp_mean(p, c)
    assert all_agree(golden.moments(p, c), [a - 1, ours.exp_var(p, c) + (a - 1) ** 2, max(c), CTX.log(a)])


@check
@given(st.integers(1, 8).flatmap(lambda k: vector(k, -60, 60)))
def test_softmax(x: list[float]) -> None:
    assert all_agree(golden.softmax(x), ours.softmax(x))


@check
@given(st.integers(1, 8).flatmap(lambda k: st.tuples(prob(k), prob(k))))
def test_total_variation(case: tuple[list[float], list[float]]) -> None:
    assert agree(golden.total_variation(*case), ours.tv(*case))


@check
@given(sized(1, 8, lambda k: vector(k, -30, 30)))
def test_tilt(case: tuple[list[float], list[float]]) -> None:
    assert all_agree(golden.tilt(*case), ours.tilt(*case))


@check
@given(tilted())
def test_total_variation_of_a_tilt(case: Tilted) -> None:
    theirs = golden.total_variation(golden.tilt(case.p, case.eps), case.p)
    assert agree(theirs, ours.tv(ours.tilt(case.p, case.eps), case.p))


@check
@given(
    st.integers(1, 8).flatmap(lambda d: st.tuples(vector(d, -8, 8), vector(d, 0, 2))),
    dyadic(0, 2),
    st.integers(1, 2**20),
    st.integers(0, 40).map(lambda k: 2.0**-k),
    st.one_of(st.integers(1, 100), st.sampled_from([256, 32768])),
)
def test_radius(case: tuple[list[float], list[float]], sm_scale: float, tokens: int, delta: float, points: int) -> None:
    q, steps = case
    theirs = golden.radius(q, steps, sm_scale, tokens, delta, points)
    assert agree(theirs, ours.radius(sm_scale, points, q, steps, ours.tier_b_level(tokens, delta)))


@check
@given(dyadic(0, 1), st.integers(1, 64), st.integers(1, 64), st.integers(1, 10_000))
def test_radius_at_a_share_of_the_budget(part: float, layers: int, heads: int, steps: int) -> None:
    request = (part + 1) / 2
    delta = ours.delta_local(request, layers, heads, steps)
    exact = Fraction(request) / (layers * heads * steps)
    theirs = golden.radius([1.0, -0.5], [0.25, 0.125], 0.5, 100, exact, 64)
    assert agree(theirs, ours.radius(0.5, 64, [1.0, -0.5], [0.25, 0.125], ours.tier_b_level(100, delta)))
