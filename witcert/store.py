"""The paged store of one layer: every part of it, and the only three operations that change it.

``write`` appends tokens, ``rearrange`` selects, repeats and shortens sequences, ``repair`` puts exact pages in place
of compressed ones. Each touches all parts: pool, backing store, page tables, exact pages, lengths, padding, tails.
What they make are ordinary tensors even in inference mode, so that a cache may be written in and out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from witcert_kernels import ObservatoryLayout, ObservatoryPool, PackedPool, StoreLayout, observe_, quantize_

from .schemes import Scheme
from .transfer import to_device

GROWTH = 64


class Backing:
    """Exact keys and values in the model's dtype, page by page as in the pool.

    ``k`` ``[pages, page_size, kv_heads, head_dim]``, ``v`` ``[…, head_dim_v]``.
    """

    def __init__(self, layout: StoreLayout | ObservatoryLayout, device: torch.device) -> None:
        shape = (0, layout.page_size, layout.kv_heads)
        self.k = torch.zeros(*shape, layout.head_dim, dtype=layout.dtype, device=device)
        self.v = torch.zeros(*shape, layout.head_dim_v, dtype=layout.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return self.k.nbytes + self.v.nbytes

    def take_pages(self, pages: Tensor, num_pages: int) -> None:
        """As the pools' method of this name."""
        for name in ("k", "v"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(num_pages, *old.shape[1:])
            new[: len(pages)] = old[pages]
            setattr(self, name, new)


@dataclass(frozen=True)
class Tail:
    """Exact tokens ``start …`` of a sequence: those of its incomplete group, older ones while a roll-back may come.

    k ``[tokens, kv_heads, head_dim]``, v ``[tokens, kv_heads, head_dim_v]``.
    """

    start: int
    k: Tensor
    v: Tensor

    def cut(self, begin: int, end: int) -> Tail:
        """Tokens ``begin … end`` of the sequence."""
        part = slice(begin - self.start, end - self.start)
        return Tail(begin, self.k[part].clone(), self.v[part].clone())


class LayerStore:
    """One layer's tokens, a batch of sequences that each own their pages.

    Args:
        pool: empty pool of the layer.
        scheme: the black-box scheme whose reconstructions an observatory holds; None for a packed pool.
        batch: sequences.
        backing: keep exact keys and values as well.

    Attributes:
        pages: page numbers of each sequence, in order; more than its tokens need when the pool grew ahead.
        lengths: tokens of each sequence. pads: positions of padding before its first token.
        exact_pages: int32 ``[batch, kv_heads, max_pages]``, −1 or a slot of ``pool.exact``; None before any repair.
    """

    def __init__(self, pool: PackedPool | ObservatoryPool, scheme: Scheme | None, batch: int, *, backing: bool) -> None:
        self.pool = pool
        self.scheme = scheme
        self.backing = Backing(pool.layout, pool.device) if backing else None
        self.pages: list[list[int]] = [[] for _ in range(batch)]
        self.lengths = [0] * batch
        self.pads = [0] * batch
        self.exact_pages: Tensor | None = None
        kv_heads, exact = pool.layout.kv_heads, pool.exact
        empty = [x.new_empty(0, kv_heads, x.shape[-1]) for x in (exact.k, exact.v)]
        self.tails = [Tail(0, *empty)] * batch
        self._page_table: Tensor | None = None

    @property
    def group(self) -> int:
        """Tokens that are quantised together."""
        return self.scheme.token_group if self.scheme else 1

    @property
    def total(self) -> int:
        """Positions of every sequence, padding counted."""
        return self.pads[0] + self.lengths[0] if self.lengths else 0

    @property
    def page_table(self) -> Tensor:
        """int32 ``[batch, max_pages]``; 0 where a sequence has fewer pages."""
        if self._page_table is None:
            width = max(map(len, self.pages), default=0)
            rows = [row + [0] * (width - len(row)) for row in self.pages]
            flat = to_device(list(chain.from_iterable(rows)), self.pool.device, torch.int32)
            self._page_table = flat.view(len(rows), width)
        return self._page_table

    @property
    def used_pages(self) -> list[int]:
        """Pages of each sequence that hold a token."""
        return [-(-length // self.pool.layout.page_size) for length in self.lengths]

    @property
    def nbytes(self) -> dict[str, int]:
        """Allocated bytes of each part: ``store``, ``backing``, ``exact`` (repaired pages), ``tail``."""
        return {
            "store": self.pool.nbytes,
            "backing": self.backing.nbytes if self.backing else 0,
            "exact": self.pool.exact.nbytes,
            "tail": sum(tail.k.nbytes + tail.v.nbytes for tail in self.tails),
        }

    def slots(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """Pool slots of some tokens, int64 ``[n]``."""
        page_size = self.pool.layout.page_size
        page = self.page_table[sequences, positions // page_size].to(torch.int64)
        return page * page_size + positions % page_size

    @torch.inference_mode(False)
    @torch.no_grad()
    def write(self, k: Tensor, v: Tensor, counts: Sequence[int], *, keep_past: bool = False) -> None:
        """Append ``counts[b]`` tokens to each sequence b.

        Args:
            k, v: ``[sum(counts), kv_heads, d]`` in the model's dtype, one sequence after the other.
            keep_past: keep the exact tokens of groups that this completes, until the next :meth:`rearrange`.
        """
        if sum(counts) == 0:
            return
        self._reserve(counts)
        sequences, positions = self._tokens(self.lengths, [n + c for n, c in zip(self.lengths, counts, strict=True)])
        slots = self.slots(sequences, positions)
        if isinstance(self.pool, PackedPool):
            quantize_(k, v, self.pool, slots, positions)
        elif self.group == 1:
            self._observe(k, v, slots, exact=False)
        else:
            self._observe_groups(k, v, counts, keep_past=keep_past and self.backing is None)
        if self.backing is not None:
            self.backing.k.flatten(0, 1)[slots] = k
            self.backing.v.flatten(0, 1)[slots] = v
        self._write_exact(k, v, sequences, positions)
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]

    @torch.inference_mode(False)
    @torch.no_grad()
    def rearrange(self, rows: Sequence[int], lengths: Sequence[int], pads: Sequence[int]) -> None:
        """Make sequence i the first ``lengths[i]`` tokens of the old sequence ``rows[i]``, behind ``pads[i]`` padding.

        Raises:
            ValueError: a group of tokens would be split whose exact tokens are gone; nothing has changed then.
        """
        whole = [length // self.group * self.group for length in lengths]
        for row, length, begin in zip(rows, lengths, whole, strict=True):
            if begin < length and begin < self.tails[row].start and self.backing is None:
                raise ValueError(
                    f"crop: got {length} tokens to keep, which splits a group of {self.group} that "
                    f"{self._name} has quantised together; call activate_past_recording() first, or use backing=True"
                )
        old_lengths = [self.lengths[row] for row in rows]
        tails = [self._tail(row, begin, length) for row, begin, length in zip(rows, whole, lengths, strict=True)]
        page_size = self.pool.layout.page_size
        needed = [-(-length // page_size) for length in lengths]
        kept = [self.pages[row][:n] for row, n in zip(rows, needed, strict=True)]
        if kept != self.pages:
            self._take_pages(list(chain.from_iterable(kept)), sum(needed))
            starts = [sum(needed[:i]) for i in range(len(needed))]
            self.pages = [list(range(s, s + n)) for s, n in zip(starts, needed, strict=True)]
            self._take_exact(rows, needed)
            self._page_table = None
        self.lengths, self.pads, self.tails = list(lengths), list(pads), tails
        cut = [i for i, (old, length) in enumerate(zip(old_lengths, lengths, strict=True)) if old > length]
        self._restore(cut, old_lengths, whole)

    @torch.inference_mode(False)
    @torch.no_grad()
    def repair(self, pages: Tensor) -> int:
        """Make pages exact, keys and values, and return how many.

        Args:
            pages: bool ``[batch, kv_heads, max_pages]``; pages that are exact already are left alone.

        Raises:
            ValueError: there is no backing store.
        """
        if self.backing is None:
            raise ValueError("tau: got a gate on a store without backing, wants backing=True or tau at construction")
        table = self._exact_table()
        sequence, kv_head, page = (pages & (table < 0)).nonzero(as_tuple=True)
        count, exact = len(sequence), self.pool.exact
        if count:
            number = self.page_table[sequence, page].to(torch.int64)
            table[sequence, kv_head, page] = torch.arange(
                len(exact.k), len(exact.k) + count, dtype=torch.int32, device=table.device
            )
            exact.k = torch.cat([exact.k, self.backing.k[number, :, kv_head]])
            exact.v = torch.cat([exact.v, self.backing.v[number, :, kv_head]])
        return count

    @property
    def repaired_pages(self) -> int:
        """How many (kv head, page) pairs are exact."""
        return len(self.pool.exact.k)

    @property
    def _name(self) -> str:
        return self.scheme.name if self.scheme else "the packed store"

    def _reserve(self, counts: Sequence[int]) -> None:
        """Own the pages that ``counts`` more tokens need; small pages are taken ``GROWTH`` tokens at a time."""
        page_size = self.pool.layout.page_size
        step = max(1, GROWTH // page_size)
        total = self.pool.num_pages
        grown = []
        for owned, length, count in zip(self.pages, self.lengths, counts, strict=True):
            missing = max(0, -(-(length + count) // page_size) - len(owned))
            missing = -(-missing // step) * step
            grown.append(owned + list(range(total, total + missing)))
            total += missing
        if total > self.pool.num_pages:
            self._take_pages(list(range(self.pool.num_pages)), total)
            self.pages, self._page_table = grown, None
            if self.exact_pages is not None:
                more = max(map(len, grown)) - self.exact_pages.shape[-1]
                self.exact_pages = torch.nn.functional.pad(self.exact_pages, (0, more), value=-1)

    def _take_pages(self, pages: list[int], num_pages: int) -> None:
        index = to_device(pages, self.pool.device)
        self.pool.take_pages(index, num_pages)
        if self.backing is not None:
            self.backing.take_pages(index, num_pages)

    def _exact_table(self) -> Tensor:
        if self.exact_pages is None:
            batch, width = self.page_table.shape
            shape = (batch, self.pool.layout.kv_heads, width)
            self.exact_pages = torch.full(shape, -1, dtype=torch.int32, device=self.pool.device)
        return self.exact_pages

    def _take_exact(self, rows: Sequence[int], needed: list[int]) -> None:
        """Give each new sequence its own copy of its exact pages, since later tokens go into them."""
        if self.exact_pages is None:
            return
        width = max(needed, default=0)
        table = self.exact_pages[to_device(rows, self.pool.device)][..., :width]
        gone = torch.arange(width, device=table.device) >= to_device(needed, table.device)[:, None, None]
        table = table.masked_fill(gone, -1)
        present = table >= 0
        slots, exact = table[present].to(torch.int64), self.pool.exact
        exact.k, exact.v = exact.k[slots], exact.v[slots]
        table[present] = torch.arange(len(slots), dtype=torch.int32, device=table.device)
        self.exact_pages = table

    def _write_exact(self, k: Tensor, v: Tensor, sequences: Tensor, positions: Tensor) -> None:
        """Tokens that fall into a repaired page go into its exact slot too, so that it stays exact."""
        if self.exact_pages is None:
            return
        page_size = self.pool.layout.page_size
        slot = self.exact_pages[sequences, :, positions // page_size]
        token, kv_head = (slot >= 0).nonzero(as_tuple=True)
        where = slot[token, kv_head].to(torch.int64), (positions % page_size)[token]
        self.pool.exact.k[where] = k[token, kv_head]
        self.pool.exact.v[where] = v[token, kv_head]

    def _tokens(self, begin: Sequence[int], end: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Sequence and position of the tokens ``begin[b] … end[b]`` of every sequence b, int64 ``[n]`` each."""
        sequences = np.repeat(np.arange(len(begin)), np.subtract(end, begin))
        positions = np.concatenate([np.arange(b, e) for b, e in zip(begin, end, strict=True)])
        device = self.pool.device
        return to_device(torch.from_numpy(sequences), device), to_device(torch.from_numpy(positions), device)

    def _observe(self, k: Tensor, v: Tensor, slots: Tensor, *, exact: bool) -> None:
        """Write reconstructions with their witness; ``exact`` for tokens that the scheme keeps as they are."""
        assert isinstance(self.pool, ObservatoryPool) and self.scheme is not None
        if len(slots):
            k_hat = k if exact else self.scheme.quantize_keys(k)
            v_hat = v if exact else self.scheme.quantize_values(v)
            observe_(k, v, k_hat, v_hat, self.pool, slots)

    def _observe_groups(self, k: Tensor, v: Tensor, counts: Sequence[int], *, keep_past: bool) -> None:
        """Quantise the groups that are complete now, with their exact tokens from the tails; keep the rest as it is."""
        group, split = self.group, list(counts)
        ends = [n + c for n, c in zip(self.lengths, counts, strict=True)]
        done = [n // group * group for n in self.lengths]
        whole = [end // group * group for end in ends]
        joined = [
            Tail(tail.start, torch.cat([tail.k, new_k]), torch.cat([tail.v, new_v]))
            for tail, new_k, new_v in zip(self.tails, k.split(split), v.split(split), strict=True)
        ]
        loose = [max(w, n) for w, n in zip(whole, self.lengths, strict=True)]
        for begin, end, exact in ((done, whole, False), (loose, ends, True)):
            parts = [t.cut(b, e) for t, b, e in zip(joined, begin, end, strict=True)]
            slots = self.slots(*self._tokens(begin, end))
            self._observe(torch.cat([p.k for p in parts]), torch.cat([p.v for p in parts]), slots, exact=exact)
        self.tails = [t if keep_past else t.cut(w, e) for t, w, e in zip(joined, whole, ends, strict=True)]

    def _tail(self, row: int, begin: int, end: int) -> Tail:
        """Exact tokens ``begin … end`` of an old sequence, from its tail or from the backing store."""
        tail = self.tails[row]
        if self.group == 1 or begin == end:
            return Tail(begin, tail.k[:0], tail.v[:0])
        if begin >= tail.start:
            return tail.cut(begin, end)
        assert self.backing is not None
        position = torch.arange(begin, end, device=self.pool.device)
        slots = self.slots(torch.full_like(position, row), position)
        return Tail(begin, self.backing.k.flatten(0, 1)[slots], self.backing.v.flatten(0, 1)[slots])

    def _restore(self, cut: list[int], old_lengths: list[int], whole: list[int]) -> None:
        """Write the tokens of groups that a crop has made incomplete as if their groups had never been complete."""
        split = [i for i in cut if old_lengths[i] // self.group * self.group > whole[i] < self.lengths[i]]
        for i in split:
            position = torch.arange(whole[i], self.lengths[i], device=self.pool.device)
            slots = self.slots(torch.full_like(position, i), position)
            self._observe(self.tails[i].k, self.tails[i].v, slots, exact=True)
