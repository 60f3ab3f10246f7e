"""Certificates that look right and are false. If one of these stops failing, the suite's own arithmetic is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from .. import exact
from ..adapter import Adapter, Array, Info
from ..checks import require
from ..registry import prop


@dataclass(frozen=True)
class Example:
    """Attention p (up to its sum), bounds c."""

    p: tuple[float, ...] = (1.0, 1.0)
    c: tuple[float, ...] = (0.1, 0.1)


def dispersion(p: Array, c: Array) -> float:
    """The paper's equation (1): ½ e^(2 max c) (E|c − c̄| + c̄ (e^(max c) − 1)). Not a bound."""
    mean, top = float(p @ c), float(c.max())
    return 0.5 * np.exp(2 * top) * (float(p @ np.abs(c - mean)) + mean * np.expm1(top))


def variance_averaged(p: Array, c: Array) -> float:
    """½ (e^(2 √(Σ p c²)) − 1): variances averaged before the exponential. Not a bound."""
    return float(np.expm1(2 * np.sqrt(p @ np.square(c))) / 2)


def true_worst(p: Array, c: Array) -> float:
    """The largest total variation at errors ±c, over all sets of tokens."""
    best = 0.0
    for s in range(2 ** len(p)):
        sign = np.where((s >> np.arange(len(p))) & 1, -1.0, 1.0)
        q = p * np.exp(-sign * c)
        best = max(best, float(exact.total_variation(p, q / q.sum())))
    return best


def _small(info: Info) -> st.SearchStrategy[Example]:
    """Nearly equal small bounds: where the dispersion vanishes and the error does not."""
    unit = st.floats(0.01, 0.15)
    return unit.flatmap(lambda c: st.builds(Example, p=st.tuples(*[st.floats(0.8, 1.25)] * 2), c=st.just((c, c))))


@prop(
    "dispersion_form_stays_refuted",
    _small,
    theorems=("dispersion_unsound",),
    pinned=(Example(),),
)
def _dispersion(adapter: Adapter, case: Example) -> None:
    """The dispersion form is below a total variation that errors within c attain (0.006423 against 0.049834)."""
    p, c = np.asarray(case.p) / sum(case.p), np.asarray(case.c)
    claimed, attained = dispersion(p, c), true_worst(p, c)
    require(claimed < attained, f"dispersion form: {claimed} covers {attained}: the guard no longer bites")
    if case == Example():
        require(abs(claimed - 0.006423) < 5e-7 and abs(attained - 0.049834) < 5e-7, f"guard: {claimed}, {attained}")
    require(float(exact.meter(p, c)) >= attained, "the meter does not cover the guard's example")
    require(float(exact.worst_case(p, c)) >= attained * (1 - 1e-12), "the relaxed worst case is below an attained one")


def _spiked(info: Info) -> st.SearchStrategy[Example]:
    """One rare token with a large bound: its variance averages away, its exponential does not."""
    return st.builds(lambda w, c: Example(p=(1 - w, w), c=(0.0, c)), st.floats(0.0002, 0.001), st.floats(9.0, 11.0))


RARE = float(np.exp(-20.0))
"""Mass of the rare token in Lean's proof of ``variance_averaged_unsound``; its bound is 20."""


@prop(
    "variance_averaged_form_stays_refuted",
    _spiked,
    theorems=("variance_averaged_unsound",),
    pinned=(Example(p=(1 - RARE, RARE), c=(0.0, 20.0)), Example(p=(0.999, 0.001), c=(0.0, 10.0))),
)
def _variance(adapter: Adapter, case: Example) -> None:
    """Averaging variances before the exponential is below a total variation that errors within c attain."""
    p, c = np.asarray(case.p) / sum(case.p), np.asarray(case.c)
    claimed, attained = variance_averaged(p, c), true_worst(p, c)
    require(claimed < attained, f"variance-averaged form: {claimed} covers {attained}: the guard no longer bites")
    require(float(exact.meter(p, c)) >= attained, "the meter does not cover the guard's example")
