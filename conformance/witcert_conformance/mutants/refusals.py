"""Planted bugs about arguments that should be refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Array, Ints, Read
from ..twin import Twin
from ..twin.writer import TwinStore
from .registry import mutant


@mutant("wrong_arguments_are_refused_by_name")
class SlotsTwice(Twin):
    """A slot that is given twice is written twice."""

    def check_write(self, store: TwinStore, k: Array, v: Array, slots: Ints) -> None:
        _, first = np.unique(slots, return_index=True)
        super().check_write(
            store, k[first] if len(k) == len(slots) else k, v[first] if len(v) == len(slots) else v, slots[first]
        )


@mutant("wrong_arguments_are_refused_by_name")
class NegativePagesCountFromTheEnd(Twin):
    """A page of -1, which marks unused entries elsewhere, is the pool's last one."""

    def check_read(self, store: TwinStore, read: Read) -> None:
        count = len(store.back_k) // store.layout.page_size
        super().check_read(store, replace(read, page_table=np.where(read.page_table == -1, count - 1, read.page_table)))


@mutant("wrong_arguments_are_refused_by_name")
class KeysAreRefusedWithoutTheirName(Twin):
    """A key of another shape is refused as a token's; the argument is not named."""

    def check_write(self, store: TwinStore, k: Array, v: Array, slots: Ints) -> None:
        if k.shape != (len(slots), store.layout.kv_heads, store.layout.head_dim):
            raise ValueError(f"shape: got {k.shape}, wants that of a token")
        super().check_write(store, k, v, slots)
