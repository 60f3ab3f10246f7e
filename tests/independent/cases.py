"""Hypothesis strategies. Every drawn number is a dyadic rational, so that all precisions agree on the input."""

# mypy: disable-error-code="import-untyped"
from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from mpmath import mpf

from .implementation import CTX, Real

SLACK = CTX.mpf(10) ** -50
PIECES = 2**20

check = settings(deadline=None, database=None, max_examples=40)
check_few = settings(deadline=None, database=None, max_examples=20)


def at_most(x: Real, y: Real) -> bool:
    """`x ≤ y`, up to rounding at 60 digits."""
    scale = max(1, abs(CTX.convert(y)))
    return bool(CTX.convert(x) <= CTX.convert(y) + SLACK * scale)


def same(x: Real, y: Real) -> bool:
    """`x = y`, up to rounding at 60 digits."""
    return at_most(x, y) and at_most(y, x)


def dyadic(low: int, high: int, bits: int = 10) -> st.SearchStrategy[float]:
    """Multiples of `2^-bits` in `[low, high]`."""
    return st.integers(low << bits, high << bits).map(lambda k: k / 2**bits)


def vector(size: int, low: int, high: int) -> st.SearchStrategy[list[float]]:
    """`size` dyadic numbers."""
    return st.lists(dyadic(low, high), min_size=size, max_size=size)


def matrix(rows: int, size: int, low: int, high: int) -> st.SearchStrategy[list[list[float]]]:
    """`rows` dyadic vectors."""
    return st.lists(vector(size, low, high), min_size=rows, max_size=rows)


def head(pairs: int) -> st.SearchStrategy[list[tuple[float, float]]]:
    """A head vector."""
    return st.lists(st.tuples(dyadic(-4, 4), dyadic(-4, 4)), min_size=pairs, max_size=pairs)


def prob(size: int) -> st.SearchStrategy[list[float]]:
    """A probability vector whose sum is one exactly, zeros and tiny masses included."""
    cut = st.one_of(st.integers(0, PIECES), st.integers(0, 8), st.just(PIECES))
    cuts = st.lists(cut, min_size=size - 1, max_size=size - 1).map(sorted)
    return cuts.map(lambda x: [(b - a) / PIECES for a, b in zip([0, *x], [*x, PIECES], strict=True)])


def bound(size: int) -> st.SearchStrategy[list[float]]:
    """A logit bound: free, constant, or zero on some tokens."""
    small = st.one_of(dyadic(0, 1, 20), dyadic(0, 6), st.just(0.0))
    return st.one_of(st.lists(small, min_size=size, max_size=size), small.map(lambda x: [x] * size))


def share() -> st.SearchStrategy[float]:
    """Where in `[-c, c]` the error is; the ends are likely."""
    return st.one_of(st.sampled_from([-1.0, 1.0]), dyadic(-1, 1))


class Tilted(NamedTuple):
    """`p`, `c` and an error `|ε| ≤ c`."""

    p: list[float]
    c: list[float]
    eps: list[float]


@st.composite
def tilted(draw: st.DrawFn) -> Tilted:
    """A case of every theorem `tv_tilt_le_…`."""
    size = draw(st.integers(1, 6))
    c = draw(bound(size))
    shares = draw(st.lists(share(), min_size=size, max_size=size))
    return Tilted(draw(prob(size)), c, [a * b for a, b in zip(c, shares, strict=True)])


class Keys(NamedTuple):
    """A query, exact keys, stored keys, and how far the witness is rounded up."""

    band: list[int]
    scale: float
    q: list[tuple[float, float]]
    exact: list[list[tuple[float, float]]]
    stored: list[list[tuple[float, float]]]
    slack: list[list[float]]


@st.composite
def keys(draw: st.DrawFn) -> Keys:
    """A case of Tier A."""
    pairs, bands, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    heads = st.lists(head(pairs), min_size=tokens, max_size=tokens)
    exact = draw(heads)
    shift = draw(st.sampled_from([1.0, 0.125, 0.0]))
    moved = draw(heads)
    stored = [
        [(a + shift * c, b + shift * d) for (a, b), (c, d) in zip(k, m, strict=True)]
        for k, m in zip(exact, moved, strict=True)
    ]
    band = draw(st.lists(st.integers(0, bands - 1), min_size=pairs, max_size=pairs))
    return Keys(band, draw(dyadic(0, 1)), draw(head(pairs)), exact, stored, draw(matrix(tokens, bands, 0, 1)))


class Dithered(NamedTuple):
    """A case of Tier B: `d` channels, `n` dither values, some tokens."""

    n: int
    scale: float
    q: list[float]
    s: list[list[float]]
    y: list[list[float]]
    delta: float


@st.composite
def dithered(draw: st.DrawFn, draws: int = 64) -> Dithered:
    """A case of Tier B with at most `draws` dither vectors."""
    d = draw(st.integers(1, 3))
    n = draw(st.integers(1, max(k for k in range(1, draws + 1) if k**d <= draws)))
    tokens = draw(st.integers(1, 3))
    delta = draw(st.integers(1, 64)) / 64
    steps, code = matrix(tokens, d, 0, 2), matrix(tokens, d, -3, 3)
    return Dithered(n, draw(dyadic(0, 2)), draw(vector(d, -4, 4)), draw(steps), draw(code), delta)


def difference(x: list[float], y: list[float]) -> list[mpf]:
    """`x - y` without rounding."""
    return [CTX.convert(a) - CTX.convert(b) for a, b in zip(x, y, strict=True)]
