"""The suite's own arithmetic against rationals, enumeration and itself in another precision."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from witcert_conformance import Case, Layout, exact, load
from witcert_conformance.case import build
from witcert_conformance.exact import MP, Dyadic
from witcert_conformance.model import blocks
from witcert_conformance.philox import dither, first_word

numbers = st.floats(allow_nan=False, allow_infinity=False, width=64).filter(lambda x: abs(x) < 1e100)
vectors = st.integers(1, 6).flatmap(lambda n: st.tuples(*[st.lists(numbers, min_size=n, max_size=n)] * 2))


def fraction(x: Dyadic) -> list[Fraction]:
    return [Fraction(int(n)) * Fraction(2) ** x.exponent for n in np.ravel(x.ints)]


@given(vectors)
def test_dyadic_is_rational_arithmetic(pair: tuple[list[float], list[float]]) -> None:
    a, b = ([Fraction(x) for x in side] for side in pair)
    x, y = (Dyadic.of(np.asarray(side)) for side in pair)
    assert fraction(x) == a
    assert fraction(x + y) == [s + t for s, t in zip(a, b, strict=True)]
    assert fraction(x - y) == [s - t for s, t in zip(a, b, strict=True)]
    assert fraction(x * y) == [s * t for s, t in zip(a, b, strict=True)]
    assert fraction(x @ y) == [sum((s * t for s, t in zip(a, b, strict=True)), Fraction(0))]
    assert x.at_most(y).tolist() == [s <= t for s, t in zip(a, b, strict=True)]
    assert fraction(abs(x)) == [abs(s) for s in a]


def test_dyadic_keeps_subnormal_and_empty_arrays() -> None:
    tiny = np.asarray([5e-324, -0.0, 1.5])
    assert [float(f) for f in fraction(Dyadic.of(tiny))] == [5e-324, 0.0, 1.5]
    assert Dyadic.of(np.zeros((0, 3))).sum(0).near().tolist() == [0, 0, 0]


@st.composite
def distributions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    n = draw(st.integers(1, 7))
    p = np.asarray(draw(st.lists(st.floats(1e-6, 1), min_size=n, max_size=n)))
    c = np.asarray(draw(st.lists(st.one_of(st.just(0.0), st.floats(0, 0.2), st.floats(0, 6)), min_size=n, max_size=n)))
    return p / p.sum(), c


def enumerated(p: np.ndarray, c: np.ndarray) -> float:
    """The largest total variation at errors ±c over all sets of tokens."""
    inside = (np.arange(2 ** len(p))[:, None] >> np.arange(len(p))) & 1
    q = p * np.exp(np.where(inside, c, -c))
    return float(exact.total_variation(q / q.sum(1, keepdims=True), p[None]).max())


@settings(max_examples=200)
@given(distributions())
def test_worst_case_is_between_enumeration_and_the_meter(case: tuple[np.ndarray, np.ndarray]) -> None:
    p, c = case
    worst = float(exact.worst_case(p, c))
    assert enumerated(p, c) <= worst * (1 + 1e-12) + 1e-15
    assert worst <= float(exact.meter(p, c)) * (1 + 1e-12) + 1e-15


@settings(max_examples=60)
@given(distributions())
def test_worst_case_is_the_best_split_of_tokens(case: tuple[np.ndarray, np.ndarray]) -> None:
    """Tokens cut into equal parts approach the relaxed worst case from below."""
    p, c = case
    order = np.argsort(-c)
    parts = 400
    q, e = (np.repeat(x[order], parts) for x in (p / parts, c))
    inside = np.cumsum(np.concatenate([[0], q * np.exp(e)]))
    below = (q * np.exp(-e)).sum() - np.cumsum(np.concatenate([[0], q * np.exp(-e)]))
    mass = np.cumsum(np.concatenate([[0], q]))
    best = float((inside / (inside + below) - mass).max())
    worst = float(exact.worst_case(p, c))
    assert best <= worst * (1 + 1e-9) + 1e-12
    assert worst - best <= 4 * float(np.exp(c.max())) / parts


@settings(max_examples=60)
@given(distributions())
def test_float64_and_mpmath_agree(case: tuple[np.ndarray, np.ndarray]) -> None:
    p, c = case
    exact_p = [MP.mpf(x) for x in p]
    total = sum(exact_p)
    exact_p, exact_c = [x / total for x in exact_p], [MP.mpf(x) for x in c]
    for single, many in ((exact.worst_case_mp, exact.worst_case), (exact.meter_mp, exact.meter)):
        assert float(many(p, c)) == pytest.approx(float(single(exact_p, exact_c)), rel=1e-10, abs=1e-13)


def test_worst_case_is_attained_for_equal_bounds() -> None:
    """Where tanh(c/2) is sharp: p̃ = (1/(1 + e^c), …)."""
    c = 0.7
    p = np.asarray([1 / (1 + np.exp(c)), 1 - 1 / (1 + np.exp(c))])
    assert enumerated(p, np.asarray([c, c])) == pytest.approx(np.tanh(c / 2), rel=1e-12)
    assert float(exact.worst_case(p, np.asarray([c, c]))) == pytest.approx(np.tanh(c / 2), rel=1e-12)


def test_worst_box_respects_its_box() -> None:
    y, low, high = ([MP.mpf(t) for t in x] for x in ((0, 1), (0, 1), (0, 2)))
    moved = exact.tv_mp(exact.softmax_mp([MP.mpf(0), MP.mpf(2)]), exact.softmax_mp(y))
    assert exact.worst_box_mp(y, low, high) == moved


def test_philox_is_the_published_generator() -> None:
    """Random123's known answers for Philox4x32-10."""
    zero, ones = np.int64(0), np.int64(0xFFFFFFFF)
    assert first_word((zero,) * 4, 0) == 0x6627E8D5
    assert first_word((ones,) * 4, 2**64 - 1) == 0x408F276D


def test_dither_is_centred_on_its_grid() -> None:
    xi = dither(7, 3, np.arange(2)[None], np.arange(500)[:, None], 16)
    steps = (xi + 0.5) * 2**16
    assert xi.shape == (500, 2, 16)
    assert (steps == np.rint(steps)).all() and (np.rint(steps) % 2 == 1).all()
    assert abs(xi.mean()) < 6 * (1 / 12 / xi.size) ** 0.5


FULL = Case(
    layout=Layout(kv_heads=2, head_dim=8, head_dim_v=4, group=4, sketch=2, witness_bands=2, bypass=1, dither=True),
    lengths=(7, 4), group_heads=2, queries="after", equalised=True, rows=(2, 1), chunk=True, sinks=True, soft_cap=3.0,
    bias=True, repaired=0.5, delta=0.01,
)  # fmt: skip


def test_the_model_agrees_with_itself_in_another_precision() -> None:
    for seed in range(3):
        for block in blocks(build(load("twin"), Case(**{**vars(FULL), "seed": seed}))):
            for r in range(len(block.rows)):
                on = block.attended[r]
                assert np.allclose(block.y[r, on], np.asarray(block.logits_mp(r), float), rtol=1e-10, atol=1e-10)
                assert np.allclose(
                    block.x_true[r, on], np.asarray(block.true_logits_mp(r), float), rtol=1e-10, atol=1e-10
                )
                for upper in (False, True):
                    got = np.asarray(block.bounds_mp(r, upper=upper), float)
                    assert np.allclose(block.bounds[upper][r, on], got, rtol=1e-9, atol=1e-13)
