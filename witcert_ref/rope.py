"""Rotary position embedding and its bands.

A head of d channels has `rotary_dim` leading channels that rotate in pairs; `layout` says which are a pair:
"half" (j, j + rotary_dim/2: Llama, Qwen) or "interleaved" (2j, 2j + 1: GPT-J, GLM). `rotary_dim=None` means all of d.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from witcert_ref._checks import Array, floats, integer
from witcert_ref.spec import implements

RopeLayout = Literal["half", "interleaved"]


def pairs(head_dim: int, layout: RopeLayout, rotary_dim: int | None = None) -> NDArray[np.intp]:
    """The channels of each RoPE pair, [rotary_dim/2, 2].

    Raises ValueError for an unknown layout, or a rotary_dim that is odd or above head_dim.
    """
    size = head_dim if rotary_dim is None else integer("rotary_dim", rotary_dim, 0, head_dim)
    if size % 2:
        raise ValueError(f"rotary_dim: got {size}, want an even number")
    channels = np.arange(size)
    if layout == "half":
        return channels.reshape(2, size // 2).T
    if layout == "interleaved":
        return channels.reshape(size // 2, 2)
    raise ValueError(f"layout: got {layout!r}, want 'half' or 'interleaved'")


@implements("WitCert.dot_rope_rope")
@implements("WitCert.rope_sub")
@implements("WitCert.bandNorm_rope")
def rotate(x: ArrayLike, position: ArrayLike, theta: ArrayLike, layout: RopeLayout) -> Array:
    """Turn pair j by the angle position · theta_j.

    x [..., d], position [...] (any real number; broadcasts), theta [rotary_dim/2] in radians a position. Channels past
    rotary_dim are returned as they are. Raises ValueError for a theta that needs more than d channels.
    """
    vector, frequency = floats("x", x), floats("theta", theta)
    if frequency.ndim != 1 or vector.ndim == 0 or 2 * frequency.size > vector.shape[-1]:
        raise ValueError(
            f"theta: got shape {frequency.shape}, want at most one angle for two of x's {vector.shape[-1:]}"
        )
    first, second = pairs(vector.shape[-1], layout, 2 * frequency.size).T
    angle = floats("position", position)[..., None] * frequency
    cos, sin = np.cos(angle), np.sin(angle)
    out = np.broadcast_to(vector, np.broadcast_shapes(vector.shape[:-1], angle.shape[:-1]) + vector.shape[-1:]).copy()
    out[..., first] = cos * vector[..., first] - sin * vector[..., second]
    out[..., second] = sin * vector[..., first] + cos * vector[..., second]
    return out


def bands(x: ArrayLike, n_bands: int, layout: RopeLayout, rotary_dim: int | None = None) -> list[NDArray[np.intp]]:
    """The channels of each band of x [..., d]: n_bands contiguous, equal groups of pairs (paper, section 4.1).

    Channels past rotary_dim are paired with their neighbours and follow the RoPE pairs, so no band splits a RoPE pair.
    Raises ValueError for an odd d, or where n_bands does not divide d/2.
    """
    shape = np.shape(x)
    head_dim = shape[-1] if shape else 0
    if head_dim == 0 or head_dim % 2:
        raise ValueError(f"x: got shape {shape}, want an even last axis")
    rotary = pairs(head_dim, layout, rotary_dim)
    every = np.concatenate([rotary, np.arange(rotary.size, head_dim).reshape(-1, 2)])
    count = integer("n_bands", n_bands, 1)
    if len(every) % count:
        raise ValueError(f"n_bands: got {count}, want a divisor of {len(every)} pairs of channels")
    return [np.sort(group, axis=None) for group in np.split(every, count)]


@implements("WitCert.bandNorm_rope")
def band_norms(x: ArrayLike, n_bands: int, layout: RopeLayout, rotary_dim: int | None = None) -> Array:
    """Euclidean norm of each band, [..., d] -> [..., n_bands]; +Inf where the band holds a value that is not finite."""
    vector = np.asarray(x, dtype=np.float64)
    return np.stack([_norm(vector[..., band]) for band in bands(vector, n_bands, layout, rotary_dim)], axis=-1)


def _norm(x: Array) -> Array:
    """Euclidean norm over the last axis, scaled so that no square over- or underflows."""
    top = np.max(np.abs(x), axis=-1)
    usable = np.isfinite(top) & (top > 0)
    scale = np.where(usable, top, 1.0)
    squares = np.square(np.where(usable[..., None], x, 0.0) / scale[..., None])
    with np.errstate(over="ignore"):
        norm = scale * np.sqrt(np.sum(squares, -1))
    return np.where(np.isfinite(top), norm, np.inf)
