"""Formal module `Basic`, and `tv_evict` of `Merge`: distributions, total variation, moments."""

from fractions import Fraction
from itertools import chain, combinations
from typing import Any

from hypothesis import strategies as st
from mpmath import mp

from witcert_ref import bounds, golden, tv

from .table import Cell, agrees, all_agree, cells, dyadic, follows, probabilities, vector

sizes = st.integers(1, 6)
logits = sizes.flatmap(lambda n: vector(n, 16))
pairs = sizes.flatmap(lambda n: st.tuples(probabilities(n), probabilities(n)))
triples = sizes.flatmap(lambda n: st.tuples(*[probabilities(n)] * 3))


def total_variation(p: list[Fraction], q: list[Fraction]) -> Fraction:
    """½ Σ |p - q|, exactly; the reference has to agree."""
    exact = sum((abs(a - b) for a, b in zip(p, q, strict=True)), Fraction(0)) / 2
    agrees(tv.total_variation([float(a) for a in p], [float(b) for b in q]), exact, size=1)
    return exact


@follows("softmax_isProb", "tv.softmax", inputs=logits)
def softmax_is_a_probability_vector(x: list[float]) -> None:
    p = tv.softmax(x)
    assert (p >= 0).all()
    agrees(p.sum(), 1)
    all_agree(p, golden.softmax(x))


@follows("softmax_add_const", "tv.softmax", inputs=st.tuples(logits, dyadic(8)))
def softmax_ignores_a_constant(case: tuple[list[float], float]) -> None:
    x, constant = case
    all_agree(tv.softmax([a + constant for a in x]), golden.softmax(x))


@follows("softmax_eq_tilt", "tv.tilt", inputs=sizes.flatmap(lambda n: st.tuples(vector(n, 8), vector(n, 8))))
def exact_attention_is_compressed_attention_with_the_error_removed(case: tuple[list[float], list[float]]) -> None:
    x, eps = case
    moved = [a + e for a, e in zip(x, eps, strict=True)]
    all_agree(tv.tilt(tv.softmax(moved), eps), golden.softmax(x))


@follows("tilt_isProb", "tv.tilt", inputs=cells())
def tilt_is_a_probability_vector(cell: Cell) -> None:
    p = tv.tilt(cell.weights, [float(e) for e in cell.eps])
    assert (p >= 0).all()
    agrees(p.sum(), 1)
    all_agree(p, golden.tilt(cell.p, [float(e) for e in cell.eps]))


@follows("tv_eq_sum_pos", "tv.total_variation", inputs=pairs)
def total_variation_is_the_sum_of_excesses(case: Any) -> None:
    p, q = case
    assert total_variation(q, p) == sum((b - a for a, b in zip(p, q, strict=True) if a < b), Fraction(0))


@follows("tv_le_of_forall", "tv.total_variation", inputs=pairs)
def a_bound_of_every_excess_bounds_total_variation(case: Any) -> None:
    p, q = case
    sets = chain.from_iterable(combinations(range(len(p)), n) for n in range(len(p) + 1))
    excess = max(sum((q[t] - p[t] for t in chosen), Fraction(0)) for chosen in sets)
    assert total_variation(q, p) <= excess


@follows("tv_comm", "tv.total_variation", inputs=pairs)
def total_variation_is_symmetric(case: Any) -> None:
    p, q = case
    assert total_variation(p, q) == total_variation(q, p)


@follows("tv_triangle", "tv.total_variation", inputs=triples)
def total_variation_has_the_triangle_inequality(case: Any) -> None:
    p, q, r = case
    assert total_variation(p, r) <= total_variation(p, q) + total_variation(q, r)


@follows(
    "tv_evict",
    "tv.total_variation",
    inputs=sizes.flatmap(lambda n: st.tuples(probabilities(n), st.sets(st.integers(0, n - 1)))),
)
def eviction_costs_the_dropped_mass(case: Any) -> None:
    p, kept = case
    mass = sum((p[t] for t in kept), Fraction(0))
    if mass > 0:
        assert total_variation(p, [p[t] / mass if t in kept else Fraction(0) for t in range(len(p))]) == 1 - mass


def exact_moments(cell: Cell) -> tuple[Any, Any, Any]:
    """(A, Σ p (e^c - 1)², Var_p e^c), the variance from its definition."""
    p, e = [golden.number(x) for x in cell.p], [mp.exp(golden.number(c)) for c in cell.c]
    mean = sum(a * b for a, b in zip(p, e, strict=True))
    second = sum(a * (b - 1) ** 2 for a, b in zip(p, e, strict=True))
    return mean, second, sum(a * (b - mean) ** 2 for a, b in zip(p, e, strict=True))


@follows("one_le_expMean", "bounds.moments", inputs=cells())
def the_mean_is_at_least_one(cell: Cell) -> None:
    a1, _, c_max, log_a = bounds.moments(cell.weights, cell.c)
    mean, _, _ = exact_moments(cell)
    assert a1 >= 0 and log_a >= 0
    agrees(a1, sum(golden.number(p) * mp.expm1(c) for p, c in zip(cell.p, cell.c, strict=True)))
    agrees(log_a, mp.log(mean), size=max(log_a, 2.0**-20))
    assert c_max == max(cell.c)


@follows("expVar_eq", "bounds.moments", inputs=cells())
def the_variance_is_a_difference_of_moments(cell: Cell) -> None:
    a1, a2, _, _ = bounds.moments(cell.weights, cell.c)
    mean, second, variance = exact_moments(cell)
    agrees(a2, second, size=max(float(second), 1e-40))
    agrees(a2 - a1**2, variance, size=a2)
    agrees(a1, mean - 1, size=max(float(mean) - 1, 2.0**-20))
