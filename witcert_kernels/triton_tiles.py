"""Which rows and tokens a program of the Triton read has, and exact tokens: repaired pages and a row's own chunk."""

# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rounding
from .triton_common import padded
from .triton_state import A1, A2, C_MAX, COUNT, L_WIDE, M_WIDE, NORM, RHO, Z_MAX, Z_ROW, L, M, fold, softcap

ADD_ERROR = tl.constexpr(rounding.ADD_ERROR)
U = tl.constexpr(rounding.U)
LOG2E = tl.constexpr(1.4426950408889634)
HALF_SCALE = tl.constexpr(16384.0)  # keeps weights clear of float16's underflow


@triton.jit
def span(
    Work, Indptr, SeqLens, PER_HEAD: tl.constexpr, BLOCK_M: tl.constexpr, RAGGED: tl.constexpr, HAS_NEW: tl.constexpr
):
    """A program's sequence, first flat row (query row · heads a kv head + head), first query row, query rows, pool length
    and the position of its sequence's first query row. No rows for a program too many.
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
    return sequence, first, row, rows, length, offset


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
def exact_tile(
    K, V, k_at, v_at, here, token, ok, q, q_error, scale, cap, Bias, bias_tokens, row, row_ok,
    acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_row, norm,  # noqa: E741
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, CAP: tl.constexpr, BIAS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Add exact tokens. ``K + k_at`` and ``V + v_at`` int64 ``[tokens]`` are their keys and values; ``here`` the tokens that
    exist. ``q_error`` times the norm of a key bounds the rounding of its logit. Non-finite tokens count as zeros.
    """
    channel = tl.arange(0, DP)
    stored = tl.load(K + k_at[:, None] + channel[None, :], mask=here[:, None] & (channel < D)[None, :], other=0.0)
    k = stored.to(tl.float32)
    lost = not_finite(k)
    k = tl.where(lost[:, None], 0.0, k)
    error = q_error * tl.sqrt_rn(tl.max(tl.sum(k * k, 1), 0))
    if INTERPRET:
        y = tl.dot(q.to(tl.float32), tl.trans(k))
    else:
        y = tl.dot(q, tl.trans(k.to(stored.dtype)), input_precision="ieee")
    y = y * scale
    if BIAS:
        bias, ok = biased(Bias, bias_tokens, row, token, ok, here, row_ok)
        y += bias
        error += tl.max(tl.abs(bias), 1) * ADD_ERROR
    z_row = tl.maximum(z_row, error)
    if CAP:
        y = softcap(y, cap)
    infinite = ~(tl.abs(y) < float("inf"))
    y = tl.where(infinite, 0.0, y)

    column = tl.arange(0, DVP)
    stored_v = tl.load(V + v_at[:, None] + column[None, :], mask=here[:, None] & (column < DV)[None, :], other=0.0)
    v = stored_v.to(tl.float32)
    lost_v = not_finite(v)
    v = tl.where(lost_v[:, None], 0.0, v)
    norm = tl.maximum(norm, tl.sqrt_rn(tl.sum(v * v, 1)) * (1.0 + (DV + 8) * U))
    rho_token = tl.where(lost_v, float("inf"), 0.0)[None, :]
    p, factor, m, l, a1, a2, c_max, rho, m_wide, l_wide = fold(  # noqa: E741
        y, y, lost[None, :] | infinite, rho_token, ok, m, l, a1, a2, c_max, rho, m_wide, l_wide, True, INTERPRET
    )
    if stored_v.dtype == tl.float32:
        part = tl.dot(p, v, input_precision="ieee")
    elif INTERPRET:
        part = tl.dot((p * HALF_SCALE).to(stored_v.dtype).to(tl.float32), v) * (1.0 / HALF_SCALE)
    else:
        part = tl.dot((p * HALF_SCALE).to(stored_v.dtype), v.to(stored_v.dtype)) * (1.0 / HALF_SCALE)
    acc = acc * factor[:, None] + part
    return acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_row, norm


@triton.jit
def own_chunk(
    KNew, VNew, kv_head, split, splits, first_row, rows, low, high, length, position, window_left, q, q_error, scale, cap,
    Bias, bias_tokens, row, row_ok, acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_row, norm,  # noqa: E741
    KV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWWISE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, BIAS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Add a split's share of the rows' own chunk, which follows the pool's ``length`` tokens."""
    begin = tl.maximum(low - window_left - length, 0) if WINDOW else 0
    end = tl.minimum(rows, high - length + 1) if CAUSAL else rows
    block = begin // BLOCK_N
    per_split = tl.cdiv(tl.maximum(tl.cdiv(end, BLOCK_N) - block, 0), splits)
    first = (block + split * per_split) * BLOCK_N
    stop = tl.minimum(first + per_split * BLOCK_N, end)
    for base in range(first, stop, BLOCK_N):
        index = base + tl.arange(0, BLOCK_N)
        here = (index >= begin) & (index < stop)
        ok = attended(length + index, here, position, window_left, ROWWISE, CAUSAL, WINDOW)
        cell = (first_row + index).to(tl.int64) * KV + kv_head
        acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_row, norm = exact_tile(  # noqa: E741
            KNew, VNew, cell * D, cell * DV, here, length + index, ok, q, q_error, scale, cap, Bias, bias_tokens, row,
            row_ok, acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_row, norm, D, DV, DP, DVP, CAP, BIAS, INTERPRET,
        )  # fmt: skip
    return acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_row, norm


@triton.jit
def store_row(
    Acc, Stats, split, splits, total, row, row_ok, acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_max, z_row, norm, count,  # noqa: E741
    DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Leave a split's sums for :func:`witcert_kernels.triton_state.merge`; norm ``[tokens]``, the rest a row each."""
    at = Stats + split.to(tl.int64) * total + row
    plane = tl.cast(splits, tl.int64) * total
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
    at = Acc + (split.to(tl.int64) * total + row)[:, None] * DV + column[None, :]
    tl.store(at, acc, mask=row_ok[:, None] & (column < DV)[None, :])


@dataclass(frozen=True)
class Tiling:
    """How a call is cut: rows and tokens a tile, splits, and the row tiles of a ragged batch.

    work int32 ``[programs, 2]``: sequence (−1 for none) and first flat row of a program, empty unless ragged.
    """

    block_m: int
    block_n: int
    splits: int
    programs: int
    work: Tensor

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
    block_m = min(max(padded(most, 16), 16), 32 if widest <= 128 else 16)
    if qo_indptr is None:
        programs, work = n * triton.cdiv(per_head, block_m), q.new_empty(0, 2, dtype=torch.int32)
    else:
        programs = n * per_head // block_m + batch
        work = _row_tiles(qo_indptr, per_head, block_m, programs)
    blocks = max(1, triton.cdiv(capacity, block_n))
    if splits < 1:
        count = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        splits = min(2 * count // max(programs * kv_heads, 1), triton.cdiv(blocks, 4))
    return Tiling(block_m, block_n, max(1, min(splits, blocks)), programs, work)


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
