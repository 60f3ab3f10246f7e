"""Exact tokens of the Triton read, for either pool: repaired pages, and the rows' own chunk."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from .triton_state import fold, softcap
from .triton_tiles import (
    ADD_ERROR,
    FLUSHED,
    SIZES,
    Read,
    U,
    attended,
    biased,
    dot_error,
    key_logits,
    not_finite,
    pool_tokens,
    span,
    store_row,
    weighted_values,
)


@triton.jit
def _tile(
    K, V, cell, here, token, ok, Q, q, q_ok, q_error, scale, cap, Bias, bias_tokens, row, row_ok,
    acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_row, norm,  # noqa: E741
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, CAP: tl.constexpr, BIAS: tl.constexpr,
    PRECISE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Add the tokens in some cells of K ``[cells, D]`` and V ``[cells, DV]``, ``here`` those that exist."""
    y, error, lost = key_logits(K, cell * D, here, ok, Q, q, q_ok, row, q_error, scale, D, DP, PRECISE, INTERPRET)
    if BIAS:
        bias, ok = biased(Bias, bias_tokens, row, token, ok, here, row_ok)
        y += bias
        error += tl.max(tl.abs(bias), 1) * ADD_ERROR
    if CAP:
        y = softcap(y, cap)
    infinite = ~(tl.abs(y) < float("inf"))
    y = tl.where(infinite, 0.0, y)
    column = tl.arange(0, DVP)
    at = cell[:, None] * DV + column[None, :]
    stored = tl.load(V + at, mask=here[:, None] & (column < DV)[None, :], other=0.0)
    v = stored.to(tl.float32)
    lost_v = not_finite(v)
    v = tl.where(lost_v[:, None], 0.0, v)
    norm = tl.maximum(norm, tl.sqrt_rn(tl.sum(v * v, 1) + DV * FLUSHED) * (1.0 + (DV + 8) * U))
    rho_token = tl.where(lost_v, float("inf"), 0.0)[None, :]
    p, factor, m, l, a1, a2, c_max, rho, m_wide, l_wide = fold(  # noqa: E741
        y, y, lost[None, :] | infinite, rho_token, ok, m, l, a1, a2, c_max, rho, m_wide, l_wide, True, False, INTERPRET
    )
    acc = acc * factor[:, None] + weighted_values(p, v, stored, q, INTERPRET)
    return acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, tl.maximum(z_row, error), norm


@triton.jit(do_not_specialize=[*SIZES, "first_slot"])
def _exact_kernel(
    Q, Indptr, SeqLens, ExactSlots, ExactK, ExactV, KNew, VNew, Bias, Bad, Acc, Stats,
    batch, total, max_pages, bias_tokens, window_left, slots, scale, cap, first_slot,
    KV: tl.constexpr, PER_HEAD: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr, HAS_NEW: tl.constexpr,
    HAS_EXACT: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DP: tl.constexpr,
    DVP: tl.constexpr, PRECISE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A split's repaired pages and its share of the own chunk, which follows the pool's ``length`` tokens."""
    kv_head, split, splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    sequence, first_row, rows, length, row, row_ok, position, low, high = span(
        Indptr, SeqLens, batch, kv_head, KV, PER_HEAD, BLOCK_M, RAGGED, HAS_NEW
    )
    ROWWISE: tl.constexpr = RAGGED and (CAUSAL or WINDOW)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    m_wide = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float64)  # noqa: E741
    a1 = tl.zeros((BLOCK_M,), tl.float64)
    a2 = tl.zeros((BLOCK_M,), tl.float64)
    rho = tl.zeros((BLOCK_M,), tl.float64)
    l_wide = tl.zeros((BLOCK_M,), tl.float64)
    c_max = tl.zeros((BLOCK_M,), tl.float32)
    z_row = tl.zeros((BLOCK_M,), tl.float32)
    norm = tl.zeros((BLOCK_N,), tl.float32)
    acc = tl.zeros((BLOCK_M, DVP), tl.float32)
    channel = tl.arange(0, DP)
    q_ok = tl.load(Bad + row, mask=row_ok, other=1) == 0
    q = tl.load(Q + row[:, None] * D + channel[None, :], mask=q_ok[:, None] & (channel < D)[None, :], other=0.0)
    q_error = dot_error(q, scale, D)

    if HAS_EXACT:
        begin, first, stop = pool_tokens(length, low, high, split, splits, window_left, PAGE, BLOCK_N, CAUSAL, WINDOW)
        for base in range(first, stop, BLOCK_N):
            token = base + tl.arange(0, BLOCK_N)
            here = (token >= begin) & (token < stop)
            at = (sequence * KV + kv_head) * max_pages + token // PAGE
            slot = tl.load(ExactSlots + at, mask=here, other=-1)
            here = here & (slot >= 0)
            if tl.max(here.to(tl.int32), 0) > 0:
                ok = attended(token, here, position, window_left, ROWWISE, CAUSAL, WINDOW)
                cell = slot.to(tl.int64) * PAGE + token % PAGE
                acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_row, norm = _tile(  # noqa: E741
                    ExactK, ExactV, cell, here, token, ok, Q, q, q_ok, q_error, scale, cap, Bias, bias_tokens, row,
                    row_ok, acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_row, norm, D, DV, DP, DVP, CAP, BIAS,
                    PRECISE, INTERPRET,
                )  # fmt: skip
    if HAS_NEW:
        begin = tl.maximum(low - window_left - length, 0) if WINDOW else 0
        end = tl.minimum(rows, high - length + 1) if CAUSAL else rows
        first_block = begin // BLOCK_N
        per_split = tl.cdiv(tl.maximum(tl.cdiv(end, BLOCK_N) - first_block, 0), splits)
        first = (first_block + split * per_split) * BLOCK_N
        stop = tl.minimum(first + per_split * BLOCK_N, end)
        for base in range(first, stop, BLOCK_N):
            index = base + tl.arange(0, BLOCK_N)
            here = (index >= begin) & (index < stop)
            token = length + index
            ok = attended(token, here, position, window_left, ROWWISE, CAUSAL, WINDOW)
            cell = (first_row + index).to(tl.int64) * KV + kv_head
            acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_row, norm = _tile(  # noqa: E741
                KNew, VNew, cell, here, token, ok, Q, q, q_ok, q_error, scale, cap, Bias, bias_tokens, row, row_ok,
                acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_row, norm, D, DV, DP, DVP, CAP, BIAS, PRECISE,
                INTERPRET,
            )  # fmt: skip
    none = tl.zeros((BLOCK_M,), tl.float32)
    store_row(
        Acc, Stats, first_slot + split, slots, total, row, row_ok, acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, none,
        z_row, norm, none, DV, DVP,
    )  # fmt: skip


def read_exact(read: Read, bad: Tensor, acc: Tensor, stats: Tensor) -> None:
    """Read exact tokens into the last ``read.splits`` slots of ``acc`` and ``stats``.

    ``bad`` int8 ``[rows, heads]`` marks queries that are not finite.
    """
    given = read.given
    _exact_kernel[read.grid](
        read.q, given(read.qo_indptr), given(read.seq_lens), given(read.exact_pages), read.exact_k, read.exact_v,
        given(read.k_new), given(read.v_new), given(read.bias), bad, acc, stats, *read.scalars(len(acc)), read.splits,
        **read.constants(), **read.precision(), num_stages=2,
    )  # fmt: skip
