"""How large a Triton decode's temporaries are: the decode's own allocation, on tensors without data."""

import torch
from torch import Tensor

from .layout import StoreLayout
from .plan import Plan
from .triton_common import Workspace
from .triton_observatory import RESIDENT, observatory_room
from .triton_reader import packed_room, resident_programs
from .triton_tiles import Read

META = torch.device("meta")


def _read(plan: Plan, splits: int) -> Read:
    """The largest call of a plan."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    layout = plan.layout
    groups, resident = 1, RESIDENT
    if isinstance(layout, StoreLayout):
        groups = layout.groups
        resident = resident_programs(layout.dtype, groups, layout.bypass, layout.dither)
    rows = plan.batch if plan.rows is None else plan.rows
    return Read(
        q=empty(rows, plan.heads, layout.head_dim, dtype=layout.dtype),
        page_table=empty(plan.batch, plan.max_pages),
        seq_lens=empty(plan.batch),
        qo_indptr=None if plan.rows is None else empty(plan.batch + 1),
        k_new=None,
        v_new=None,
        exact_pages=empty(plan.batch, layout.kv_heads, plan.max_pages) if plan.exact else None,
        exact_k=empty(0, layout.page_size, layout.head_dim, dtype=layout.dtype),
        exact_v=empty(0, layout.page_size, layout.head_dim_v, dtype=layout.dtype),
        sinks=None,
        bias=None,
        causal=True,
        sm_scale=1.0,
        cap=0.0,
        window_left=-1,
        wanted_splits=splits,
        page_size=layout.page_size,
        kv_heads=layout.kv_heads,
        groups=groups,
        resident=resident,
    )


def splits_of(plan: Plan) -> int:
    """Splits that fill the device at the planned size."""
    return _read(plan, 1).filling(plan.device)


def nbytes_of(plan: Plan) -> int:
    """Bytes of the temporaries of the largest call."""
    workspace, read, layout = Workspace(META), _read(plan, plan.splits), plan.layout
    if isinstance(layout, StoreLayout):
        packed_room(
            read, workspace, r=layout.sketch, bands=layout.witness_bands, groups=layout.groups, kept=2 * layout.bypass,
            digits=plan.digits, with_radius=layout.dither,
        )  # fmt: skip
    else:
        observatory_room(read, workspace, r=layout.sketch, bands=layout.witness_bands)
    return workspace.nbytes
