"""Keys, queries and values by name: the shapes of real caches, and inputs made to break a writer or a reader."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .adapter import Array, Dtype

KEYS = (
    "normal", "edge", "outlier", "massive", "constant", "equal", "nearly_equal", "one_huge", "zeros", "tiny",
    "subnormal", "large", "signs",
)  # fmt: skip
QUERIES = ("normal", "after", "one_hot", "signs", "peaked", "along_u", "zero", "tiny", "one_head")
VALUES = ("normal", "edge", "zeros", "large", "equal", "tiny")


def round_to(x: Array, dtype: Dtype) -> Array:
    """Nearest numbers of the model's dtype, as float64."""
    if dtype == "float16":
        return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float64)
    single = np.asarray(x, dtype=np.float32)
    if dtype == "bfloat16":
        bits = single.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
        single = bits.astype(np.uint32).view(np.float32)
    return single.astype(np.float64)


def _edge(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Every residual at half a step: one channel is 127 · 2^-7, the others (n + ½) · 2^-7, less a hair."""
    code = rng.integers(-126, 126, shape)
    x = (code + 0.5 + rng.choice([-1, 0, 1], shape) * 2.0**-9) * 2.0**-7
    x[..., rng.integers(shape[-1])] = 127 * 2.0**-7
    return np.asarray(x)


def keys(kind: str, rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
    """``[tokens, kv_heads, d]`` in real numbers, to be rounded to the model's dtype."""
    n, _, d = shape
    x = rng.normal(size=shape) * np.exp(rng.normal(size=d))
    if kind == "edge":
        x = _edge(rng, shape)
    elif kind == "outlier":
        x[..., rng.integers(d)] *= 100
    elif kind == "massive":
        x[rng.integers(n, size=max(1, n // 4)) if n else slice(0)] *= 300
    elif kind == "constant":
        x[..., rng.integers(d)] = 7.25
        x += 3 * rng.normal(size=d)
    elif kind == "equal":
        x = np.broadcast_to(x[:1], shape).copy() if n else x
    elif kind == "nearly_equal" and n:
        x = x[:1] * (1 + 2.0**-9 * rng.random((n, 1, 1)))
    elif kind == "one_huge" and n:
        x *= 0.01
        x[rng.integers(n)] = rng.normal(size=shape[1:]) * 50
    elif kind == "zeros":
        x = x * (rng.random((n, shape[1], 1)) < 0.5)
    elif kind == "tiny":
        x *= 2.0**-22
    elif kind == "subnormal":
        x *= 2.0**-140
    elif kind == "large":
        x *= 2e4
    elif kind == "signs":
        x = np.sign(x) * 0.5
    return np.asarray(x)


def values(kind: str, rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
    """``[tokens, kv_heads, d_v]``."""
    x = rng.normal(size=shape)
    if kind == "edge":
        x = _edge(rng, shape)
    elif kind == "zeros":
        x = x * (rng.random((shape[0], shape[1], 1)) < 0.5)
    elif kind == "tiny":
        x = x * 2.0**-23
    elif kind == "large":
        x = x * 1e3 + 2e3
    elif kind == "equal":
        x = np.broadcast_to(x[:1], shape).copy() if shape[0] else x
    return np.asarray(x)


def queries(
    kind: str,
    rng: np.random.Generator,
    shape: tuple[int, int, int],
    residual: Callable[[int, int], Array],
    directions: Callable[[int], Array],
) -> Array:
    """``[rows, heads, d]``.

    ``after`` is chosen when the cache has been seen: its channels have the signs of a token's residual, so that every
    channel's error adds up; ``residual(row, head)`` gives one. ``directions(head)`` is the head's u ``[r, d]``.
    """
    q = rng.normal(size=shape)
    rows, heads, d = shape
    if kind == "after":
        for i, h in np.ndindex(rows, heads):
            sign = np.where(residual(i, h) < 0, -1.0, 1.0)
            q[i, h] = sign * (1.0 if rng.random() < 0.5 else np.abs(q[i, h]))
    elif kind == "one_hot":
        q *= np.arange(d) == rng.integers(d, size=(rows, heads, 1))
    elif kind == "signs":
        q = np.sign(q)
    elif kind == "peaked":
        q *= 8
    elif kind == "along_u":
        for i, h in np.ndindex(rows, heads):
            u = directions(h)
            if len(u):
                q[i, h] = rng.normal(size=len(u)) @ u + 2.0**-8 * q[i, h]
    elif kind == "zero":
        q *= 0
    elif kind == "tiny":
        q *= 2.0**-120
    elif kind == "one_head":
        q[:, rng.integers(heads)] *= 20
    return np.asarray(q)
