"""KIVI: keys per channel, values per token, asymmetric (https://arxiv.org/abs/2402.02750)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .base import Scheme, register
from .numeric import asymmetric, by_token_groups

GROUP = 32


def quantize_keys(k: Tensor, bits: int) -> Tensor:
    """Each channel over groups of 32 tokens."""
    return asymmetric(by_token_groups(k, GROUP), bits, dim=1).flatten(0, 1)


def quantize_values(v: Tensor, bits: int) -> Tensor:
    """Each token over groups of 32 channels; the last group may be smaller."""
    return torch.cat([asymmetric(part, bits, dim=-1) for part in v.split(GROUP, dim=-1)], dim=-1)


def nominal_bytes(head_dim: int, head_dim_v: int, bits: int) -> float:
    """Codes, and an fp16 scale and zero for each group."""
    return (head_dim + head_dim_v) * bits / 8 + 4 * head_dim / GROUP + 4 * -(-head_dim_v // GROUP)


for _bits in (4, 2):
    register(
        Scheme(
            f"kivi{_bits}",
            partial(quantize_keys, bits=_bits),
            partial(quantize_values, bits=_bits),
            _bits,
            GROUP,
            partial(nominal_bytes, bits=_bits),
        )
    )
