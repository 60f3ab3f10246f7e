"""A chunk of positions that a model appends to every sequence, padding left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from .padding import continue_padding, left_padding
from .store import LayerStore
from .transfer import to_device


@dataclass(frozen=True)
class Chunk:
    """``n`` positions of every sequence.

    Attributes:
        pads: positions of padding before each sequence's first token, this chunk's included.
        counts: tokens of each sequence in this chunk.
        rows: which of the ``batch * n`` positions are tokens, int64; None for all.
    """

    n: int
    pads: list[int]
    counts: list[int]
    rows: Tensor | None

    @classmethod
    def of(cls, store: LayerStore | None, mask: Tensor | None, batch: int, n: int, device: torch.device) -> Chunk:
        """The chunk behind what a store holds (None: nothing), with the padding that a mask of all positions says.

        Raises:
            TypeError, ValueError: another batch, or a mask that is not left padding or contradicts the store.
        """
        if store is None:
            old, pads = 0, left_padding(mask, batch, n)
        else:
            old = store.total
            if batch != len(store.lengths):
                raise ValueError(f"batch: got {batch} sequences, wants the {len(store.lengths)} that the cache holds")
            pads = continue_padding(mask, store.pads, store.lengths, old + n)
        first = [max(0, pad - old) for pad in pads]
        counts = [n - f for f in first]
        if not any(first):
            return cls(n, pads, counts, None)
        rows = torch.cat([torch.arange(b * n + f, (b + 1) * n) for b, f in enumerate(first)])
        return cls(n, pads, counts, to_device(rows, device))

    def tokens(self, x: Tensor) -> Tensor:
        """``[batch, heads, n, d] -> [rows, heads, d]``, one sequence after the other."""
        flat = x.transpose(1, 2).flatten(0, 1)
        return flat.contiguous() if self.rows is None else flat[self.rows]

    def positions(self, tokens: Tensor) -> Tensor:
        """``[rows, heads, d] -> [batch, n, heads, d]``, 0 in padded positions."""
        if self.rows is not None:
            empty = tokens.new_zeros(len(self.counts) * self.n, *tokens.shape[1:])
            tokens = empty.index_copy(0, self.rows, tokens)
        return tokens.unflatten(0, (len(self.counts), self.n))

    def rows_of(self, sequences: Sequence[int], device: torch.device) -> Tensor:
        """Rows of some sequences among those of :meth:`tokens`, int64."""
        start = [0, *accumulate(self.counts)]
        return to_device(torch.cat([torch.arange(start[b], start[b + 1]) for b in sequences]), device)
