"""Round to nearest, the baseline of LLM.int8() and its kin (https://arxiv.org/abs/2208.07339)."""

from __future__ import annotations

from functools import partial

from .base import Scheme, register
from .numeric import symmetric


def nominal_bytes(head_dim: int, head_dim_v: int, bits: int) -> float:
    """Codes, and an fp16 scale each for key and value."""
    return (head_dim + head_dim_v) * bits / 8 + 4


for _bits in (8, 4, 2):
    _quantize = partial(symmetric, levels=2 ** (_bits - 1) - 1)
    register(Scheme(f"rtn{_bits}", _quantize, _quantize, _bits, nominal_bytes=partial(nominal_bytes, bits=_bits)))
