"""The equaliser: a shift and a scale per channel, from a calibration text, so that all channels use the codes alike."""

import numpy as np
from numpy.typing import ArrayLike

from witcert_ref._checks import Array, floats, last_axis
from witcert_ref.rope import RopeLayout, pairs
from witcert_ref.spec import implements

_FLOOR = 2.0**-12  # of the head's largest half-range: a channel that did not move in calibration may move when served


def fit(
    keys: ArrayLike,
    layout: RopeLayout = "half",
    exclude: ArrayLike | None = None,
    rotary_dim: int | None = None,
) -> tuple[Array, Array]:
    """(mu, f): mid-range and half-range of keys [tokens, ..., d], each [..., d].

    f is the larger half-range of a RoPE pair, at least 2^-12 of the largest of the head (1 where no channel moves),
    so never 0. On the bypass channels, `exclude` (bool, broadcastable to [..., d]), mu = 0 and f = 1. Raises
    ValueError for keys that are not finite, or no tokens.
    """
    k = floats("keys", keys)
    if k.ndim < 2 or k.shape[0] == 0:
        raise ValueError(f"keys: got shape {k.shape}, want [tokens, ..., d] with at least one token")
    low, high = k.min(0), k.max(0)
    mu, f = low / 2 + high / 2, high / 2 - low / 2
    first, second = pairs(k.shape[-1], layout, rotary_dim).T
    f[..., first] = f[..., second] = np.maximum(f[..., first], f[..., second])
    bypass = np.broadcast_to(False if exclude is None else exclude, f.shape)
    largest = np.max(np.where(bypass, 0.0, f), axis=-1, keepdims=True)
    f = np.where(largest > 0, np.maximum(f, _FLOOR * largest), 1.0)
    return np.where(bypass, 0.0, mu), np.where(bypass, 1.0, f)


@implements("WitCert.softmax_add_const", pending=True)
def apply(k: ArrayLike, mu: ArrayLike, f: ArrayLike) -> Array:
    """x = (k - mu)/f, what is quantised, [tokens, ..., d]; what is not finite stays so. ValueError unless f > 0."""
    return (np.asarray(k, dtype=np.float64) - floats("mu", mu)) / _positive(f)


def invert(x: ArrayLike, mu: ArrayLike, f: ArrayLike) -> Array:
    """k = f x + mu, the inverse of `apply`."""
    return np.asarray(x, dtype=np.float64) * _positive(f) + floats("mu", mu)


def fold(q: ArrayLike, f: ArrayLike) -> Array:
    """z = q∘f [..., d], the query that meets x: q·k = z·x + q·mu."""
    query, factor = floats("q", q), _positive(f)
    last_axis("q", query, factor.shape[-1])
    return query * factor


def _positive(f: ArrayLike) -> Array:
    factor = floats("f", f)
    if not (factor > 0).all():
        raise ValueError(f"f: got {factor.min()}, want positive numbers")
    return factor
