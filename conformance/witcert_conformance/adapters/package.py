"""The groups that ``witcert`` itself keeps for the kernels: the gate and the fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from witcert.calibration import fit
from witcert.capture import Captured, CapturedLayer, CaptureMetadata
from witcert.gate import read_gated
from witcert.read import Read, Reading

from ..adapter import Array, Layout

OFFERS = frozenset({"gate", "fit"})


class GatedStore:
    """What the gate needs of a layer's store, over the pages of a suite's store: ``page_in(page, kv_head) -> slot``."""

    def __init__(self, pool: Any, page_table: Tensor, lengths: list[int], exact_pages: Tensor, page_in: Any) -> None:
        self.pool, self.page_table, self.lengths, self.exact_pages = pool, page_table, lengths, exact_pages
        self.page_ins: list[tuple[int, int, int]] = []
        self._page_in = page_in

    def repair(self, pages: Tensor) -> int:
        """Make pages exact, bool ``[batch, kv_heads, max_pages]``."""
        for b, h, p in pages.nonzero().tolist():
            self.exact_pages[b, h, p] = self._page_in(int(self.page_table[b, p]), h)
            self.page_ins.append((b, h, p))
        return int(pages.sum())


def gate(store: GatedStore, q: Tensor, sm_scale: float, tau: float) -> Reading:
    """The gated read of one row a sequence."""
    read = Read(store, range(len(q)), store.lengths, q, sm_scale=sm_scale)  # type: ignore[arg-type]
    return read_gated(read, tau)


def fit_equaliser(keys: Array, layout: Layout) -> tuple[Array, Array]:
    """``(mu, f)`` of one layer's keys."""
    k = torch.from_numpy(np.asarray(keys, np.float32))
    captured = Captured(
        [CapturedLayer(q=k[-1:], k=k, v=k)],
        CaptureMetadata(sm_scale=1.0, rope_layout=layout.rope_layout, rotary_dim=layout.rotary_dim),
    )
    (layer,) = fit(captured, directions=0)
    return layer.mu.double().numpy(), layer.f.double().numpy()
