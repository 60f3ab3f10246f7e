"""TurboQuant: a random rotation, then a Lloyd–Max codebook for a normal law (https://arxiv.org/abs/2504.19874)."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from .base import Scheme, register

LEVELS = 16


def quantize(x: Tensor) -> Tensor:
    """The rotated vector, over its norm and times √d, goes channel by channel to the nearest of 16 levels."""
    d, x = x.shape[-1], x.to(torch.float64)
    turn, levels = rotation(d).to(x.device), lloyd_max(LEVELS).to(x.device)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    turned = x @ turn / torch.where(norm > 0, norm, 1.0) * math.sqrt(d)
    code = torch.bucketize(turned, (levels[1:] + levels[:-1]) / 2)
    return levels[code] @ turn.T / math.sqrt(d) * norm.to(torch.float16).to(torch.float64)


@cache
def rotation(d: int) -> Tensor:
    """A fixed random orthogonal matrix ``[d, d]``, float64: QR of a Gaussian, the signs of R's diagonal taken out."""
    gaussian = torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()


@cache
def lloyd_max(count: int) -> Tensor:
    """The ``count`` levels with the least mean squared error for a standard normal, by Lloyd's iteration. float64."""
    levels = torch.linspace(-2.0, 2.0, count, dtype=torch.float64)
    edge = torch.tensor([math.inf], dtype=torch.float64)
    while True:
        edges = torch.cat([-edge, (levels[1:] + levels[:-1]) / 2, edge])
        density = (-edges.square() / 2).exp() / math.sqrt(2 * math.pi)
        mass = (edges / math.sqrt(2)).erf() / 2
        new = (density[:-1] - density[1:]) / (mass[1:] - mass[:-1])
        if float((new - levels).abs().max()) < 1e-13:
            return new
        levels = new


register(Scheme("turboquant4", quantize, quantize, 4, nominal_bytes=lambda d, d_v: (d + d_v) / 2 + 4))
