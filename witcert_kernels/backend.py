"""Which implementation runs."""

from __future__ import annotations

import os

import torch


def use_triton(device: torch.device) -> bool:
    """CUDA tensors run the Triton kernels, and so do CPU tensors under ``WITCERT_BACKEND=triton``."""
    return device.type == "cuda" or os.environ.get("WITCERT_BACKEND") == "triton"
