"""The suite's own arithmetic: exact dyadic rationals, bounds in mpmath, the same bounds in float64 for many cells."""

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
    """Total variation; the masses add up to 1 only to the last digit."""
    return min(sum((abs(a - b) for a, b in zip(p, q, strict=True)), MP.zero) / 2, MP.one)


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

    A prefix S of the tokens by falling c, one of them in part: with X = Σ_S p e^c and B the sum of p e^(−c) off S the
    gain is X/(X + B) less the mass of S; in the part of the next token it is concave, largest at
    X + B = √(e^c B + e^(−c) X).
    No 1 is ever subtracted from an e^c, so tiny bounds keep their digits.
    """
    order = sorted(range(len(p)), key=lambda t: -c[t])
    rest = [(MP.zero, MP.zero, MP.zero)]  # of the tokens from each one on: mass, Σ p (1 − e^(−c)), Σ p e^(−c)
    for t in reversed(order):
        b, down, below = rest[-1]
        rest.append((b + p[t], down - p[t] * MP.expm1(-c[t]), below + p[t] * MP.exp(-c[t])))
    best = a = up = MP.zero
    for t, (b, down, below) in zip(order, reversed(rest), strict=False):
        best = max(best, _gain(a, b, up, down, below))
        if c[t] > 0 and p[t] > 0:
            rise, fall, x = MP.expm1(c[t]), -MP.expm1(-c[t]), a + up
            root = MP.sqrt(below * (1 + rise) + x * (1 - fall))
            if c[t] < 1:
                s = x + below
                part = (below * rise - x * fall - s * (up - down)) / ((root + s) * (rise + fall))
            else:
                part = (root - x - below) / (rise + fall)
            part = min(max(part, MP.zero), p[t])
            left = max(below - part * (1 - fall), MP.zero)
            best = max(best, _gain(a + part, b - part, up + part * rise, down - part * fall, left))
        a, up = a + p[t], up + p[t] * MP.expm1(c[t])
    return min(best, MP.one)  # the masses add up to 1 only to the last digit


def _gain(a: mpf, b: mpf, up: mpf, down: mpf, below: mpf) -> mpf:
    """X/(X + B) − a for X = a + up, B = below = b − down."""
    total = a + up + below
    return (b * up + a * down) / total if total > 0 else MP.zero


def worst_box_mp(y: Sequence[mpf], low: Sequence[mpf], high: Sequence[mpf]) -> mpf:
    """A total variation that some logits x with low ≤ x ≤ high attain against softmax(y).

    The best over prefixes by falling (high − low), (high − y) and (y − low), and over their complements.
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
    rise, fall = np.expm1(e), -np.expm1(-e)
    a, up = _before(q), _before(q * rise)
    b, down, below = (np.flip(np.cumsum(np.flip(x, -1), -1), -1) for x in (q, q * fall, q * np.exp(-e)))
    x = a + up
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        root = np.sqrt(below * (1 + rise) + x * np.exp(-e))
        near = (below * rise - x * fall - (x + below) * (up - down)) / (root + x + below)
        part = np.where(e < 1, near, root - x - below) / (rise + fall)
    part = np.clip(np.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0), 0, q)
    a, b, below = a + part, np.maximum(b - part, 0), np.maximum(below - part * np.exp(-e), 0)
    up, down = up + part * rise, np.maximum(down - part * fall, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = (b * up + a * down) / (a + up + below)
    return np.asarray(np.nan_to_num(gain).max(-1, initial=0))
