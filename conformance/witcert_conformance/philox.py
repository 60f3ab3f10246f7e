"""Philox4x32-10 and the dither vectors, by definition (design: counter (channel, period, kv head, layer))."""

from __future__ import annotations

import numpy as np

from .adapter import Array, Ints

_MASK = np.uint64(0xFFFFFFFF)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85

GRID = 2**15
"""Dither values."""


def first_word(counter: tuple[Ints, Ints, Ints, Ints], key: int) -> Ints:
    """First output word for counters below 2^32 and a 64-bit key."""
    c0, c1, c2, c3 = (np.asarray(c).astype(np.uint64) for c in counter)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return c0.astype(np.int64)


def dither(seed: int, layer: int, kv_head: Ints, period: Ints, channels: int) -> Array:
    """ξ ``[…, channels]`` for broadcastable ``kv_head``, ``period``: (2 i + 1)/2^16 − ½, i the word's top 15 bits."""
    shape = np.broadcast_shapes(np.shape(kv_head), np.shape(period))
    head, page = (np.broadcast_to(x, shape)[..., None] for x in (kv_head, period))
    counter = np.broadcast_arrays(np.arange(channels), page, head, np.int64(layer))
    word = first_word((counter[0], counter[1], counter[2], counter[3]), seed)
    return np.asarray((2 * (word >> 17) + 1) / 2.0**16 - 0.5)
