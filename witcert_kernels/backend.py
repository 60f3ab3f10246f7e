"""Which implementation runs."""

from __future__ import annotations

import os
from functools import cache
from importlib import util

import torch

BACKENDS = ("", "torch", "triton")


def _asked() -> str:
    """What ``WITCERT_BACKEND`` asks for; empty for the fastest."""
    name = os.environ.get("WITCERT_BACKEND", "")
    if name not in BACKENDS:
        raise ValueError(f"WITCERT_BACKEND: got {name!r}, wants torch, triton or nothing")
    return name


def use_triton(device: torch.device) -> bool:
    """CUDA tensors run the Triton kernels, and so do CPU tensors under ``WITCERT_BACKEND=triton``."""
    return device.type == "cuda" or _asked() == "triton"


def use_numba(device: torch.device) -> bool:
    """CPU tensors run what numba compiled where it is installed, but not under ``WITCERT_BACKEND=torch``."""
    return device.type == "cpu" and _asked() == "" and _has_numba()


@cache
def _has_numba() -> bool:
    return util.find_spec("numba") is not None
