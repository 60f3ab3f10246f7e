"""FP8 E4M3 with a scale for each token and head (https://arxiv.org/abs/2209.05433)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Scheme, register
from .numeric import e4m3, fp16_scale


def quantize(x: Tensor) -> Tensor:
    """The largest magnitude of a token and head goes to 448."""
    x = x.to(torch.float64)
    scale = fp16_scale(x.abs().amax(-1, keepdim=True), 448)
    return e4m3(x / scale) * scale


register(Scheme("fp8_scaled", quantize, quantize, bits=8, nominal_bytes=lambda d, d_v: d + 2 + d_v + 2))
