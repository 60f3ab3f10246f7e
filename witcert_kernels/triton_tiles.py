"""How the Triton read is cut into rows, tokens and splits, and what its kernels do alike."""

# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rounding
from .triton_common import INTERPRETED, Workspace, padded
from .triton_state import (
    A1,
    A2,
    C_MAX,
    COUNT,
    EE,
    ER,
    KNOWN_A1,
    KNOWN_A2,
    KNOWN_C_MAX,
    KNOWN_L,
    KNOWN_M,
    L_WIDE,
    M_WIDE,
    NORM,
    R_TOP,
    RHO,
    Z_MAX,
    Z_ROW,
    L,
    M,
)

ADD_ERROR = tl.constexpr(rounding.ADD_ERROR)
DOT_ERROR = tl.constexpr(rounding.DOT_ERROR)
U = tl.constexpr(rounding.U)
LOG2E = tl.constexpr(1.4426950408889634)
HALF_SCALE = tl.constexpr(16384.0)  # keeps weights clear of float16's underflow
FLUSHED = tl.constexpr(rounding.FLUSHED)
THREADS = 128  # of a program
# arguments that change from call to call: a kernel is compiled once for all of their values
SIZES = ["batch", "total", "max_pages", "bias_tokens", "window_left", "slots"]


@triton.jit
def span(
    Indptr, SeqLens, batch, kv_head, KV: tl.constexpr, PER_HEAD: tl.constexpr, BLOCK_M: tl.constexpr,
    RAGGED: tl.constexpr, HAS_NEW: tl.constexpr,
):  # fmt: skip
    """A program's sequence, its first query row and query rows, pool length; the rows of its tile: query row · heads +
    head, whether they exist, positions, and their lowest and highest. A program too many has no rows and no tokens.

    The tiles of a ragged batch's sequence b begin at program ``indptr[b] · PER_HEAD // BLOCK_M + b``: as sums of
    quotients rounded up are at most that, all fit, and a program finds its own without a table.
    """
    program = tl.program_id(0)
    if RAGGED:
        sequence = program * 0 - 1
        for base in range(0, batch, 128):
            some = base + tl.arange(0, 128)
            begin = tl.load(Indptr + some, mask=some < batch, other=0) * PER_HEAD // BLOCK_M + some
            sequence += tl.sum(((some < batch) & (begin <= program)).to(tl.int32), 0)
        row = tl.load(Indptr + sequence)
        first = (program - row * PER_HEAD // BLOCK_M - sequence) * BLOCK_M
        rows = tl.load(Indptr + sequence + 1) - row
        used = first < rows * PER_HEAD
        rows = tl.where(used, rows, 0)
        length = tl.where(used, tl.load(SeqLens + sequence), 0)
    else:
        tiles: tl.constexpr = (PER_HEAD + BLOCK_M - 1) // BLOCK_M
        sequence = program // tiles
        first = (program % tiles) * BLOCK_M
        row = sequence
        rows = sequence * 0 + 1
        length = tl.load(SeqLens + sequence)
    offset = length if HAS_NEW else length - rows
    flat = first + tl.arange(0, BLOCK_M)
    cell = (row + flat // PER_HEAD).to(tl.int64) * (KV * PER_HEAD) + kv_head * PER_HEAD + flat % PER_HEAD
    last = tl.minimum(first + BLOCK_M, rows * PER_HEAD) - 1
    low, high = offset + first // PER_HEAD, offset + last // PER_HEAD
    return sequence, row, rows, length, cell, flat < rows * PER_HEAD, offset + flat // PER_HEAD, low, high


@triton.jit
def pool_tokens(
    length, low, high, split, splits, window_left, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """First token of the pool that rows at positions low to high see, and first and last + 1 tokens of a split of them.

    A split has whole blocks of tokens, aligned to pages and tiles.
    """
    BLOCK: tl.constexpr = PAGE if PAGE > BLOCK_N else BLOCK_N
    begin = tl.maximum(low - window_left, 0) if WINDOW else low * 0
    end = tl.minimum(length, high + 1) if CAUSAL else length
    first_block = begin // BLOCK
    per_split = tl.cdiv(tl.maximum(tl.cdiv(end, BLOCK) - first_block, 0), splits)
    first = (first_block + split * per_split) * BLOCK
    return begin, first, tl.minimum(first + per_split * BLOCK, end)


@triton.jit
def attended(token, here, position, window_left, ROWWISE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Who attends to tokens at some positions, ``[rows, tokens]``, or ``[1, tokens]`` where all rows see the same."""
    ok = here[None, :]
    if ROWWISE:
        if CAUSAL:
            ok = ok & (token[None, :] <= position[:, None])
        if WINDOW:
            ok = ok & (token[None, :] >= position[:, None] - window_left)
    return ok


@triton.jit
def biased(Bias, bias_tokens, row, token, ok, here, row_ok):
    """The bias of a tile in base 2, 0 where it is −Inf, and who attends where that is a mask."""
    at = Bias + row[:, None] * bias_tokens + token[None, :]
    bias = tl.load(at, mask=row_ok[:, None] & here[None, :], other=0.0)
    on = bias > float("-inf")
    return tl.where(on, bias, 0.0) * LOG2E, ok & on


@triton.jit
def not_finite(x):
    """Rows of a float32 ``[tokens, channels]`` with a NaN or an infinity."""
    return tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), 1) > 0


@triton.jit
def dot_error(q, scale, D: tl.constexpr):
    """What, times a key's norm, bounds the rounding of its logit; q ``[rows, DP]``."""
    wide = q.to(tl.float32)
    norm = tl.sqrt_rn(tl.sum(wide * wide, 1) + D * FLUSHED)
    return norm * (scale * (D * (U if q.dtype == tl.float32 else DOT_ERROR) + 16 * U))


@triton.jit
def key_logits(
    K, k_at, here, ok, Q, q, q_ok, row, q_error, scale, D: tl.constexpr, DP: tl.constexpr, PRECISE: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Logits in base 2 of the keys at ``K + k_at``, int64 ``[tokens]``, the bound of their rounding ``[rows]``, and
    which keys are not finite; those count as zeros. ``q`` ``[rows, DP]`` is 0 where not ``q_ok``. PRECISE sums in
    float64.
    """
    channel = tl.arange(0, DP)
    k = tl.load(K + k_at[:, None] + channel[None, :], mask=here[:, None] & (channel < D)[None, :], other=0.0).to(
        tl.float32
    )
    lost = not_finite(k)
    k = tl.where(lost[:, None], 0.0, k)
    if PRECISE:
        exact = tl.zeros((q.shape[0], k_at.shape[0]), tl.float64)
        for j in range(D):
            k_j = tl.where(lost, 0.0, tl.load(K + k_at + j, mask=here, other=0.0).to(tl.float32)).to(tl.float64)
            q_j = tl.load(Q + row * D + j, mask=q_ok, other=0.0).to(tl.float64)
            exact += q_j[:, None] * k_j[None, :]
        y = exact.to(tl.float32) * scale
        error = tl.max(tl.where(ok, tl.abs(y), 0.0), 1) * (4 * U)
    elif q.dtype == tl.float32:
        y = tl.zeros((q.shape[0], k_at.shape[0]), tl.float32)
        for start in range(0, D, 32):  # products in float32 keep their whole depth in registers
            part = start + tl.arange(0, 32)
            q_part = tl.load(Q + row[:, None] * D + part[None, :], mask=q_ok[:, None] & (part < D)[None, :], other=0.0)
            at = K + k_at[:, None] + part[None, :]
            k_part = tl.load(at, mask=(here & (lost == 0))[:, None] & (part < D)[None, :], other=0.0).to(tl.float32)
            y = tl.dot(q_part, tl.trans(k_part), y, input_precision="ieee")
        y *= scale
        error = q_error * tl.sqrt_rn(tl.max(tl.sum(k * k, 1), 0) + D * FLUSHED)
    else:
        if INTERPRET:
            y = tl.dot(q.to(tl.float32), tl.trans(k), input_precision="ieee") * scale
        else:
            y = tl.dot(q, tl.trans(k.to(q.dtype))) * scale
        error = q_error * tl.sqrt_rn(tl.max(tl.sum(k * k, 1), 0) + D * FLUSHED)
    return y, error, lost


@triton.jit
def weighted_values(p, v, stored, q, INTERPRET: tl.constexpr):
    """Σ p v ``[rows, DVP]`` for finite v, float32; ``stored`` is v as it was loaded. In float32 for float32 queries."""
    if q.dtype == tl.float32:
        part = tl.dot(p, v, input_precision="ieee")
    elif INTERPRET:
        part = tl.dot((p * HALF_SCALE).to(stored.dtype).to(tl.float32), v, input_precision="ieee") * (1.0 / HALF_SCALE)
    else:
        part = tl.dot((p * HALF_SCALE).to(stored.dtype), v.to(stored.dtype)) * (1.0 / HALF_SCALE)
    return part


@triton.jit
def store_row(
    Acc, Stats, slot, slots, total, row, row_ok, acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_max, z_row,  # noqa: E741
    norm, count, DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Leave sums in a slot for :func:`witcert_kernels.triton_state.merge`; norm ``[tokens]``, the rest a row each."""
    at = Stats + slot.to(tl.int64) * total + row
    plane = tl.cast(slots, tl.int64) * total
    wide = tl.zeros_like(l)
    tl.store(at + plane * M, m.to(tl.float64), mask=row_ok)
    tl.store(at + plane * L, l, mask=row_ok)
    tl.store(at + plane * A1, a1, mask=row_ok)
    tl.store(at + plane * A2, a2, mask=row_ok)
    tl.store(at + plane * C_MAX, c_max.to(tl.float64), mask=row_ok)
    tl.store(at + plane * Z_MAX, z_max.to(tl.float64), mask=row_ok)
    tl.store(at + plane * Z_ROW, z_row.to(tl.float64), mask=row_ok)
    tl.store(at + plane * RHO, rho, mask=row_ok)
    tl.store(at + plane * NORM, wide + tl.max(norm, 0).to(tl.float64), mask=row_ok)
    tl.store(at + plane * M_WIDE, m_wide.to(tl.float64), mask=row_ok)
    tl.store(at + plane * L_WIDE, l_wide, mask=row_ok)
    tl.store(at + plane * COUNT, wide + count.to(tl.float64), mask=row_ok)
    column = tl.arange(0, DVP)
    at = Acc + (slot.to(tl.int64) * total + row)[:, None] * DV + column[None, :]
    tl.store(at, acc, mask=row_ok[:, None] & (column < DV)[None, :])


@triton.jit
def store_known(Stats, slot, slots, total, row, row_ok, m, l, a1, a2, c_max, er, ee, r_top):  # noqa: E741
    """Leave the second set of sums beside :func:`store_row`'s."""
    at = Stats + slot.to(tl.int64) * total + row
    plane = tl.cast(slots, tl.int64) * total
    tl.store(at + plane * KNOWN_M, m.to(tl.float64), mask=row_ok)
    tl.store(at + plane * KNOWN_L, l, mask=row_ok)
    tl.store(at + plane * KNOWN_A1, a1, mask=row_ok)
    tl.store(at + plane * KNOWN_A2, a2, mask=row_ok)
    tl.store(at + plane * KNOWN_C_MAX, c_max.to(tl.float64), mask=row_ok)
    tl.store(at + plane * ER, er, mask=row_ok)
    tl.store(at + plane * EE, ee, mask=row_ok)
    tl.store(at + plane * R_TOP, r_top.to(tl.float64), mask=row_ok)


@dataclass(frozen=True)
class Read:
    """A decode's arguments, see :func:`witcert_kernels.certified_decode`, and how kernels cut it, from shapes alone.

    q ``[rows, heads, d]`` is contiguous. ``wanted_splits`` below 1: as many as fill the device. ``groups``: scales of a
    token's key. ``resident``: programs of few rows that a multiprocessor's registers are to hold.
    """

    q: Tensor
    page_table: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor | None
    k_new: Tensor | None
    v_new: Tensor | None
    exact_pages: Tensor | None
    exact_k: Tensor
    exact_v: Tensor
    sinks: Tensor | None
    bias: Tensor | None
    causal: bool
    sm_scale: float
    cap: float
    window_left: int
    wanted_splits: int
    page_size: int
    kv_heads: int
    groups: int
    resident: int

    @property
    def per_head(self) -> int:
        """Query heads a kv head."""
        return self.q.shape[1] // self.kv_heads

    @property
    def head_dim_v(self) -> int:
        """Channels of a value."""
        return self.exact_v.shape[-1]

    @property
    def capacity(self) -> int:
        """Most tokens that a sequence has in the pool."""
        return self.page_table.shape[1] * self.page_size

    @property
    def tokens(self) -> int:
        """Most tokens that a row can attend to."""
        return self.capacity + (0 if self.k_new is None else len(self.q))

    @property
    def has_exact(self) -> bool:
        """Whether exact tokens may be among those attended, in slots of their own after the pool's."""
        return self.k_new is not None or self.exact_pages is not None

    @property
    def flat_rows(self) -> int:
        """Query rows times heads a kv head that a sequence can have."""
        return self.per_head * (1 if self.qo_indptr is None else len(self.q))

    @property
    def _widest(self) -> int:
        return max(padded(self.q.shape[-1], 32), padded(self.head_dim_v, 32))

    @property
    def block_m(self) -> int:
        """Rows a tile."""
        return min(padded(self.flat_rows, 1), 16)

    @property
    def block_n(self) -> int:
        """Tokens a tile: as many as leave its numbers in registers."""
        if self._widest > 128:
            return 32 if self._widest <= 256 else 16
        few = self.qo_indptr is None or (self._widest <= 64 and self.q.dtype != torch.float32)
        return 64 if self.groups == 1 and few else 32

    @property
    def _few_rows(self) -> bool:
        return self.qo_indptr is None and self.block_m < 16

    @property
    def registers(self) -> int | None:
        """Registers a thread that ``resident`` programs leave each other; None for all that there are."""
        return 65536 // (self.resident * THREADS) // 8 * 8 if self._few_rows and self.resident > 2 else None

    @property
    def programs(self) -> int:
        """Row tiles of the batch; a few more than there are where it is ragged."""
        if self.qo_indptr is None:
            return len(self.q) * triton.cdiv(self.per_head, self.block_m)
        return self.flat_rows // self.block_m + len(self.page_table)

    @property
    def splits(self) -> int:
        """Splits of the pool's tokens, and as many of the exact ones."""
        wanted = self.wanted_splits if self.wanted_splits > 0 else self.filling(self.q.device)
        return max(1, min(wanted, self._blocks, 65535))

    def filling(self, device: torch.device) -> int:
        """Splits that give every multiprocessor the programs that its registers hold, of 256 tokens at least."""
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        programs = (self.resident if self._few_rows else 2) * cores
        return max(1, min(programs // max(self.programs * self.kv_heads, 1), triton.cdiv(self.capacity, 256)))

    @property
    def _blocks(self) -> int:
        return max(1, triton.cdiv(self.capacity, self.block_n))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs of a kernel that reads tokens."""
        return self.programs, self.kv_heads, self.splits

    def given(self, tensor: Tensor | None) -> Tensor:
        """A tensor for a kernel's pointer, any one where there is none."""
        return self.q if tensor is None else tensor.contiguous()

    def scratch(self, fields: int, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """Room for what the splits leave, see :mod:`witcert_kernels.triton_state`."""
        slots, rows = self.splits * (2 if self.has_exact else 1), self.q.shape[0] * self.q.shape[1]
        acc = workspace.take(slots, rows, self.head_dim_v)
        return acc, workspace.take(fields, slots, rows, dtype=torch.float64)

    def scalars(self, slots: int) -> tuple[int, int, int, int, int, int, float, float]:
        """What the kernels take as ``batch, total, max_pages, bias_tokens, window_left, slots, scale, cap``."""
        return (
            len(self.page_table),
            self.q.shape[0] * self.q.shape[1],
            self.page_table.shape[1],
            0 if self.bias is None else self.bias.shape[-1],
            self.window_left,
            slots,
            self.sm_scale * LOG2E.value,
            self.cap * LOG2E.value,
        )

    def constants(self) -> dict[str, int | bool]:
        """Compile-time arguments that all kernels which read tokens share."""
        return {
            "KV": self.kv_heads,
            "PER_HEAD": self.per_head,
            "PAGE": self.page_size,
            "D": self.q.shape[-1],
            "DV": self.head_dim_v,
            "CAUSAL": self.causal,
            "WINDOW": self.window_left >= 0,
            "CAP": self.cap != 0,
            "RAGGED": self.qo_indptr is not None,
            "HAS_NEW": self.k_new is not None,
            "HAS_EXACT": self.exact_pages is not None,
            "BIAS": self.bias is not None,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "DVP": padded(self.head_dim_v, 16),
            "INTERPRET": INTERPRETED,
            "num_warps": THREADS // 32,
        }

    def precision(self) -> dict[str, int | bool]:
        """Compile-time arguments of kernels that multiply keys as they are: few rows do it in float64."""
        return {"DP": padded(self.q.shape[-1], 16), "PRECISE": self.qo_indptr is None or self.flat_rows <= 64}
