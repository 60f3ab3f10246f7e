"""The suite's own arithmetic: exact dyadic rationals, bounds in mpmath, and the same bounds in float64 for many cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpmath import MPContext, mpf

from .adapter import Array, Mask

MP = MPContext()
MP.prec = 240

FLOAT_MARGIN = 1e-9
"""Relative margin that covers float64's own error in the vectorised bounds; inside it mpmath decides."""

C_LARGE = 300.0
"""Cells with a larger c go to mpmath: e^{2c} would overflow."""


def finite(x: Array) -> Mask:
    """Whether all numbers along the last axis are finite."""
    return np.asarray(np.isfinite(x).all(-1))


@dataclass(frozen=True)
class Dyadic:
    """An array of exact numbers ``ints · 2^exponent`` (Python integers)."""

    ints: Array
    exponent: int

    @classmethod
    def of(cls, x: Array | float) -> Dyadic:
        """Exactly these float64 numbers, which must be finite."""
        shape = np.shape(x)
        mantissa, exponent = np.frexp(np.ravel(np.asarray(x, dtype=np.float64)))
        low = int(exponent[mantissa != 0].min()) if np.any(mantissa != 0) else 0
        shift = np.where(mantissa != 0, exponent - low, 0).tolist()
        whole = np.ldexp(mantissa, 53).astype(np.int64).tolist()
        ints = np.empty(len(whole), dtype=object)
        ints[:] = [w << s for w, s in zip(whole, shift, strict=True)]
        return cls(ints.reshape(shape), low - 53)

    def _aligned(self, other: Dyadic) -> tuple[Array, Array, int]:
        low = min(self.exponent, other.exponent)
        return self.ints * 2 ** (self.exponent - low), other.ints * 2 ** (other.exponent - low), low

    def __add__(self, other: Dyadic) -> Dyadic:
        a, b, e = self._aligned(other)
        return Dyadic(np.asarray(a + b, dtype=object), e)

    def __sub__(self, other: Dyadic) -> Dyadic:
        a, b, e = self._aligned(other)
        return Dyadic(np.asarray(a - b, dtype=object), e)

    def __mul__(self, other: Dyadic) -> Dyadic:
        return Dyadic(np.asarray(self.ints * other.ints, dtype=object), self.exponent + other.exponent)

    def __matmul__(self, other: Dyadic) -> Dyadic:
        return Dyadic(np.asarray(np.dot(self.ints, other.ints), dtype=object), self.exponent + other.exponent)

    def __getitem__(self, index: Any) -> Dyadic:
        return Dyadic(np.asarray(self.ints[index], dtype=object), self.exponent)

    def __abs__(self) -> Dyadic:
        return Dyadic(np.asarray(abs(self.ints), dtype=object), self.exponent)

    @property
    def T(self) -> Dyadic:
        """Transposed."""
        return Dyadic(self.ints.T, self.exponent)

    def sum(self, axis: int | None = -1) -> Dyadic:
        """Sums along an axis; no terms give 0."""
        return Dyadic(np.asarray(self.ints.sum(axis), dtype=object), self.exponent)

    def at_most(self, other: Dyadic) -> Mask:
        """Elementwise ``self <= other``, no tolerance."""
        a, b, _ = self._aligned(other)
        return np.asarray(a <= b, dtype=bool)

    def real(self) -> Array:
        """The numbers as mpf."""
        unit = MP.mpf(2) ** self.exponent
        return (
            np.vectorize(lambda n: MP.mpf(int(n)) * unit, otypes=[object])(self.ints) if self.ints.size else self.ints
        )

    def near(self) -> Array:
        """The numbers as float64."""
        return np.asarray(self.real(), dtype=np.float64)


# Bounds for one distribution in mpmath. Logits and c are sequences of mpf.


def softmax_mp(x: Sequence[mpf]) -> list[mpf]:
    """Softmax."""
    top = max(x)
    weights = [MP.exp(t - top) for t in x]
    total = sum(weights)
    return [w / total for w in weights]


def logsumexp_mp(x: Sequence[mpf]) -> mpf:
    """Log-sum-exp."""
    top = max(x)
    return top + MP.log(sum(MP.exp(t - top) for t in x))


def tv_mp(p: Sequence[mpf], q: Sequence[mpf]) -> mpf:
    """Total variation."""
    return sum((abs(a - b) for a, b in zip(p, q, strict=True)), MP.zero) / 2


def moments_mp(p: Sequence[mpf], c: Sequence[mpf]) -> tuple[mpf, mpf]:
    """``(a1, σ)``: mean of e^c − 1 and standard deviation of e^c."""
    rise = [MP.expm1(t) for t in c]
    mean = sum((a * b for a, b in zip(p, rise, strict=True)), MP.zero)
    square = sum((a * b**2 for a, b in zip(p, rise, strict=True)), MP.zero)
    return mean, MP.sqrt(max(square - mean**2, MP.zero))


def meter_mp(p: Sequence[mpf], c: Sequence[mpf]) -> mpf:
    """min(phi, sharp, tanh) (Lean ``WitCert.meter``)."""
    a1, sigma = moments_mp(p, c)
    a = 1 + a1
    phi = a1 / a if a <= 2 else a**2 / (a**2 + 4)
    return min(phi, (a1 + sigma / 2) / (a + 1), MP.tanh(max(c) / 2))


def worst_case_mp(p: Sequence[mpf], c: Sequence[mpf]) -> mpf:
    """The largest total variation over |ε| ≤ c where tokens may be split; every meter must be at least this.

    A prefix of the tokens by falling c, one of them in part: with X = Σ p e^c on it and B = Σ p e^(−c) off it the gain is
    X/(X + B) less the mass of the prefix; in the part m of the next token it is concave, largest at X + B = √N.
    """
    order = sorted(range(len(p)), key=lambda t: -c[t])
    best = a = x = MP.zero
    below = sum((p[t] * MP.exp(-c[t]) for t in order), MP.zero)
    for t in order:
        up, down = MP.exp(c[t]), MP.exp(-c[t])
        if c[t] > 0:
            part = (MP.sqrt(up * below + down * x) - x - below) / (up - down)
            part = min(max(part, MP.zero), p[t])
            inside = x + part * up
            total = inside + below - part * down
            best = max(best, inside / total - a - part)
        a, x, below = a + p[t], x + p[t] * up, max(below - p[t] * down, MP.zero)
        if x + below > 0:
            best = max(best, x / (x + below) - a)
    return best


def worst_box_mp(y: Sequence[mpf], low: Sequence[mpf], high: Sequence[mpf]) -> mpf:
    """A total variation that some logits x with low ≤ x ≤ high attain against softmax(y).

    The best over prefixes by falling (high − low), by falling (high − y) and by falling (y − low), and their complements.
    """
    p = softmax_mp(y)
    n = range(len(p))
    best = MP.zero
    for key in ([high[t] - low[t] for t in n], [high[t] - y[t] for t in n], [y[t] - low[t] for t in n]):
        order = sorted(n, key=lambda t: -key[t])
        for sign in (1, -1):
            for k in range(len(p) + 1):
                inside = set(order[:k]) if sign > 0 else set(order[k:])
                x = [high[t] if t in inside else low[t] for t in n]
                best = max(best, tv_mp(softmax_mp(x), p))
    return best


# The same for many cells in float64; the last axis is the token, masked tokens have p = 0 and c = 0.


def softmax(y: Array) -> Array:
    """Softmax of rows with at least one finite logit."""
    weights = np.exp(y - np.max(y, -1, keepdims=True, initial=-np.inf))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def total_variation(p: Array, q: Array) -> Array:
    """Total variation."""
    return np.asarray(np.abs(p - q).sum(-1) / 2)


def meter(p: Array, c: Array) -> Array:
    """The meter; cells with c above :data:`C_LARGE` are for mpmath."""
    rise = np.expm1(np.minimum(c, C_LARGE))
    a1 = np.einsum("...t,...t->...", p, rise)
    sigma = np.sqrt(np.einsum("...t,...t->...", p, np.square(rise - a1[..., None])))
    phi = np.where(a1 <= 1, a1 / (1 + a1), 1 / (1 + np.square(2 / (1 + a1))))
    return np.asarray(np.minimum(np.minimum(phi, (a1 + sigma / 2) / (a1 + 2)), np.tanh(c.max(-1, initial=0) / 2)))


def log_a(p: Array, c: Array) -> Array:
    """log Σ p e^c, c below :data:`C_LARGE`."""
    return np.asarray(np.log1p(np.einsum("...t,...t->...", p, np.expm1(np.minimum(c, C_LARGE)))))


def _before(x: Array) -> Array:
    sums = np.cumsum(x, -1)
    return np.asarray(np.concatenate([np.zeros_like(sums[..., :1]), sums[..., :-1]], -1))


def worst_case(p: Array, c: Array) -> Array:
    """:func:`worst_case_mp` for many cells, c below :data:`C_LARGE`."""
    order = np.argsort(-c, -1)
    q, e = np.take_along_axis(p, order, -1), np.minimum(np.take_along_axis(c, order, -1), C_LARGE)
    grow, shrink = np.exp(e), np.exp(-e)
    rise, fall = q * np.expm1(e), -q * np.expm1(-e)
    a, up = _before(q), _before(rise)
    rest = np.flip(np.cumsum(np.flip(q, -1), -1), -1)
    down = np.flip(np.cumsum(np.flip(fall, -1), -1), -1)
    x, below = a + up, rest - down
    with np.errstate(divide="ignore", invalid="ignore"):
        part = (np.sqrt(np.maximum(grow * below + shrink * x, 0)) - x - below) / (grow - shrink)
    part = np.clip(np.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0), 0, q)
    up = up + part * np.expm1(e)
    down = np.maximum(down + part * np.expm1(-e), 0)
    a, b = a + part, np.maximum(rest - part, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = (b * up + a * down) / (a + up + b - down)
    return np.asarray(np.nan_to_num(gain).max(-1, initial=0))
