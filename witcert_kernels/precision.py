"""Float32 means float32: the error budget holds whatever the user allowed elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_inside = 0
_before = "none"


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Neither autocast nor a reduced precision of float32 products (``torch.set_float32_matmul_precision``) inside.

    The precision is the process's: the first thread in takes it, the last one out gives it back.
    """
    global _inside, _before
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with torch.autocast(device.type, enabled=False):
        with _lock:
            if _inside == 0:
                _before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
            _inside += 1
        try:
            yield
        finally:
            with _lock:
                _inside -= 1
                if _inside == 0:
                    matmul.fp32_precision = _before
