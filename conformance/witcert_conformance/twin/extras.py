"""Repair, the gate, pages, calibration, telemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ..adapter import Array, Calibration, Counts, Decoded, Gated, Ints, Layout, Mask, Read
from .reader import Reader
from .writer import TwinStore


class Extras(Reader):
    """Optional groups."""

    # repair

    def page_in(self, store: TwinStore, page: int, kv_head: int) -> int:
        size = store.layout.page_size
        part = slice(page * size, (page + 1) * size)
        finite = [np.where(np.isfinite(x[part, kv_head]), x[part, kv_head], 0.0) for x in (store.back_k, store.back_v)]
        store.exact.append((finite[0], finite[1]))
        return len(store.exact) - 1

    def over(self, decoded: Decoded, tau: float) -> Mask:
        """Which cells are over the threshold, ``[rows, heads]``."""
        assert decoded.risk is not None
        return decoded.meter > tau if tau < 1 else decoded.risk > np.log1p(2 * tau) / 2

    def any_of_group(self, over: Mask) -> bool:
        """Whether a kv head is over: any of its rows and query heads, ``[rows, G] -> []``."""
        return bool(over.any())

    def gate(self, store: TwinStore, read: Read, tau: float) -> Gated:
        if tau <= 0:
            raise ValueError(f"tau: got {tau}, wants a number above 0")
        batch, kv_heads, size = len(read.seq_lens), store.layout.kv_heads, store.layout.page_size
        table = np.full((batch, kv_heads, read.page_table.shape[1]), -1, np.int64)
        if read.exact_pages is not None:
            table[:] = read.exact_pages
        bounds = np.arange(batch + 1) if read.qo_indptr is None else read.qo_indptr
        page_ins: list[tuple[int, int, int]] = []
        decoded, shares = self.decode_with_shares(store, replace(read, exact_pages=table))
        first = decoded
        while True:
            over, moved = self.over(decoded, tau), False
            for b, h in np.ndindex(batch, kv_heads):
                heads = self.group_heads(h, read.q.shape[1] // kv_heads, kv_heads)
                if not self.any_of_group(over[bounds[b] : bounds[b + 1]][:, heads]):
                    continue
                left = self.repairable(table[b, h], -(-int(read.seq_lens[b]) // size))
                chosen = left[np.argsort(-shares[b, h, left], kind="stable")][: -(-len(left) // 4)]
                for page in chosen:
                    table[b, h, page] = self.page_in(store, int(read.page_table[b, page]), h)
                    page_ins.append((b, h, int(page)))
                    moved = True
            if not moved:
                return Gated(self.after_repair(first, decoded), table >= 0, tuple(page_ins))
            decoded, shares = self.decode_with_shares(store, replace(read, exact_pages=table.copy()))

    def repairable(self, table: Ints, pages: int) -> Ints:
        """Pages that are not exact yet."""
        return np.flatnonzero(table[:pages] < 0)

    def after_repair(self, first: Decoded, last: Decoded) -> Decoded:
        """What the gate reports: the decode after the last repair."""
        return last

    # pages

    def free(self, store: TwinStore, pages: Ints) -> None:
        store.fields["v_norm"][pages] = 0

    def poison(self, store: TwinStore, slots: Ints) -> None:
        for name, x in store.fields.items():
            if name != "v_norm":
                store.put(name, slots, np.nan if x.dtype.kind == "f" else np.iinfo(x.dtype).max)

    def take_pages(self, store: TwinStore, pages: Ints) -> None:
        for name in self.moved_fields(store):
            store.fields[name] = store.fields[name][pages].copy()
        size = store.layout.page_size
        for name in ("back_k", "back_v"):
            x = getattr(store, name)
            setattr(store, name, x.reshape(-1, size, *x.shape[1:])[pages].reshape(-1, *x.shape[1:]).copy())

    def moved_fields(self, store: TwinStore) -> tuple[str, ...]:
        """Parts of the store that a reorder moves: all."""
        return tuple(store.fields)

    # calibration

    def read_with(self, store: TwinStore, calibration: Calibration, read: Read) -> Decoded:
        self.check_binding(store, calibration)
        return self.decode(replace(store, calibration=calibration), read)

    def check_binding(self, store: TwinStore, calibration: Calibration) -> None:
        """The calibration that wrote the bytes, or a refusal."""
        for name in ("mu", "f", "u", "bypass"):
            if not np.array_equal(getattr(calibration, name), getattr(store.calibration, name)):
                raise ValueError(f"calibration.{name}: got other numbers than those that wrote the store")

    def fit(self, keys: Array, layout: Layout) -> tuple[Array, Array]:
        low, high = keys.min(0), keys.max(0)
        f = self.floor((high - low) / 2)
        pairs = f[:, layout.pairs].max(-1)
        f[:, layout.pairs[:, 0]] = f[:, layout.pairs[:, 1]] = pairs
        mu, f = ((high + low) / 2).astype(np.float32), f.astype(np.float32)
        return mu.astype(np.float64), f.astype(np.float64)

    def floor(self, half_range: Array) -> Array:
        """A constant channel has half-range 0: a small positive number instead."""
        return np.maximum(half_range, 2.0**-16)

    # settings

    reduced = False
    """Whether a caller allows products in reduced precision, which nothing here makes use of."""

    def settings(self) -> Mapping[str, AbstractContextManager[Any]]:
        return {"reduced precision": self._reduce()}

    @contextmanager
    def _reduce(self) -> Iterator[None]:
        self.reduced = True
        try:
            yield
        finally:
            self.reduced = False

    # telemetry

    def count(self, store: TwinStore, decoded: Decoded) -> None:
        old, attended = store.counts, decoded.lse > -np.inf
        assert decoded.risk is not None
        lost = self.nonfinite(decoded) & attended
        store.counts = Counts(
            old.cells + int(attended.sum()),
            old.nonfinite + int(lost.sum()),
            max(old.max_meter, float(decoded.meter.max(initial=0))),
        )

    def nonfinite(self, decoded: Decoded) -> Mask:
        """Cells whose bound came from something that is not finite."""
        assert decoded.risk is not None
        return np.isinf(decoded.risk)

    def telemetry(self, store: TwinStore) -> Counts:
        return store.counts
