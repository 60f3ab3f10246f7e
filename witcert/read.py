"""One read of a layer's store: the op's arguments for some of its sequences, and what came back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from witcert_kernels import Budget, Certificate, Telemetry, certified_decode

from .store import LayerStore
from .transfer import to_device


@dataclass(frozen=True)
class Read:
    """Query rows of some sequences of a store, and what they attend to.

    Args:
        store: the layer's store.
        sequences: which of its sequences, ``[b]``.
        lengths: tokens that each of them reads from the store, ``[b]``.
        q: ``[rows, heads, head_dim]``.
        qo_indptr: first row of each sequence, ``[b + 1]``; None for one row each.
        k_new, v_new: the rows' own chunk, exact, ``[rows, kv_heads, d]``; None for decode rows, which read all tokens
            from the store.
        sm_scale, logits_soft_cap, window_left, sinks, budget: as for :func:`witcert_kernels.certified_decode`.
    """

    store: LayerStore
    sequences: Sequence[int]
    lengths: Sequence[int]
    q: Tensor
    qo_indptr: Sequence[int] | None = None
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    sm_scale: float | None = None
    logits_soft_cap: float = 0.0
    window_left: int = -1
    sinks: Tensor | None = None
    budget: Budget | None = None

    @property
    def is_decode(self) -> bool:
        """Whether the rows read everything from the store."""
        return self.k_new is None

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Sequence and logical position of each query row."""
        if self.qo_indptr is None:
            return [(s, n - 1) for s, n in zip(self.sequences, self.lengths, strict=True)]
        counts = [b - a for a, b in zip(self.qo_indptr, self.qo_indptr[1:], strict=False)]
        return [
            (s, n + i) for s, n, count in zip(self.sequences, self.lengths, counts, strict=True) for i in range(count)
        ]

    def run(
        self, *, return_shares: bool = False, telemetry: Telemetry | None = None
    ) -> tuple[Tensor, Tensor, Certificate]:
        """Call the op: ``out``, ``lse`` and the certificate, a row for each of ``q``."""
        store, device = self.store, self.q.device
        index = self._index()
        return certified_decode(
            self.q,
            store.pool,
            store.page_table if index is None else store.page_table[index],
            to_device(self.lengths, device, torch.int32),
            None if self.qo_indptr is None else to_device(self.qo_indptr, device, torch.int32),
            self.k_new,
            self.v_new,
            exact_pages=self.exact_pages(),
            sm_scale=self.sm_scale,
            sinks=self.sinks,
            logits_soft_cap=self.logits_soft_cap,
            window_left=self.window_left,
            budget=self.budget,
            return_shares=return_shares,
            telemetry=telemetry,
        )

    def exact_pages(self) -> Tensor | None:
        """The exact pages of these sequences, int32 ``[b, kv_heads, max_pages]``; None if there are none."""
        table, index = self.store.exact_pages, self._index()
        return table if table is None or index is None else table[index]

    def readable_pages(self) -> Tensor:
        """Pages with a token that a decode row attends to, bool ``[b, max_pages]``."""
        page_size = self.store.pool.layout.page_size
        page = torch.arange(self.store.page_table.shape[1], device=self.q.device)
        length = to_device(self.lengths, self.q.device)[:, None]
        readable = page * page_size < length
        if self.window_left >= 0:
            readable &= (page + 1) * page_size > length - 1 - self.window_left
        return readable

    def only(self, rows: Sequence[int]) -> Read:
        """Some of the rows of a read with one row a sequence."""
        return replace(
            self,
            sequences=[self.sequences[i] for i in rows],
            lengths=[self.lengths[i] for i in rows],
            q=self.q[to_device(rows, self.q.device)],
        )

    def _index(self) -> Tensor | None:
        if list(self.sequences) == list(range(len(self.store.lengths))):
            return None
        return to_device(self.sequences, self.q.device)


@dataclass(frozen=True)
class Reading:
    """What a read gave, after the gate if there is one.

    Attributes:
        out ``[rows, heads, head_dim_v]``, lse float32 ``[rows, heads]``, certificate: of the last decode.
        meter_before: float32 ``[rows, heads]``, the meter before any repair.
        compressed_before: int32 ``[rows, heads]``, compressed tokens that were attended before any repair.
        repaired: int64 ``[rows, kv_heads]``, pages that the gate made exact for each row.
    """

    out: Tensor
    lse: Tensor
    certificate: Certificate
    meter_before: Tensor
    compressed_before: Tensor
    repaired: Tensor


def read_once(read: Read, telemetry: Telemetry | None = None) -> Reading:
    """Read without a gate; ``telemetry`` counts the cells."""
    out, lse, certificate = read.run(telemetry=telemetry)
    repaired = torch.zeros(len(read.q), read.store.pool.layout.kv_heads, dtype=torch.int64, device=read.q.device)
    return Reading(out, lse, certificate, certificate.meter, certificate.compressed, repaired)
