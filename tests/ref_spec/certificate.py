"""Formal modules `Certificate` and `Counterexample`: from a bound on the logit error to a bound on total variation."""

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st
from mpmath import mp

from witcert_ref import bounds, golden

from .table import Cell, Row, agrees, cells, follows, rows

grown = st.tuples(cells(), st.floats(0, 2))
constants = st.sampled_from([0.0, 1e-6, 1.0, 20.0]) | st.floats(2.0**-20, 8)


def both(name: str, cell: Cell) -> Any:
    """A bound at 50 digits, with which the float64 one has to agree."""
    exact = getattr(golden, name)(cell.p, cell.c)
    agrees(getattr(bounds, name)(cell.weights, cell.c), exact)
    return exact


def certifies(name: str) -> Callable[[Cell], None]:
    def the_bound_is_at_least_the_total_variation(cell: Cell) -> None:
        assert cell.tv <= both(name, cell)

    return the_bound_is_at_least_the_total_variation


for theorem, name in (
    ("tv_tilt_le_eform", "eform"),
    ("tv_tilt_le_twosided", "two_sided"),
    ("tv_tilt_le_rc_tanh", "rc_tanh"),
    ("tv_tilt_le_tanh", "tanh"),
    ("tv_tilt_le_phi", "phi"),
    ("tv_tilt_le_sharp", "sharp"),
    ("tv_tilt_le_meter", "meter"),
):
    follows(theorem, f"bounds.{name}", inputs=cells(), examples=100)(certifies(name))


def certifies_logits(name: str) -> Callable[[Row], None]:
    def the_bound_holds_whatever_made_the_difference(row: Row) -> None:
        assert row.tv <= both(name, Cell(golden.softmax(row.y), row.c, []))

    return the_bound_holds_whatever_made_the_difference


follows("tv_softmax_le_tanh", "bounds.tanh", inputs=rows())(certifies_logits("tanh"))
follows("tv_softmax_le_meter", "bounds.meter", inputs=rows())(certifies_logits("meter"))


def meter_at(a1: Any, variance: Any, c_max: float) -> Any:
    """The meter as a function of its moments, as `Certificate.lean` defines it."""
    a, sigma = 1 + golden.number(a1), mp.sqrt(max(golden.number(variance), golden.number(0)))
    phi = 1 - 1 / a if a <= 2 else a**2 / (a**2 + 4)
    return min(phi, (a - 1 + sigma / 2) / (a + 1), mp.tanh(golden.number(c_max) / 2))


@follows("expVar_eq", "bounds.meter_of_moments", inputs=cells())
@follows("tv_tilt_le_meter", "bounds.meter_of_moments", inputs=cells())
def the_meter_of_the_moments_is_the_meter(cell: Cell) -> None:
    a1, a2, c_max, _ = golden.moments(cell.p, cell.c)
    exact = meter_at(a1, a2 - a1**2, c_max)
    assert cell.tv <= +exact
    value = bounds.meter_of_moments(float(a1), float(a2), float(c_max))
    # in float64 the difference a2 - a1² is known to a few roundings of a2
    low, high = (meter_at(a1, a2 * (1 + sign * 2.0**-50) - a1**2, c_max) for sign in (-1, 1))
    assert low * (1 - 2.0**-40) <= golden.number(float(value)) <= high * (1 + 2.0**-40)


@follows("meter_le_eform", "bounds.meter", inputs=cells())
def the_meter_is_at_most_the_papers_bound(cell: Cell) -> None:
    assert both("meter", cell) <= both("eform", cell)


@follows("meter_lt_one", "bounds.meter", inputs=cells())
def the_meter_is_never_vacuous(cell: Cell) -> None:
    assert both("meter", cell) < 1


@follows("phi_mono", "bounds.phi", inputs=grown)
def phi_grows_with_the_mean(case: tuple[Cell, float]) -> None:
    cell, more = case
    assert both("phi", cell) <= both("phi", Cell(cell.p, [c + more for c in cell.c], []))


@follows("min_one_sharp_mono", "bounds.sharp", inputs=grown)
def sharp_grows_with_mean_and_deviation(case: tuple[Cell, float]) -> None:
    cell, more = case
    assert min(1, both("sharp", cell)) <= min(1, both("sharp", Cell(cell.p, [c + more for c in cell.c], [])))


def attaining(c: float) -> Cell:
    """Two tokens: the heavier errs by +c, the other by -c."""
    e = Fraction(float(np.exp(c)))
    return Cell([1 / (1 + e), e / (1 + e)], [c, c], [Fraction(-c), Fraction(c)])


@follows("sharp_attained", "bounds.sharp", inputs=constants)
def sharp_is_attained(c: float) -> None:
    cell = attaining(c)
    assert cell.tv <= both("sharp", cell)
    agrees(float(cell.tv), both("sharp", cell))
    agrees(float(cell.tv), mp.tanh(golden.number(c) / 2))


@follows("sharp_attained", "bounds.worst_case", inputs=constants)
def the_worst_case_attains_sharp(c: float) -> None:
    cell = attaining(c)
    agrees(bounds.worst_case(cell.weights, cell.c), mp.tanh(golden.number(c) / 2))


def enumerated(cell: Cell) -> Any:
    """The largest X / (X + B) - p(S) over all sets S."""
    p = [golden.number(x) for x in cell.p]
    best = golden.number(0)
    for inside in product((False, True), repeat=len(p)):
        x = mp.fsum(w * mp.exp(c) for w, c, s in zip(p, cell.c, inside, strict=True) if s)
        b = mp.fsum(w * mp.exp(-c) for w, c, s in zip(p, cell.c, inside, strict=True) if not s)
        if x > 0:
            best = max(best, x / (x + b) - mp.fsum(w for w, s in zip(p, inside, strict=True) if s))
    return best


@follows("mass_tilt_le", "bounds.worst_case", inputs=cells(5))
def no_error_moves_more_than_the_worst_case(cell: Cell) -> None:
    worst = enumerated(cell)
    agrees(bounds.worst_case(cell.weights, cell.c), worst)
    assert cell.tv <= +worst + mp.mpf(10) ** -golden.DIGITS


@follows("mass_tilt_le", "bounds.worst_case_relaxed", inputs=cells(5))
def the_relaxed_worst_case_is_above_and_below_every_bound(cell: Cell) -> None:
    relaxed = golden.worst_case_relaxed(cell.p, cell.c)
    # in float64 the part of the split token is a difference of numbers near 1: 2^-52 is what tiny c leave of it
    agrees(bounds.worst_case_relaxed(cell.weights, cell.c), relaxed, size=relaxed + mp.mpf(2) ** -12)
    assert enumerated(cell) <= relaxed + mp.mpf(10) ** -golden.DIGITS
    for name in ("eform", "two_sided", "rc_tanh", "tanh", "phi", "sharp", "meter"):
        assert relaxed <= getattr(golden, name)(cell.p, cell.c) + mp.mpf(10) ** -golden.DIGITS


def dispersion(cell: Cell) -> Any:
    """½ e^(2C) (Σ p |c - c̄| + c̄ (e^C - 1)), as `Counterexample.lean` defines it."""
    p, c = [golden.number(x) for x in cell.p], [golden.number(x) for x in cell.c]
    mean = mp.fsum(w * x for w, x in zip(p, c, strict=True))
    spread = mp.fsum(w * abs(x - mean) for w, x in zip(p, c, strict=True))
    return mp.exp(2 * max(c)) * (spread + mean * mp.expm1(max(c))) / 2


@follows("dispersion_unsound", "bounds.dispersion_unsound", inputs=cells())
def the_dispersion_form_is_refuted(cell: Cell) -> None:
    cancelled = max(cell.c) * np.exp(2 * max(cell.c))  # the spread is a sum of differences
    agrees(bounds.dispersion_unsound(cell.weights, cell.c), dispersion(cell), size=dispersion(cell) + cancelled)
    half, c = Fraction(1, 2), 0.1
    refuted = Cell([half, half], [c, c], [Fraction(c), Fraction(-c)])
    agrees(bounds.dispersion_unsound(refuted.weights, refuted.c), dispersion(refuted))
    assert dispersion(refuted) < refuted.tv


@follows("variance_averaged_unsound", "bounds.variance_averaged_unsound", inputs=cells())
def the_averaged_variance_is_refuted(cell: Cell) -> None:
    def exact(cell: Cell) -> Any:
        square = mp.fsum(golden.number(p) * golden.number(c) ** 2 for p, c in zip(cell.p, cell.c, strict=True))
        return mp.expm1(2 * mp.sqrt(square)) / 2

    agrees(bounds.variance_averaged_unsound(cell.weights, cell.c), exact(cell))
    rare = Fraction(float(np.exp(-20.0)))
    refuted = Cell([1 - rare, rare], [0.0, 20.0], [Fraction(0), Fraction(-20)])
    agrees(bounds.variance_averaged_unsound(refuted.weights, refuted.c), exact(refuted))
    assert exact(refuted) < refuted.tv
