"""Float32 means float32: the error budget holds whatever the user allowed elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Products:
    """The precision of a backend's float32 products, which is the process's."""

    def __init__(self, setting: Any) -> None:
        self.setting, self.lock = setting, threading.Lock()
        self.inside, self.before = 0, "none"

    def enter(self) -> None:
        """Full precision; the first thread in remembers what was."""
        with self.lock:
            if self.inside == 0:
                self.before, self.setting.fp32_precision = self.setting.fp32_precision, "ieee"
            self.inside += 1

    def leave(self) -> None:
        """The last thread out gives back what was."""
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.setting.fp32_precision = self.before


_CPU = _Products(torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_CUDA = _Products(torch.backends.cuda.matmul)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Neither autocast nor a reduced precision of the device's float32 products (TF32, bfloat16) inside."""
    products = _CUDA if device.type == "cuda" else _CPU
    with torch.autocast(device.type, enabled=False):
        products.enter()
        try:
            yield
        finally:
            products.leave()
