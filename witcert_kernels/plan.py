"""Plans, as in FlashInfer's plan and run: the split count and the temporaries of decodes, made once for many calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backend import use_triton
from .checks import check_flag, check_integer
from .layout import ObservatoryLayout, StoreLayout
from .pool import ObservatoryPool, PackedPool


class Plan:
    """What decodes of one store layout share: how many splits are merged, and room for what they leave.

    A planned :func:`witcert_kernels.certified_decode` allocates its outputs and nothing else, so one plan serves every
    layer and step, eager, under ``torch.compile`` and in a CUDA graph. Lengths, page tables and queries may differ from
    call to call, and batches, rows and tables be smaller than planned. Calls that share a plan must not overlap: one
    stream, or a plan each.

    Args:
        pool: any pool of the layout, on the device.
        heads: query heads.
        batch: most sequences of a call.
        max_pages: most columns of a page table.
        rows: most query rows of a ragged batch (``qo_indptr``); None for one row a sequence.
        exact: whether calls may have ``exact_pages`` or ``k_new``, whose tokens are read into splits of their own.
        splits: partial results a row; None for as many as fill the device at the planned size.
        digits: base-256 digits of a query channel as the packed store's kernel multiplies it, 3, or 2 for fewer
            products and a c that their remainder widens by some per cent.

    Attributes:
        layout, device, heads, batch, max_pages, rows, exact, splits, digits: as above, ``splits`` decided.
        workspace: uint8, the temporaries; empty where the torch path runs.

    Raises:
        TypeError, ValueError: an argument of another type or out of range, by name.
    """

    def __init__(
        self,
        pool: PackedPool | ObservatoryPool,
        heads: int,
        batch: int,
        max_pages: int,
        *,
        rows: int | None = None,
        exact: bool = False,
        splits: int | None = None,
        digits: int = 3,
    ) -> None:
        if not isinstance(pool, PackedPool | ObservatoryPool):
            raise TypeError(f"pool: got {type(pool).__name__}, wants a PackedPool or an ObservatoryPool")
        self.layout: StoreLayout | ObservatoryLayout = pool.layout
        self.device = pool.device
        if check_integer("heads", heads, 1) % self.layout.kv_heads:
            raise ValueError(f"heads: got {heads}, wants a multiple of the pool's {self.layout.kv_heads} kv heads")
        check_integer("batch", batch, 0)
        check_integer("max_pages", max_pages, 0)
        if rows is not None:
            check_integer("rows", rows, 0)
        if splits is not None:
            check_integer("splits", splits, 1, 2**16)
        check_integer("digits", digits, 2, 3)
        check_flag("exact", exact)
        if digits != 3 and isinstance(pool, ObservatoryPool):
            raise ValueError(f"digits: got {digits} for an ObservatoryPool, wants 3: its keys are not int8")
        self.heads, self.batch, self.max_pages, self.rows, self.exact = heads, batch, max_pages, rows, exact
        self.digits = digits
        self.splits = splits or 1
        nbytes = 0
        if use_triton(self.device):
            from .triton_plan import nbytes_of, splits_of

            self.splits = splits or splits_of(self)
            nbytes = nbytes_of(self)
        with torch.inference_mode(False):
            self.workspace = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def check(self, pool: PackedPool | ObservatoryPool, q: Tensor, page_table: Tensor, **given: Any) -> None:
        """Raise unless the plan has room for a call.

        Args:
            pool, q, page_table: of the call.
            given: its ``qo_indptr``, ``k_new``, ``exact_pages`` and ``splits``.

        Raises:
            ValueError: another layout, device or number of heads, or a call that is too large, by name.
        """
        for name, mine, wanted in (
            ("layout", self.layout, pool.layout),
            ("device", self.device, pool.device),
            ("heads", self.heads, q.shape[1]),
        ):
            if mine != wanted:
                raise ValueError(f"plan.{name}: got {mine}, wants {wanted}")
        ragged = given["qo_indptr"] is not None
        if ragged != (self.rows is not None):
            raise ValueError(f"plan.rows: got {self.rows}, wants {len(q) if ragged else None}, as qo_indptr says")
        sizes = [("batch", self.batch, page_table.shape[0]), ("max_pages", self.max_pages, page_table.shape[1])]
        if self.rows is not None:
            sizes.append(("rows", self.rows, len(q)))
        for name, size, least in sizes:
            if size < least:
                raise ValueError(f"plan.{name}: got {size}, wants {least} at least")
        if not self.exact and (given["k_new"] is not None or given["exact_pages"] is not None):
            raise ValueError("plan.exact: got False, wants True for exact_pages or k_new")
        if given["splits"] is not None:
            raise ValueError(f"splits: got {given['splits']}, wants None: the plan has {self.splits}")
