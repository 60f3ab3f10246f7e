"""Philox4x32-10 and the page-shared dither, on tensors."""

from __future__ import annotations

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF

DITHER_BITS = 15
GRID_STEP = 2.0**-DITHER_BITS


def philox_first_word(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, seed: int) -> Tensor:
    """First output word of Philox4x32-10 for int64 counters below 2^32 and a 64-bit key."""
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1  # int64 wraps modulo 2^64, which keeps all 64 bits of the product
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0


def dither(seed: int, layer: int, kv_heads: int, periods: Tensor, channels: int) -> Tensor:
    """Dither vectors ξ, float32 ``[len(periods), kv_heads, channels]``: 2^15 equally spaced values centred at 0.

    Counter ``(channel, period, kv_head, layer)``; ``periods`` int64 ``[n]`` are logical positions over the period.
    """
    device = periods.device
    shape = (len(periods), kv_heads, channels)
    channel = torch.arange(channels, device=device).expand(shape)
    head = torch.arange(kv_heads, device=device)[:, None].expand(shape)
    period = periods[:, None, None].expand(shape)
    word = philox_first_word(channel, period, head, torch.full_like(period, layer), seed)
    return (2 * (word >> (32 - DITHER_BITS)) + 1).to(torch.float32) * 2.0**-16 - 0.5
