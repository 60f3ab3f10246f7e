"""How the Triton read is cut into rows, tokens and splits, and what its kernels do alike."""

# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rounding
from .triton_common import padded
from .triton_state import (
    A1,
    A2,
    C_MAX,
    COUNT,
    E1,
    E2,
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


@triton.jit
def span(
    Work, Indptr, SeqLens, kv_head, KV: tl.constexpr, PER_HEAD: tl.constexpr, BLOCK_M: tl.constexpr,
    RAGGED: tl.constexpr, HAS_NEW: tl.constexpr,
):  # fmt: skip
    """A program's sequence, its first query row and query rows, pool length; the rows of its tile: query row · heads +
    head, whether they exist, positions, and their lowest and highest. No rows exist for a program too many.
    """
    program = tl.program_id(0)
    if RAGGED:
        sequence = tl.load(Work + 2 * program)
        first = tl.load(Work + 2 * program + 1)
        used = sequence >= 0
        sequence = tl.maximum(sequence, 0)
        row = tl.load(Indptr + sequence)
        rows = tl.where(used, tl.load(Indptr + sequence + 1) - row, 0)
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
def attended(
    token, here, position, window_left, ROWWISE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
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
    return tl.sqrt_rn(tl.sum(wide * wide, 1)) * (scale * (D * DOT_ERROR + 16 * U))


@triton.jit
def key_logits(
    K, k_at, here, ok, Q, q, q_ok, row, q_error, scale, D: tl.constexpr, DP: tl.constexpr, PRECISE: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Logits in base 2 of the keys at ``K + k_at``, int64 ``[tokens]``, the bound of their rounding ``[rows]``, and which
    keys are not finite; those count as zeros. ``q`` ``[rows, DP]`` is 0 where not ``q_ok``; PRECISE sums in float64.
    """
    channel = tl.arange(0, DP)
    k = tl.load(K + k_at[:, None] + channel[None, :], mask=here[:, None] & (channel < D)[None, :], other=0.0).to(tl.float32)
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
    else:
        if INTERPRET:
            y = tl.dot(q.to(tl.float32), tl.trans(k), input_precision="ieee") * scale
        else:
            y = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        error = q_error * tl.sqrt_rn(tl.max(tl.sum(k * k, 1), 0))
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
    Acc, Stats, slot, slots, total, row, row_ok, acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_max, z_row, norm, count,  # noqa: E741
    DV: tl.constexpr, DVP: tl.constexpr,
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
def store_known(Stats, slot, slots, total, row, row_ok, m, l, a1, a2, c_max, e1, e2, r_top):  # noqa: E741
    """Leave the second set of sums beside :func:`store_row`'s."""
    at = Stats + slot.to(tl.int64) * total + row
    plane = tl.cast(slots, tl.int64) * total
    tl.store(at + plane * KNOWN_M, m.to(tl.float64), mask=row_ok)
    tl.store(at + plane * KNOWN_L, l, mask=row_ok)
    tl.store(at + plane * KNOWN_A1, a1, mask=row_ok)
    tl.store(at + plane * KNOWN_A2, a2, mask=row_ok)
    tl.store(at + plane * KNOWN_C_MAX, c_max.to(tl.float64), mask=row_ok)
    tl.store(at + plane * E1, e1, mask=row_ok)
    tl.store(at + plane * E2, e2, mask=row_ok)
    tl.store(at + plane * R_TOP, r_top.to(tl.float64), mask=row_ok)


@dataclass(frozen=True)
class Tiling:
    """How a call is cut: rows and tokens a tile, splits, and the row tiles of a ragged batch.

    work int32 ``[programs, 2]``: sequence (−1 for none) and first flat row of a program, empty unless ragged; precise:
    whether rows are so few that exact keys are read in float64.
    """

    block_m: int
    block_n: int
    splits: int
    kv_heads: int
    programs: int
    work: Tensor
    precise: bool

    @property
    def warps(self) -> int:
        """Warps a program."""
        return 4 if self.block_m <= 32 else 8


def tiling(
    q: Tensor, kv_heads: int, d_v: int, capacity: int, batch: int, qo_indptr: Tensor | None, splits: int
) -> Tiling:
    """Cut queries ``[rows, heads, d]`` over stores of at most ``capacity`` tokens, from shapes alone.

    ``splits`` < 1 chooses enough for every multiprocessor to have two programs.
    """
    n, heads, d = q.shape
    per_head = heads // kv_heads
    widest = max(padded(d, 32), padded(d_v, 32))
    block_n = 64 if widest <= 128 else 32 if widest <= 256 else 16
    most = per_head if qo_indptr is None else n * per_head
    block_m = min(padded(most, 1), 32 if widest <= 128 else 16)
    if qo_indptr is None:
        programs, work = n * triton.cdiv(per_head, block_m), q.new_empty(0, 2, dtype=torch.int32)
    else:
        programs = n * per_head // block_m + batch
        work = _row_tiles(qo_indptr, per_head, block_m, programs)
    blocks = max(1, triton.cdiv(capacity, block_n))
    if splits < 1:
        count = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        splits = min(2 * count // max(programs * kv_heads, 1), triton.cdiv(blocks, 4))
    precise = qo_indptr is None or most <= 16
    return Tiling(block_m, block_n, max(1, min(splits, blocks)), kv_heads, programs, work, precise)


def _row_tiles(qo_indptr: Tensor, per_head: int, block_m: int, programs: int) -> Tensor:
    """Sequence and first flat row of every program, ``[programs, 2]``, without waiting for the device."""
    tiles = (qo_indptr.diff() * per_head + block_m - 1) // block_m
    ends = tiles.cumsum(0)
    program = torch.arange(programs, device=qo_indptr.device)
    sequence = torch.searchsorted(ends, program, right=True)
    used = sequence < len(tiles)
    sequence = sequence.clamp_max(len(tiles) - 1)
    first = (program - (ends - tiles)[sequence]) * block_m
    return torch.stack([torch.where(used, sequence, -1), first], dim=1).to(torch.int32)
