"""What the tests draw, and exact arithmetic beside the reference's."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from mpmath import mp

from witcert_ref import golden

FLOAT = 1e-11  # relative: float64 against the same formula at 50 digits, for sums of at most a few dozen terms


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None)


logits = st.floats(-30, 30, width=32)
bounds = st.one_of(
    st.sampled_from([0.0, 1e-30, 1e-9, 0.1, 1.0, 10.0]),
    st.floats(0, 2, width=32),
    st.floats(0, 40, width=32),
)


@st.composite
def cells(draw: st.DrawFn, most: int = 8) -> tuple[list[float], list[float]]:
    """(y, c): logits and bounds of one row; often flat or with one bound for all."""
    n = draw(st.integers(1, most))
    y = draw(st.one_of(st.lists(logits, min_size=n, max_size=n), st.just([0.0] * n)))
    c = draw(st.one_of(st.lists(bounds, min_size=n, max_size=n), bounds.map(lambda b: [b] * n)))
    return y, c


def quarters(low: int, high: int) -> st.SearchStrategy[float]:
    """Numbers with two binary digits behind the point: sums and products of a few are exact in float64."""
    return st.integers(4 * low, 4 * high).map(lambda i: i / 4)


def rationals(x: Any) -> list[Fraction]:
    return [Fraction(float(value)) for value in np.ravel(x)]


def dot(x: Sequence[Fraction], y: Sequence[Fraction]) -> Fraction:
    return sum((a * b for a, b in zip(x, y, strict=True)), Fraction(0))


def down(difference: Any) -> Any:
    """A difference of numbers of 70 digits, down to the 60 decimals that it has, then to the 50 digits of `golden`."""
    with mp.workdps(golden.DIGITS + golden.GUARD):
        floor = mp.floor(difference * mp.mpf(10) ** 60) / mp.mpf(10) ** 60
    with mp.workdps(golden.DIGITS):
        return +floor


def enumerated(p: Sequence[Any], c: Sequence[Any], reference: Sequence[Any] | None = None) -> Any:
    """max over sets S of X/(X + B) - reference(S), `down`, without any of the reference's algebra."""
    with mp.workdps(golden.DIGITS + golden.GUARD):
        base = p if reference is None else reference
        up = [w * mp.exp(golden.number(e)) for w, e in zip(p, c, strict=True)]
        rest = [w * mp.exp(-golden.number(e)) for w, e in zip(p, c, strict=True)]
        best = mp.mpf(0)
        for members in range(1, 2 ** len(p)):
            inside = [t for t in range(len(p)) if members >> t & 1]
            x = mp.fsum(up[t] for t in inside)
            b = mp.fsum(rest[t] for t in range(len(p)) if not members >> t & 1)
            best = max(best, x / (x + b) - mp.fsum(base[t] for t in inside))
    return down(best)
