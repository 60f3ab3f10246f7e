"""Arithmetic that several schemes share. Everything is float64 inside; scales are what fp16 can hold, rounded up."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_kernels.writer import FP16_TINY, half_up


def fp16_scale(amax: Tensor, levels: int) -> Tensor:
    """Smallest fp16 number above ``amax / levels``, at least the smallest positive one; Inf on overflow. float64."""
    return half_up((amax / levels * (1 + 2.0**-51)).nan_to_num(nan=float("inf"))).to(torch.float64).clamp_min(FP16_TINY)


def half_down(x: Tensor) -> Tensor:
    """Round float64 numbers down to fp16; −Inf on overflow."""
    above = half_up(x.abs())
    over = (above.to(torch.float64) > x).to(torch.int16)
    below = (above.view(torch.int16) - over).view(torch.float16)
    return torch.where(x < 0, -above, below)


def symmetric(x: Tensor, levels: int) -> Tensor:
    """Rounded to nearest, codes −levels to levels, one scale for the last axis; NaN where that is not finite."""
    x = x.to(torch.float64)
    scale = fp16_scale(x.abs().amax(-1, keepdim=True), levels)
    return (x / scale).round().clamp(-levels, levels) * scale


def asymmetric(x: Tensor, bits: int, dim: int) -> Tensor:
    """Rounded to nearest, codes 0 to 2^bits − 1 from the minimum of axis ``dim``, rounded down to fp16."""
    x, top = x.to(torch.float64), 2**bits - 1
    zero = half_down(x.amin(dim, keepdim=True)).to(torch.float64)
    scale = fp16_scale(x.amax(dim, keepdim=True) - zero, top)
    return ((x - zero) / scale).round().clamp(0, top) * scale + zero


def e4m3(x: Tensor) -> Tensor:
    """Nearest FP8 E4M3 number of float64 ``x`` (ties to even), saturating at ±448."""
    x = x.clamp(-448.0, 448.0)
    exponent = (torch.frexp(x).exponent - 1).clamp_min(-6) - 3
    quantum = torch.ldexp(torch.ones_like(x), exponent)
    return (x / quantum).round() * quantum


def by_token_groups(x: Tensor, group: int) -> Tensor:
    """``[tokens, …] -> [tokens / group, group, …]``."""
    return x.unflatten(0, (-1, group))
