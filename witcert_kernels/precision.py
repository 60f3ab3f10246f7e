"""Float32 means float32: the error budget holds whatever the user allowed elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Neither autocast nor a reduced precision of float32 products (``torch.set_float32_matmul_precision``) inside."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    with torch.autocast(device.type, enabled=False):
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before
