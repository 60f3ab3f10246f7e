"""The observatory's read in Triton, with the two-part meter. The counterpart of ``ObservatoryReader``, in float32."""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rounding
from .triton_common import Workspace, check_device, padded, power_of_two_wide
from .triton_exact import read_exact
from .triton_query import ROWS, scale_parts
from .triton_state import FIELDS, KNOWN_FIELDS, fold, merge, softcap, weight_error
from .triton_tiles import (
    ADD_ERROR,
    SIZES,
    Read,
    attended,
    biased,
    dot_error,
    key_logits,
    pool_tokens,
    span,
    store_known,
    store_row,
    weighted_values,
)

RESIDENT = 2  # programs that the registers of a multiprocessor hold


@triton.jit(do_not_specialize=["rows"])
def _query_kernel(
    Q, F, Directions, BandOfChannel, All, Outside, A, AError, ARound, Bad, rows, scale_high, scale_low,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BANDS: tl.constexpr,
    DELTA_WIDEN: tl.constexpr, UP: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Band norms of a query and of what it has outside the sketch, and its coefficients a; all times the scale."""
    per_head: tl.constexpr = HEADS // KV
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kv_head = tl.program_id(1)
    here = flat < rows * per_head
    row = (flat // per_head).to(tl.int64) * HEADS + kv_head * per_head + flat % per_head
    scale = tl.cast(scale_high, tl.float64) + tl.cast(scale_low, tl.float64)
    channel = tl.arange(0, DP)
    inside = channel < D
    raw = tl.load(Q + row[:, None] * D + channel[None, :], mask=here[:, None] & inside[None, :], other=0.0).to(
        tl.float32
    )
    bad = tl.max((~(tl.abs(raw) < float("inf"))).to(tl.int32), 1) > 0
    f = tl.load(F + kv_head * D + channel, mask=inside, other=0.0).to(tl.float64)
    z = tl.where(bad[:, None], 0.0, raw).to(tl.float64) * f[None, :]
    bad = bad | ~(tl.sum(tl.abs(z), 1) * scale < 1e28)
    z = tl.where(bad[:, None], 0.0, z)
    tl.store(Bad + row, bad.to(tl.int8), mask=here)
    outside = z
    size = tl.zeros((BLOCK,), tl.float64)
    for i in tl.static_range(R):
        u = tl.load(Directions + (kv_head * R + i) * D + channel, mask=inside, other=0.0).to(tl.float64)[None, :]
        a = tl.sum(z * u, 1)
        outside -= a[:, None] * u
        size += tl.abs(a)
        tl.store(A + row * R + i, (scale * a).to(tl.float32), mask=here)
    if R > 0:
        tl.store(AError + row, (scale * DELTA_WIDEN / 2 * size * UP).to(tl.float32), mask=here)
        tl.store(ARound + row, (scale * 127.0 * ROUND * size * UP).to(tl.float32), mask=here)
    band = tl.load(BandOfChannel + channel, mask=inside, other=-1)[None, :]
    for b in tl.static_range(BANDS):
        norm = tl.sqrt(tl.sum(tl.where(band == b, z * z, 0.0), 1)) * scale * UP
        tl.store(All + row * BANDS + b, norm.to(tl.float32), mask=here)
        norm = tl.sqrt(tl.sum(tl.where(band == b, outside * outside, 0.0), 1)) * scale * UP
        tl.store(Outside + row * BANDS + b, norm.to(tl.float32), mask=here)


@triton.jit(do_not_specialize=SIZES)
def _observatory_kernel(
    Q, Indptr, PageTable, SeqLens, ExactSlots, Bias, All, Outside, A, AError, ARound, Bad,
    KHat, Witness, Sketch, SketchScale, VHat, VError, VNorm, Acc, Stats,
    batch, total, max_pages, bias_tokens, window_left, slots, scale, cap,
    KV: tl.constexpr, PER_HEAD: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    BANDS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr,
    HAS_NEW: tl.constexpr, HAS_EXACT: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DP: tl.constexpr, DVP: tl.constexpr, PRECISE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A split of a sequence for BLOCK_M rows of a kv head, with both sets of sums."""
    kv_head, split, splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    sequence, _, _, length, row, row_ok, position, low, high = span(
        Indptr, SeqLens, batch, kv_head, KV, PER_HEAD, BLOCK_M, RAGGED, HAS_NEW
    )
    begin, first, stop = pool_tokens(length, low, high, split, splits, window_left, PAGE, BLOCK_N, CAUSAL, WINDOW)
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
    count = tl.zeros((BLOCK_M if ROWWISE or BIAS else 1,), tl.int32)
    if R > 0:
        known_m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        known_m_wide = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        known_l = tl.zeros((BLOCK_M,), tl.float64)
        known_a1 = tl.zeros((BLOCK_M,), tl.float64)
        known_a2 = tl.zeros((BLOCK_M,), tl.float64)
        known_l_wide = tl.zeros((BLOCK_M,), tl.float64)
        known_c_max = tl.zeros((BLOCK_M,), tl.float32)
        er = tl.zeros((BLOCK_M,), tl.float64)
        ee = tl.zeros((BLOCK_M,), tl.float64)
        r_top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        a_error = tl.load(AError + row, mask=row_ok, other=0.0)
        a_round = tl.load(ARound + row, mask=row_ok, other=0.0)

    channel = tl.arange(0, DP)
    column = tl.arange(0, DVP)
    q_ok = tl.load(Bad + row, mask=row_ok, other=1) == 0
    q = tl.load(Q + row[:, None] * D + channel[None, :], mask=q_ok[:, None] & (channel < D)[None, :], other=0.0)
    q_error = dot_error(q, scale, D)

    for base in range(first, stop, BLOCK_N):
        token = base + tl.arange(0, BLOCK_N)
        here = (token >= begin) & (token < stop)
        if HAS_EXACT:
            at = (sequence * KV + kv_head) * max_pages + token // PAGE
            here = here & (tl.load(ExactSlots + at, mask=here, other=-1) < 0)
        page = tl.load(PageTable + sequence * max_pages + token // PAGE, mask=here, other=0).to(tl.int64)
        cell = (page * PAGE + token % PAGE) * KV + kv_head
        norm = tl.maximum(norm, tl.load(VNorm + page * KV + kv_head, mask=here, other=0.0))
        ok = attended(token, here, position, window_left, ROWWISE, CAUSAL, WINDOW)
        raw, error, lost = key_logits(
            KHat, cell * D, here, ok, Q, q, q_ok, row, q_error, scale, D, DP, PRECISE, INTERPRET
        )
        if BIAS:
            bias, ok = biased(Bias, bias_tokens, row, token, ok, here, row_ok)
            raw += bias
            error += tl.max(tl.abs(bias), 1) * ADD_ERROR
        infinite = ~(tl.abs(raw) < float("inf"))
        raw = tl.where(infinite, 0.0, raw)
        y = softcap(raw, cap) if CAP else raw

        c = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        outside = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for b in tl.static_range(BANDS):
            residual = tl.load(Witness + cell * BANDS + b, mask=here, other=0.0).to(tl.float32)
            lost = lost | ~(residual < float("inf"))
            residual = tl.where(residual < float("inf"), residual, 0.0)[None, :]
            c += tl.load(All + row * BANDS + b, mask=row_ok, other=0.0)[:, None] * residual
            if R > 0:
                outside += tl.load(Outside + row * BANDS + b, mask=row_ok, other=0.0)[:, None] * residual
        count += tl.sum(ok.to(tl.int32), 1)
        flagged = lost[None, :] | infinite

        stored = tl.load(
            VHat + cell[:, None] * DV + column[None, :], mask=here[:, None] & (column < DV)[None, :], other=0.0
        )
        v = stored.to(tl.float32)
        rho_token = tl.load(VError + cell, mask=here, other=0.0).to(tl.float32)
        lost_v = ~(rho_token < float("inf"))
        v = tl.where(lost_v[:, None], 0.0, v)
        rho_token = tl.where(lost_v, float("inf"), rho_token)[None, :]
        p, factor, m, l, a1, a2, c_max, rho, m_wide, l_wide = fold(  # noqa: E741
            y, c, flagged, rho_token, ok, m, l, a1, a2, c_max, rho, m_wide, l_wide, False, False, INTERPRET
        )
        acc = acc * factor[:, None] + weighted_values(p, v, stored, q, INTERPRET)
        if R > 0:
            unit = tl.load(SketchScale + cell, mask=here, other=0.0).to(tl.float32)
            clamped = ~(unit < float("inf"))
            unit = tl.where(clamped, 0.0, unit)
            correction = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for i in tl.static_range(R):
                code = tl.load(Sketch + cell * R + i, mask=here, other=0).to(tl.float32)
                correction += tl.load(A + row * R + i, mask=row_ok, other=0.0)[:, None] * code[None, :]
            correction *= unit[None, :]
            w = raw - correction
            w = softcap(w, cap) if CAP else w
            unknown = outside + a_error[:, None] * unit[None, :]
            error += a_round * tl.max(unit, 0)
            known, factor, known_m, _l, known_a1, known_a2, known_c_max, _rho, known_m_wide, known_l_wide = fold(
                w, unknown, clamped[None, :] | flagged, tl.zeros_like(w), ok, known_m, known_l, known_a1, known_a2,
                known_c_max, known_l, known_m_wide, known_l_wide, False, False, INTERPRET,
            )  # fmt: skip
            # the variance of e^r is a difference: its terms in float64, relative to the largest e^r
            r = tl.where(ok, y - w, float("-inf"))
            newer = tl.maximum(r_top, tl.ceil(tl.max(r, 1)))
            r_base = tl.where(newer == float("-inf"), 0.0, newer)
            turn = power_of_two_wide(r_top - r_base)
            r_top = newer
            gain = tl.exp2(r - r_base[:, None]).to(tl.float64)
            weight = known.to(tl.float64)
            older = factor.to(tl.float64)
            known_l = known_l * older + tl.sum(weight, 1)
            weight *= gain
            er = er * older * turn + tl.sum(weight, 1)
            ee = ee * older * turn * turn + tl.sum(weight * gain, 1)
        z_row = tl.maximum(z_row, error)

    none = tl.zeros((BLOCK_M,), tl.float32)
    store_row(
        Acc, Stats, split, slots, total, row, row_ok, acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, none, z_row, norm,
        count, DV, DVP,
    )  # fmt: skip
    if R > 0:
        store_known(
            Stats, split, slots, total, row, row_ok, known_m, known_l, known_a1, known_a2, known_c_max, er, ee, r_top
        )


def observatory_room(
    read: Read, workspace: Workspace, *, r: int, bands: int
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """All temporaries of an observatory's decode: the query's coefficients, and what the splits leave."""
    rows, heads, _ = read.q.shape
    query = [workspace.take(rows, heads, *shape) for shape in ((bands,), (bands,), (r,), (), ())]
    bad = workspace.take(rows, heads, dtype=torch.int8)
    return (*query, bad), *read.scratch(FIELDS + (KNOWN_FIELDS if r else 0), workspace)


def decode_observatory(
    q: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
    exact_pages: Tensor | None,
    exact_k: Tensor,
    exact_v: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    *,
    tensors: dict[str, Tensor],
    causal: bool,
    sm_scale: float,
    cap: float,
    window_left: int,
    splits: int,
    workspace: Tensor | None = None,
    telemetry: Tensor | None = None,
    layer: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`witcert_kernels.triton_reader.decode_packed`, from the tensors of an observatory."""
    check_device(q)
    t, (n, heads, d) = tensors, q.shape
    _, page_size, kv_heads, _ = t["k_hat"].shape
    bands, r = t["witness"].shape[-1], t["sketch"].shape[-1]
    read = Read(
        q.contiguous(), page_table, seq_lens, qo_indptr, k_new, v_new, exact_pages, exact_k, exact_v, sinks, bias,
        causal, sm_scale, cap, window_left, splits, page_size, kv_heads, groups=1, resident=RESIDENT,
    )  # fmt: skip
    query, acc, stats = observatory_room(read, Workspace(q.device, workspace), r=r, bands=bands)
    norms, outside, a, a_error, a_round, bad = query
    _query_kernel[(triton.cdiv(n * read.per_head, ROWS), kv_heads)](
        read.q, t["f"], t["u"], t["band_of_channel"], norms, outside, a, a_error, a_round, bad, n,
        *scale_parts(sm_scale), HEADS=heads, KV=kv_heads, D=d, R=r, BANDS=bands,
        DELTA_WIDEN=rounding.DELTA_WIDEN, UP=rounding.FLOAT_UP * (1 + (bands + 8) * rounding.U),
        ROUND=(r + 8) * rounding.U, BLOCK=ROWS, DP=padded(d, 16), num_warps=4,
    )  # fmt: skip
    if read.programs:
        given = read.given
        _observatory_kernel[read.grid](
            read.q, given(qo_indptr), given(page_table), given(seq_lens), given(exact_pages), given(bias), norms,
            outside, a, a_error, a_round, bad, t["k_hat"], t["witness"], t["sketch"], t["sketch_scale"], t["v_hat"],
            t["v_error"], t["v_norm"], acc, stats, *read.scalars(len(acc)), **read.constants(), **read.precision(), R=r,
            BANDS=bands, num_stages=2,
        )  # fmt: skip
        if read.has_exact:
            read_exact(read, bad, acc, stats)
    outputs = merge(
        acc, stats, None, bad, sinks, read.q, tokens=read.tokens, tile=read.block_n, cap=cap,
        weight_error=weight_error(q.dtype, True, 1), known_slots=read.splits if r else 0,
        telemetry=telemetry, layer=layer,
    )  # fmt: skip
    return (*outputs, q.new_empty(len(page_table), kv_heads, 0, dtype=torch.float32))
