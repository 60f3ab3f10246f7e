"""The claims of the reference, each with inputs that satisfy its theorem's hypotheses and a check of its conclusion.

Conclusions are checked in exact rationals or at 50 digits with tolerance 0; the float64 function has to agree with the
exact value to `ROUNDING`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st
from mpmath import mp

from witcert_ref import golden

ROUNDING = Fraction(1, 2**40)  # 2^13 units in the last place of float64: a few roundings for each of at most 64 terms
DIGITS = golden.DIGITS + golden.GUARD

Check = Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Claim:
    """`functions` (names below `witcert_ref.`) follow from `theorem`: `check` holds on all that `inputs` draws."""

    theorem: str
    functions: tuple[str, ...]
    inputs: st.SearchStrategy[Any]
    check: Check
    examples: int


TABLE: list[Claim] = []


def follows(
    theorem: str, *functions: str, inputs: st.SearchStrategy[Any], examples: int = 40
) -> Callable[[Check], Check]:
    """Enter a check into the table."""

    def register(check: Check) -> Check:
        TABLE.append(Claim(f"WitCert.{theorem}", functions, inputs, check, examples))
        return check

    return register


def agrees(value: Any, exact: Any, size: Any = None) -> None:
    """A float64 result is the exact one up to rounding, relative to `size` (the exact result itself by default)."""
    exact = golden.number(exact)
    allowed = golden.number(ROUNDING) * abs(exact if size is None else golden.number(size))
    assert abs(golden.number(float(value)) - exact) <= allowed, (value, exact)


def all_agree(values: Any, exact: Sequence[Any], size: Any = None) -> None:
    """`agrees` entry by entry."""
    for value, wanted in zip(np.ravel(values), exact, strict=True):
        agrees(value, wanted, size)


def norm(x: Sequence[Any]) -> Any:
    """Euclidean norm."""
    return mp.sqrt(mp.fsum(golden.number(a) ** 2 for a in x))


def dot(x: Sequence[Any], y: Sequence[Any]) -> Fraction:
    """Inner product in exact rationals."""
    return sum((Fraction(a) * Fraction(b) for a, b in zip(x, y, strict=True)), Fraction(0))


def minus(x: Sequence[Any], y: Sequence[Any]) -> list[Fraction]:
    """Difference in exact rationals."""
    return [Fraction(a) - Fraction(b) for a, b in zip(x, y, strict=True)]


def halved(result: Any) -> Any:
    """The same result at half its size: what a function returns that no longer follows from its theorem."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        changed = {f.name: halved(getattr(result, f.name)) for f in dataclasses.fields(result)}
        return type(result)(**changed)
    if isinstance(result, tuple | list):
        return type(result)(halved(x) for x in result)
    if isinstance(result, np.ndarray) and result.dtype.kind == "i":
        return result // 2
    if isinstance(result, np.ndarray | np.floating | float):
        return result / 2
    return result


def dyadic(limit: int, bits: int = 4) -> st.SearchStrategy[float]:
    """Multiples of 2^-bits in [-limit, limit]: sums and products of a few stay exact in float64."""
    return st.integers(-limit * 2**bits, limit * 2**bits).map(lambda i: i / 2**bits)


def vector(size: int, limit: int = 2, bits: int = 4) -> st.SearchStrategy[list[float]]:
    return st.lists(dyadic(limit, bits), min_size=size, max_size=size)


def matrix(rows: int, columns: int, limit: int = 2, bits: int = 4) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(vector(columns, limit, bits), min_size=rows, max_size=rows)


def shares(size: int) -> st.SearchStrategy[list[Fraction]]:
    """Numbers in [-1, 1], the ends often: an error as a share of its bound."""
    one = st.sampled_from([Fraction(-1), Fraction(1)]) | st.fractions(-1, 1, max_denominator=64)
    return st.lists(one, min_size=size, max_size=size)


def probabilities(size: int) -> st.SearchStrategy[list[Fraction]]:
    """Probability vectors that are exact in float64 too, zeros and very small entries among them."""
    weight = st.sampled_from([0, 1, 2**20]) | st.integers(0, 1000)
    return st.lists(weight, min_size=size, max_size=size).filter(any).map(_normalised)


def _normalised(weights: list[int]) -> list[Fraction]:
    whole = 2 ** sum(weights).bit_length()
    return [
        Fraction(w + (whole - sum(weights)) * (t == weights.index(max(weights))), whole) for t, w in enumerate(weights)
    ]


def bounds_of(size: int) -> st.SearchStrategy[list[float]]:
    """Logit-error bounds c: constant or not, 0, small and large (at 2^-60 50 digits still tell them apart)."""
    one = st.sampled_from([0.0, 1.0, 20.0]) | st.floats(2.0**-60, 4) | st.floats(2.0**-60, 2.0**-20)
    return one.map(lambda c: [c] * size) | st.lists(one, min_size=size, max_size=size)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A probability vector p, bounds c, and errors |ε| <= c."""

    p: list[Fraction]
    c: list[float]
    eps: list[Fraction]

    @property
    def weights(self) -> list[float]:
        return [float(x) for x in self.p]

    @property
    def tv(self) -> Any:
        return golden.total_variation(golden.tilt(self.p, self.eps), self.p)


@st.composite
def cells(draw: st.DrawFn, most: int = 6) -> Cell:
    size = draw(st.integers(1, most))
    c = draw(bounds_of(size))
    eps = [Fraction(bound) * share for bound, share in zip(c, draw(shares(size)), strict=True)]
    return Cell(draw(probabilities(size)), c, eps)


@dataclasses.dataclass(frozen=True)
class Row:
    """Logits y that were used, bounds c, and exact logits x, |y - x| <= c."""

    y: list[float]
    c: list[float]
    x: list[Fraction]

    @property
    def tv(self) -> Any:
        return golden.total_variation(golden.softmax(self.x), golden.softmax(self.y))


@st.composite
def rows(draw: st.DrawFn, most: int = 6) -> Row:
    size = draw(st.integers(1, most))
    y, c = draw(vector(size, 8)), draw(bounds_of(size))
    error = [Fraction(bound) * share for bound, share in zip(c, draw(shares(size)), strict=True)]
    return Row(y, c, minus(y, error))
