"""The INT8 writer: scales, codes, and the optional subtractive dither that a page shares (paper, section 4.2).

x̂ = s (code - ξ), code = round(x/s + ξ), with s the float16 scale that is stored. Without dither ξ = 0.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from witcert_ref._checks import Array, floats, integer, scalar
from witcert_ref._fp16 import round_up
from witcert_ref.philox import philox4x32, words
from witcert_ref.spec import implements

GRID = 2**15  # dither values: 15 bits, so that code - ξ is exact in float32


@implements("WitCert.sum_residual_eq_progression")
def dither(seed: int, layer: ArrayLike, kv_head: ArrayLike, page: ArrayLike, channels: ArrayLike) -> Array:
    """ξ = (2i + 1)/2^16 - ½ with i the top 15 bits of Philox4x32-10's first word; all |ξ| < ½.

    Counter (channel, page, kv_head, layer), key the 64-bit seed (low word first). `channels` is d, for channels 0 to
    d - 1, or an array of indices; the arguments broadcast, so page [tokens, 1] gives [tokens, d]. Raises TypeError or
    ValueError for anything but 32-bit words and a 64-bit seed.
    """
    key = integer("seed", seed, 0, 2**64 - 1)
    channel = np.asarray(channels)
    if channel.ndim == 0:
        channel = np.arange(integer("channels", channel[()], 1))
    named = (("channels", channel), ("page", page), ("kv_head", kv_head), ("layer", layer))
    counter = np.stack(np.broadcast_arrays(*(words(name, value) for name, value in named)), axis=-1)
    first = philox4x32(counter, [key & 0xFFFFFFFF, key >> 32])[..., 0]
    return (2.0 * (first >> np.uint32(17)) + 1) / 2**16 - 0.5


def scale_of(k: ArrayLike, group: int, exclude: ArrayLike | None = None, levels: float = 127.0) -> NDArray[np.float16]:
    """The smallest float16 s > 0 with amax <= levels · s for each group of channels, [..., d] -> [..., d/group].

    levels is 127, or 126.5 with a dither, whose codes then never clip. `exclude` (bool, broadcastable to k) keeps the
    bypass channels out of amax. +Inf where a group holds a value that is not finite, or needs a scale above 65504.
    Raises ValueError for a group that does not divide d.
    """
    key, width = np.asarray(k, dtype=np.float64), integer("group", group, 1)
    if key.ndim == 0 or key.shape[-1] % width:
        raise ValueError(f"group: got {width}, want a divisor of the last axis of {key.shape}")
    top = scalar("levels", levels, 1)
    magnitude = np.abs(key) if exclude is None else np.where(exclude, 0.0, np.abs(key))
    amax = np.max(magnitude.reshape(*key.shape[:-1], -1, width), axis=-1)
    scale = np.maximum(round_up(amax / top), np.finfo(np.float16).smallest_subnormal)
    # the quotient was rounded; the product of 11 and 8 bits is not
    return np.where(scale.astype(np.float64) * top < amax, np.nextafter(scale, np.float16(np.inf)), scale)


def steps(scale: ArrayLike, head_dim: int) -> Array:
    """The step of every channel, [..., d/group] -> [..., d] (+Inf where the scale is)."""
    size = np.asarray(scale, dtype=np.float64)
    width, rest = divmod(integer("head_dim", head_dim, 1), max(size.shape[-1] if size.ndim else 0, 1))
    if size.ndim == 0 or rest or not (size > 0).all():
        raise ValueError(f"scale: got shape {size.shape}, want positive scales, [..., d/group] with d = {head_dim}")
    return np.repeat(size, width, axis=-1)


@implements("WitCert.abs_residual_le")
@implements("WitCert.abs_code_le")
@implements("WitCert.abs_code_le_of_rounded_scale")
@implements("WitCert.mgf_residual")
@implements("WitCert.abs_dequantize_sub_le", pending=True)
def quantize(k: ArrayLike, scale: ArrayLike, xi: ArrayLike = 0.0, exclude: ArrayLike | None = None) -> NDArray[np.int8]:
    """Codes round(k/s + ξ), ties to even, clamped to ±127: int8 [..., d].

    |s (code - ξ) - k| <= s/2 where |k| <= 126.5 s, and without dither where |k| <= 127.5 s; exactly so for k of float32
    precision (a quotient that float64 rounds to a tie is one).
    k [..., d], scale [..., d/group] as stored, xi broadcastable to k. Code 0 where `exclude`, and where the scale is
    +Inf. Raises ValueError for a scale that is not positive, a xi outside (-½, ½), or a NaN under a finite scale.
    """
    key = np.asarray(k, dtype=np.float64)
    size, shift = steps(scale, key.shape[-1] if key.ndim else 0), _dither(xi)
    unread = np.isinf(size) if exclude is None else np.isinf(size) | exclude
    codes = np.rint(np.where(unread, 0.0, key) / np.where(unread, 1.0, size) + np.where(unread, 0.0, shift))
    if np.isnan(codes).any():
        raise ValueError("k: got NaN under a finite scale, want the scale that `scale_of` gives it")
    return np.clip(codes, -127, 127).astype(np.int8)


def dequantize(code: ArrayLike, scale: ArrayLike, xi: ArrayLike = 0.0) -> Array:
    """s (code - ξ), [..., d]; 0 where the scale is +Inf, so that 0 · Inf never decides anything."""
    codes = floats("code", code)
    size = steps(scale, codes.shape[-1] if codes.ndim else 0)
    return np.where(np.isinf(size), 0.0, size) * (codes - _dither(xi))


def _dither(xi: ArrayLike) -> Array:
    shift = floats("xi", xi)
    if not (np.abs(shift) < 0.5).all():
        raise ValueError(f"xi: got {shift.flat[np.argmax(np.abs(shift))]}, want dither in (-1/2, 1/2)")
    return shift
