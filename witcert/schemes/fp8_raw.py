"""FP8 E4M3 by a raw cast (OCP 8-bit floating point, https://arxiv.org/abs/2209.05433)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Scheme, register
from .numeric import e4m3


def quantize(x: Tensor) -> Tensor:
    """No scale at all; numbers beyond ±448 saturate."""
    return e4m3(x.to(torch.float64))


register(Scheme("fp8_raw", quantize, quantize, bits=8, nominal_bytes=lambda d, d_v: d + d_v))
