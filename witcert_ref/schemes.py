"""Black-box quantisers: functions of keys or values [tokens, kv_heads, d] that return what the cache gives back.

A scheme returns x̂, or (x̂, steps) with steps broadcastable to x̂ where it rounds to nearest and does not clip: then
|x̂ - x| <= steps/2 in each channel, up to float64 rounding, which 2^-12 more step covers; a step of 0 is exact.
Nothing else about a scheme needs to be known to be metered. Input that is not finite is a ValueError.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from witcert_ref._checks import Array, dims, floats
from witcert_ref._fp16 import TINY, round_down, round_up

Quantized = Array | tuple[Array, Array]
Quantizer = Callable[[Array], Quantized]

KIVI_GROUP = 32  # tokens of a key group, channels of a value group
KVQUANT_GROUP = 128
KVQUANT_OUTLIERS = 0.01


@dataclass(frozen=True)
class Scheme:
    """A named pair of quantisers, one for keys and one for values."""

    name: str
    keys: Quantizer
    values: Quantizer


_SCHEMES: dict[str, Scheme] = {}


def register(name: str, keys: Quantizer, values: Quantizer | None = None) -> Scheme:
    """Add a scheme; `values` is `keys` unless given. Raises ValueError for a name that is taken."""
    if name in _SCHEMES:
        raise ValueError(f"name: got {name!r}, which is registered already, want another")
    _SCHEMES[name] = Scheme(name, keys, values or keys)
    return _SCHEMES[name]


def get(name: str) -> Scheme:
    """The scheme of this name. Raises ValueError, listing the names, if there is none."""
    if name not in _SCHEMES:
        raise ValueError(f"name: got {name!r}, want one of {', '.join(_SCHEMES)}")
    return _SCHEMES[name]


def names() -> list[str]:
    """Every registered name, in order of registration."""
    return list(_SCHEMES)


def _input(x: ArrayLike) -> Array:
    array = floats("x", x)
    dims("x", array, None, None, None)
    return array


def e4m3(x: ArrayLike) -> Array:
    """Round to the nearest FP8 E4M3 number (OCP: no infinities), ties to even, saturating at ±448."""
    value = np.clip(floats("x", x, finite=False), -448.0, 448.0)
    quantum = np.ldexp(1.0, np.maximum(np.frexp(value)[1] - 1, -6) - 3)
    return np.asarray(np.rint(value / quantum) * quantum)


def fp8_raw(x: ArrayLike) -> Array:
    """A raw cast to E4M3: no scale, saturating."""
    return e4m3(_input(x))


def fp8_scaled(x: ArrayLike) -> Array:
    """E4M3 of x/s, s = amax/448 of each token and head, rounded up to float16."""
    value = _input(x)
    scale = _scale(np.max(np.abs(value), axis=-1, keepdims=True), 448)
    return np.asarray(e4m3(value / scale) * scale)


def _rtn(x: ArrayLike, levels: int) -> Quantized:
    """Symmetric rounding to nearest: codes -levels to levels, a scale amax/levels a token and head (float16, up)."""
    value = _input(x)
    scale = _scale(np.max(np.abs(value), axis=-1, keepdims=True), levels)
    return np.clip(np.rint(value / scale), -levels, levels) * scale, scale


def sign1(x: ArrayLike) -> Array:
    """One bit a channel: the sign (0 counts as +) times the mean magnitude of the token and head, in float16."""
    value = _input(x)
    magnitude = np.mean(np.abs(value), axis=-1, keepdims=True).astype(np.float16).astype(np.float64)
    return np.asarray(np.where(value < 0, -magnitude, magnitude))


def _kivi_keys(x: ArrayLike, bits: int) -> Quantized:
    """KIVI (arXiv:2402.02750), keys: asymmetric, per channel over groups of 32 tokens; a short last group is exact."""
    value = _input(x)
    full = len(value) // KIVI_GROUP * KIVI_GROUP
    out, steps = value.copy(), np.zeros_like(value)
    for start in range(0, full, KIVI_GROUP):
        group = slice(start, start + KIVI_GROUP)
        out[group], steps[group] = _asymmetric(value[group], bits, axis=0)
    return out, steps


def _kivi_values(x: ArrayLike, bits: int) -> Quantized:
    """KIVI, values: asymmetric, per token over groups of 32 channels (the last group may be smaller)."""
    value = _input(x)
    out, steps = np.empty_like(value), np.empty_like(value)
    for start in range(0, value.shape[-1], KIVI_GROUP):
        group = (..., slice(start, start + KIVI_GROUP))
        out[group], steps[group] = _asymmetric(value[group], bits, axis=-1)
    return out, steps


def kvquant4(x: ArrayLike) -> Quantized:
    """KVQuant's dense-and-sparse form (arXiv:2401.18079), with uniform codes: 4 bits, asymmetric, per channel.

    Over groups of 128 tokens the 1 % of a channel's entries that are farthest from its median stay exact and out of
    the range; a last, short group stays exact.
    """
    value = _input(x)
    full = len(value) // KVQUANT_GROUP * KVQUANT_GROUP
    out, steps = value.copy(), np.zeros_like(value)
    kept = int(KVQUANT_OUTLIERS * KVQUANT_GROUP)
    for start in range(0, full, KVQUANT_GROUP):
        block = value[start : start + KVQUANT_GROUP]
        median = np.median(block, axis=0, keepdims=True)
        order = np.argsort(-np.abs(block - median), axis=0, kind="stable")
        outlier = np.zeros(block.shape, bool)
        np.put_along_axis(outlier, order[:kept], True, axis=0)
        dense, step = _asymmetric(np.where(outlier, median, block), 4, axis=0)
        out[start : start + KVQUANT_GROUP] = np.where(outlier, block, dense)
        steps[start : start + KVQUANT_GROUP] = np.where(outlier, 0.0, step)
    return out, steps


def turboquant4(x: ArrayLike) -> Array:
    """TurboQuant's form (arXiv:2504.19874), 4 bits: a random rotation, a float16 norm, a Lloyd-Max codebook.

    The coordinates of a rotated unit vector, times √d, are nearly standard normal; each goes to the nearest of 16
    levels.
    """
    value = _input(x)
    d = value.shape[-1]
    rotation = _rotation(d)
    norm = np.linalg.norm(value, axis=-1, keepdims=True)
    turned = value @ rotation / np.where(norm > 0, norm, 1.0) * math.sqrt(d)
    levels = lloyd_max(16)
    code = np.searchsorted((levels[1:] + levels[:-1]) / 2, turned)
    return np.asarray(levels[code] @ rotation.T / math.sqrt(d) * norm.astype(np.float16).astype(np.float64))


@functools.cache
def lloyd_max(count: int) -> Array:
    """The `count` levels with the least mean squared error for a standard normal, by Lloyd's iteration."""
    levels = np.linspace(-2.0, 2.0, count)
    for _ in range(10_000):
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        density = np.exp(-np.square(edges) / 2) / math.sqrt(2 * math.pi)
        mass = np.array([math.erf(e / math.sqrt(2)) / 2 for e in edges])
        new = np.asarray((density[:-1] - density[1:]) / (mass[1:] - mass[:-1]))
        if np.max(np.abs(new - levels)) < 1e-13:
            return new
        levels = new
    return levels


@functools.cache
def _rotation(d: int) -> Array:
    """A fixed random orthogonal matrix (Haar: QR of a Gaussian, signs of R's diagonal taken out)."""
    q, r = np.linalg.qr(np.random.default_rng(d).standard_normal((d, d)))
    return np.asarray(q * np.sign(np.diag(r)))


def _scale(amax: Array, levels: int) -> Array:
    """amax/levels rounded up to float16, at least the smallest positive one. Raises ValueError past 65504."""
    scale = np.maximum(round_up(amax / levels * (1 + 2.0**-51)).astype(np.float64), TINY)
    if np.isinf(scale).any():
        raise ValueError(f"x: got a magnitude of {amax.max()}, want at most {levels} · 65504")
    return scale


def _asymmetric(x: Array, bits: int, axis: int) -> tuple[Array, Array]:
    """(x̂, step): codes 0 to 2^bits - 1 from a zero point, the minimum; both float16, rounded down and up."""
    top = 2**bits - 1
    zero = round_down(np.min(x, axis=axis, keepdims=True)).astype(np.float64)
    if np.isinf(zero).any():
        raise ValueError(f"x: got a minimum of {x.min()}, want at least -65504")
    step = _scale(np.max(x, axis=axis, keepdims=True) - zero, top)
    return np.clip(np.rint((x - zero) / step), 0, top) * step + zero, np.broadcast_to(step, x.shape)


register("fp8_raw", fp8_raw)
register("fp8_scaled", fp8_scaled)
for _bits in (8, 4, 2):
    register(f"rtn{_bits}", functools.partial(_rtn, levels=2 ** (_bits - 1) - 1))
register("sign1", sign1)
for _bits in (4, 2):
    register(f"kivi{_bits}", functools.partial(_kivi_keys, bits=_bits), functools.partial(_kivi_values, bits=_bits))
register("kvquant4", kvquant4)
register("turboquant4", turboquant4)
