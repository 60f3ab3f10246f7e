"""KVQuant's dense-and-sparse form with uniform codes (https://arxiv.org/abs/2401.18079)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Scheme, register
from .numeric import asymmetric, by_token_groups

GROUP = 128
OUTLIERS = int(0.01 * GROUP)


def quantize(x: Tensor) -> Tensor:
    """4 bits, each channel over 128 tokens; the 1 % farthest from its median stay exact and out of the range."""
    block = by_token_groups(x.to(torch.float64), GROUP)
    middle = block.sort(dim=1).values[:, GROUP // 2 - 1 : GROUP // 2 + 1].mean(1, keepdim=True)
    farthest = (block - middle).abs().argsort(dim=1, descending=True, stable=True)[:, :OUTLIERS]
    outlier = torch.zeros(block.shape, dtype=torch.bool, device=x.device).scatter_(1, farthest, True)
    dense = asymmetric(torch.where(outlier, middle, block), 4, dim=1)
    return torch.where(outlier, block, dense).flatten(0, 1)


def nominal_bytes(head_dim: int, head_dim_v: int) -> float:
    """Codes, an fp16 scale and zero for each channel and group, and value and index of the outliers."""
    return (head_dim + head_dim_v) * (0.5 + (4 + 3 * OUTLIERS) / GROUP)


register(Scheme("kvquant4", quantize, quantize, 4, GROUP, nominal_bytes))
