"""One bit a channel: sign times mean magnitude (XNOR-Net, https://arxiv.org/abs/1603.05279)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Scheme, register


def quantize(x: Tensor) -> Tensor:
    """The sign (0 counts as +) times the mean magnitude of the token and head, in fp16."""
    x = x.to(torch.float64)
    magnitude = x.abs().mean(-1, keepdim=True).to(torch.float16).to(torch.float64)
    return torch.where(x < 0, -magnitude, magnitude)


register(Scheme("sign1", quantize, quantize, bits=1, nominal_bytes=lambda d, d_v: (d + d_v) / 8 + 4))
