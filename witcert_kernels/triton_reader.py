"""The reader in Triton: one program reads a split of a sequence for some query rows of a kv head.

The keys stay int8: the query comes as balanced base-256 digits, each digit's dot with the codes is exact in int32, and
float32 combines them. The counterpart of :mod:`witcert_kernels.reader`; its own error budget is in :mod:`rounding`.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rounding
from .triton_common import Workspace, as_int32, check_device, dither_of, padded
from .triton_exact import read_exact
from .triton_observatory import decode_observatory
from .triton_query import PackedDigits, packed_digits
from .triton_state import FIELDS, fold, merge, softcap, weight_error
from .triton_tiles import (
    ADD_ERROR,
    HALF_SCALE,
    SIZES,
    Read,
    U,
    attended,
    biased,
    not_finite,
    pool_tokens,
    span,
    store_row,
)

__all__ = ["decode_observatory", "decode_packed"]

DIGITS = 3


def resident_programs(dtype: torch.dtype, groups: int, kept: int, dither: bool) -> int:
    """Programs that the registers of a multiprocessor are to hold, a few of which the compiler would else waste."""
    if dtype == torch.float32 and groups == 1:
        return 2
    return 4 if groups == 1 and kept == 0 and not dither else 3


@triton.jit
def _int8_to_half(x, INTERPRET: tl.constexpr):
    """int8 to float16, exact: a byte in the mantissa of 1024 + 128 + x, four at a time."""
    if INTERPRET:
        half = x.to(tl.float16)
    else:
        half = tl.inline_asm_elementwise(
            """{
            .reg .b32 biased, magic, offset;
            mov.b32 magic, 0x64646464;
            mov.b32 offset, 0x64806480;
            xor.b32 biased, $2, 0x80808080;
            prmt.b32 $0, biased, magic, 0x4140;
            prmt.b32 $1, biased, magic, 0x4342;
            sub.f16x2 $0, $0, offset;
            sub.f16x2 $1, $1, offset;
            }""",
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return half


@triton.jit
def _pairs_to_half(x, INTERPRET: tl.constexpr):
    """The low and the high bytes of int16, each int8, as float16, exact: a byte in the mantissa of 1024 + 128 + x.

    Two numbers at a time. Values are read as pairs of channels so that the transposing load of a tensor core's operand,
    whose unit is 16 bits, brings both tokens of a pair of products into one register.
    """
    if INTERPRET:
        low, high = ((x << 8) >> 8).to(tl.float16), (x >> 8).to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 biased, magic, offset;
            mov.b32 magic, 0x64646464;
            mov.b32 offset, 0x64806480;
            xor.b32 biased, $2, 0x80808080;
            prmt.b32 $0, biased, magic, 0x4240;
            prmt.b32 $1, biased, magic, 0x4341;
            sub.f16x2 $0, $0, offset;
            sub.f16x2 $1, $1, offset;
            }""",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def _load_digits(
    Digits, row, row_ok, group, start, FIRST: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr,
    DIGITS: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some digits of WIDTH channels of a group, int8 ``[COUNT * rows, WIDTH]``, digit after digit, 0 where none are."""
    digit = FIRST + tl.arange(0, COUNT)[:, None, None]
    within = start + tl.arange(0, WIDTH)[None, None, :]
    at = (row[None, :, None] * DIGITS + digit) * D + group * (D // GROUPS) + within
    mask = row_ok[None, :, None] & (digit < DIGITS) & (within < D // GROUPS)
    return tl.reshape(tl.load(Digits + at, mask=mask, other=0), (COUNT * BLOCK_M, WIDTH))


@triton.jit
def _combine(parts, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """Σ_i 256^i of the i-th rows of ``[COUNT * rows, COLUMNS]``, float32 after two roundings."""
    digit = tl.arange(0, COUNT)[:, None, None]
    weight = tl.where(digit == 0, 1.0, tl.where(digit == 1, 256.0, 65536.0))
    return tl.sum(tl.reshape(parts.to(tl.float32), (COUNT, BLOCK_M, COLUMNS)) * weight, 0)


@triton.jit
def _digit_dot(
    digits, high, middle, k, STACK: tl.constexpr, DIGITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Σ of the query's integers times codes ``[tokens, WP]``, float32 after two roundings.

    Few rows have their digits stacked into one operand; else ``digits`` is the lowest.
    """
    codes = tl.trans(k)
    total = tl.dot(digits, codes, out_dtype=tl.int32)
    STACKED: tl.constexpr = 2 if DIGITS == 2 else 4
    if STACK:
        integer = _combine(total, STACKED, BLOCK_M, BLOCK_N)
    else:
        upper = tl.dot(middle, codes, out_dtype=tl.int32).to(tl.float32)
        if DIGITS == 3:
            upper += tl.dot(high, codes, out_dtype=tl.int32).to(tl.float32) * 256.0
        integer = upper * 256.0 + total.to(tl.float32)
    return integer


@triton.jit
def _dither_dot(
    Digits, row, row_ok, seed, layer, kv_head, token, base, group, PERIOD: tl.constexpr, D: tl.constexpr,
    GROUPS: tl.constexpr, WP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Σ of the query's integers times ξ, ``[rows, 1]`` where a tile has one period, else ``[rows, tokens]``."""
    STACKED: tl.constexpr = 2 if DIGITS == 2 else 4
    if PERIOD % BLOCK_N == 0:
        digits = _load_digits(Digits, row, row_ok, group, 0, 0, STACKED, D, GROUPS, DIGITS, BLOCK_M, WP)
        channel = (group * (D // GROUPS) + tl.arange(0, WP))[None, :]
        xi = dither_of(seed, layer, kv_head, base // PERIOD, channel)
        total = tl.sum(_combine(digits, STACKED, BLOCK_M, WP) * xi, 1)[:, None]
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, D // GROUPS, 32):  # products in float32 keep their whole depth in registers
            digits = _load_digits(Digits, row, row_ok, group, start, 0, STACKED, D, GROUPS, DIGITS, BLOCK_M, 32)
            channel = (group * (D // GROUPS) + start + tl.arange(0, 32))[None, :]
            xi = dither_of(seed, layer, kv_head, (token // PERIOD)[:, None], channel)
            total = tl.dot(_combine(digits, STACKED, BLOCK_M, 32), tl.trans(xi), total, input_precision="ieee")
    return total


@triton.jit
def _witness_bound(
    Witness, WitnessCodes, BandShare, KScale, row, row_ok, cell, here, step, GROUPS: tl.constexpr, BANDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ over bands of what the query has in a band times the residual's norm there, ``[rows, tokens]``."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for band in tl.static_range(BANDS):
        norm = tl.load(WitnessCodes + cell * BANDS + band, mask=here, other=0).to(tl.float32)
        if GROUPS == 1:
            norm *= step
        else:
            square = tl.zeros((BLOCK_N,), tl.float32)
            for group in tl.static_range(GROUPS):
                scale = tl.load(KScale + cell * GROUPS + group, mask=here, other=0.0).to(tl.float32)
                scale = tl.where(scale < float("inf"), scale, 0.0)
                square += tl.load(BandShare + band * GROUPS + group) * scale * scale
            norm *= tl.sqrt_rn(square)
        total += tl.load(Witness + row * BANDS + band, mask=row_ok, other=0.0)[:, None] * norm[None, :]
    return total


@triton.jit
def _group(
    group, digits, high, middle, Digits, Half, Fixed, Dot, Unit, Sketch, RadiusSquare, RadiusBias, KCodes, KScale,
    SketchCodes, row, row_ok, cell, here, token, base, seed, layer, kv_head, STACK: tl.constexpr, PERIOD: tl.constexpr,
    D: tl.constexpr, GROUPS: tl.constexpr, R: tl.constexpr, RADIUS: tl.constexpr, WP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """What a channel group adds, ``[rows, tokens]``, each a coefficient of the query times the step: to the logit, to
    the half-step bound, to sketch and rounding errors, to rounding errors alone, to the radius' two sums. And the
    steps, 0 where they are not finite, and where that is.
    """
    step = tl.load(KScale + cell * GROUPS + group, mask=here, other=0.0).to(tl.float32)
    lost = ~(step < float("inf"))
    step = tl.where(lost, 0.0, step)
    within = tl.arange(0, WP)
    at = cell[:, None] * D + group * (D // GROUPS) + within[None, :]
    # tokens that are not here have codes too, in the same page or the first one, and no weight
    if WP == D // GROUPS:
        k = tl.load(KCodes + at)
    else:
        k = tl.load(KCodes + at, mask=(within < D // GROUPS)[None, :], other=0)
    STACKED: tl.constexpr = 2 if DIGITS == 2 else 4  # a power of two of digits, the last one 0
    if GROUPS > 1:
        digits = _load_digits(Digits, row, row_ok, group, 0, 0, STACKED if STACK else 1, D, GROUPS, DIGITS, BLOCK_M, WP)
        middle = _load_digits(Digits, row, row_ok, group, 0, 1, 1, D, GROUPS, DIGITS, BLOCK_M, WP)
        high = _load_digits(Digits, row, row_ok, group, 0, 2, 1, D, GROUPS, DIGITS, BLOCK_M, WP)
    x = _digit_dot(digits, high, middle, k, STACK, DIGITS, BLOCK_M, BLOCK_N)
    if PERIOD > 0:
        x -= _dither_dot(
            Digits,
            row,
            row_ok,
            seed,
            layer,
            kv_head,
            token,
            base,
            group,
            PERIOD,
            D,
            GROUPS,
            WP,
            BLOCK_M,
            BLOCK_N,
            DIGITS,
        )
    x *= tl.load(Unit + row, mask=row_ok, other=0.0)[:, None]
    for i in tl.static_range(R):
        code = tl.load(SketchCodes + cell * R + i, mask=here, other=0).to(tl.float32)
        coefficient = tl.load(Sketch + (row * R + i) * GROUPS + group, mask=row_ok, other=0.0)
        x -= coefficient[:, None] * code[None, :]
    at = row * GROUPS + group
    half = tl.load(Half + at, mask=row_ok, other=0.0)[:, None] * step[None, :]
    fixed = tl.load(Fixed + at, mask=row_ok, other=0.0)[:, None] * step[None, :]
    dot = tl.load(Dot + at, mask=row_ok, other=0.0)[:, None] * step[None, :]
    square = half
    tilt = half
    if RADIUS:
        square = tl.load(RadiusSquare + at, mask=row_ok, other=0.0)[:, None] * (step * step)[None, :]
        tilt = tl.load(RadiusBias + at, mask=row_ok, other=0.0)[:, None] * step[None, :]
    return x * step[None, :], half, fixed, dot, square, tilt, step, lost


@triton.jit
def _value_steps(VScale, cell, here, column, DV: tl.constexpr, GROUPS_V: tl.constexpr, HALF_RHO: tl.constexpr):
    """Steps of values, ``[tokens]`` or with several groups ``[tokens, DVP]``, 0 where they are not finite; and ρ
    ``[1, tokens]``, Inf there.
    """
    if GROUPS_V == 1:
        steps = tl.load(VScale + cell, mask=here, other=0.0).to(tl.float32)
        lost = ~(steps < float("inf"))
        steps = tl.where(lost, 0.0, steps)
        rho = steps * HALF_RHO
    else:
        at = cell[:, None] * GROUPS_V + (column // (DV // GROUPS_V))[None, :]
        steps = tl.load(VScale + at, mask=here[:, None] & (column < DV)[None, :], other=0.0).to(tl.float32)
        lost = not_finite(steps)
        steps = tl.where(lost[:, None], 0.0, steps)
        rho = tl.sqrt_rn(tl.sum(steps * steps, 1)) * HALF_RHO
    return steps, tl.where(lost, float("inf"), rho)[None, :]


@triton.jit
def _value_product(
    p, codes, steps, norm, FLOAT32: tl.constexpr, PAIRED: tl.constexpr, GROUPS_V: tl.constexpr, INTERPRET: tl.constexpr
):
    """Σ p v̂ ``[rows, DVP]``, in float32 or with weights as float16; PAIRED: its even and its odd channels.

    norm, at least each ‖v̂‖, is over 100 steps. For float16 steps are in units of a power of two above norm / 64, and
    weights are times HALF_SCALE: clear of underflow.
    """
    odd = tl.zeros((p.shape[0], 1), tl.float32)
    if FLOAT32:
        values = codes.to(tl.float32) * (steps[:, None] if GROUPS_V == 1 else steps)
        part = tl.dot(p, values, input_precision="ieee")
    else:
        exponent = (tl.maximum(norm, 2.0**-16).to(tl.int32, bitcast=True) >> 23) - 6
        inverse = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
        unit = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
        if PAIRED:
            weights = (p * (steps * inverse * HALF_SCALE)[None, :]).to(tl.float16)
            low, high = _pairs_to_half(codes, INTERPRET)
            part = tl.dot(weights, low) * unit
            odd = tl.dot(weights, high) * unit
        elif GROUPS_V == 1:
            weights = p * (steps * inverse * HALF_SCALE)[None, :]
            part = tl.dot(weights.to(tl.float16), _int8_to_half(codes, INTERPRET)) * unit
        else:
            values = (codes.to(tl.float32) * (steps * inverse)).to(tl.float16)
            part = tl.dot((p * HALF_SCALE).to(tl.float16), values) * unit
    return part, odd


@triton.jit(do_not_specialize=[*SIZES, "seed", "layer"])
def _packed_kernel(
    Q, Indptr, PageTable, SeqLens, ExactSlots, Bias,
    Digits, Unit, Sketch, Half, Fixed, Dot, Witness, RadiusSquare, RadiusBias, Kept, Shift, ShiftError, BandShare,
    KCodes, KScale, SketchCodes, WitnessCodes, Bypass, VCodes, VScale, VNorm, Acc, Stats,
    batch, total, max_pages, bias_tokens, window_left, slots, scale, cap, log_term, seed, layer,
    KV: tl.constexpr, PER_HEAD: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_V: tl.constexpr, R: tl.constexpr, BANDS: tl.constexpr, KEPT: tl.constexpr,
    PERIOD: tl.constexpr, RADIUS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    RAGGED: tl.constexpr, HAS_NEW: tl.constexpr, HAS_EXACT: tl.constexpr, BIAS: tl.constexpr, SHIFT: tl.constexpr,
    DIGITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WP: tl.constexpr, DVP: tl.constexpr,
    HALF_RHO: tl.constexpr, PAIRED: tl.constexpr, CERTIFICATE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A split of a sequence for BLOCK_M rows of a kv head. ``Digits`` to ``BandShare`` are of ``PackedDigits``."""
    kv_head, split, splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    sequence, _, _, length, row, row_ok, position, lowest, highest = span(
        Indptr, SeqLens, batch, kv_head, KV, PER_HEAD, BLOCK_M, RAGGED, HAS_NEW
    )
    begin, first, stop = pool_tokens(length, lowest, highest, split, splits, window_left, PAGE, BLOCK_N, CAUSAL, WINDOW)
    ROWWISE: tl.constexpr = RAGGED and (CAUSAL or WINDOW)
    STACK: tl.constexpr = BLOCK_M < 16
    STACKED: tl.constexpr = 2 if DIGITS == 2 else 4
    TOKENWISE: tl.constexpr = GROUPS > 1 or KEPT > 0  # rounding is then not one number times a token's step

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    m_wide = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float64)  # noqa: E741
    a1 = tl.zeros((BLOCK_M,), tl.float64)
    a2 = tl.zeros((BLOCK_M,), tl.float64)
    rho = tl.zeros((BLOCK_M,), tl.float64)
    l_wide = tl.zeros((BLOCK_M,), tl.float64)
    c_max = tl.zeros((BLOCK_M,), tl.float32)
    z_max = tl.zeros((BLOCK_M,), tl.float32)
    z_row = tl.zeros((BLOCK_M,), tl.float32)
    norm = tl.zeros((BLOCK_N,), tl.float32)
    largest = tl.zeros((BLOCK_N,), tl.float32)
    UNROLL: tl.constexpr = GROUPS - 1 if GROUPS > 1 and GROUPS <= 8 else 1
    UNIT: tl.constexpr = 2 if PAIRED else 1  # channels of a value that are read as one number
    acc = tl.zeros((BLOCK_M, DVP // UNIT), tl.float32)
    odd = tl.zeros((BLOCK_M, DVP // UNIT if PAIRED else 1), tl.float32)
    count = tl.zeros((BLOCK_M if ROWWISE or BIAS else BLOCK_N,), tl.int32)

    z_shift = tl.zeros((BLOCK_M,), tl.float32)
    if SHIFT:
        shift = tl.load(Shift + row, mask=row_ok, other=0.0).to(tl.float32)
        z_shift = tl.abs(shift) * ADD_ERROR + tl.load(ShiftError + row, mask=row_ok, other=0.0)
    digits = _load_digits(Digits, row, row_ok, 0, 0, 0, STACKED if STACK else 1, D, GROUPS, DIGITS, BLOCK_M, WP)
    middle = _load_digits(Digits, row, row_ok, 0, 0, 1, 1, D, GROUPS, DIGITS, BLOCK_M, WP)
    high = _load_digits(Digits, row, row_ok, 0, 0, 2, 1, D, GROUPS, DIGITS, BLOCK_M, WP)
    cell_of_table = sequence * max_pages
    exact_of_table = (sequence * KV + kv_head) * max_pages
    token_at = tl.arange(0, BLOCK_N)
    column = tl.arange(0, DVP // UNIT)

    for base in range(first, stop, BLOCK_N):
        token = base + token_at
        here = (token >= begin) & (token < stop)
        if HAS_EXACT:
            here = here & (tl.load(ExactSlots + exact_of_table + token // PAGE, mask=here, other=-1) < 0)
        if PAGE >= BLOCK_N:
            page = tl.load(PageTable + cell_of_table + base // PAGE).to(tl.int64)
            cell = (page * PAGE + base % PAGE + token_at) * KV + kv_head
            page_norm = tl.load(VNorm + page * KV + kv_head)
        else:
            pages = tl.load(PageTable + cell_of_table + token // PAGE, mask=here, other=0).to(tl.int64)
            cell = (pages * PAGE + token % PAGE) * KV + kv_head
            page_norm = tl.load(VNorm + pages * KV + kv_head, mask=here, other=0.0)
        norm = tl.maximum(norm, tl.where(here, page_norm, 0.0))
        ok = attended(token, here, position, window_left, ROWWISE, CAUSAL, WINDOW)

        y, c, fixed, dot, square, tilt, step, lost = _group(
            0, digits, high, middle, Digits, Half, Fixed, Dot, Unit, Sketch, RadiusSquare, RadiusBias, KCodes, KScale,
            SketchCodes, row, row_ok, cell, here, token, base, seed, layer, kv_head, STACK, PERIOD, D, GROUPS, R,
            RADIUS, WP, BLOCK_M, BLOCK_N, DIGITS,
        )  # fmt: skip
        largest = tl.maximum(largest, step)
        for group in tl.range(1, GROUPS, loop_unroll_factor=UNROLL):
            y_more, c_more, fixed_more, dot_more, square_more, tilt_more, _unused, lost_more = _group(
                group, digits, high, middle, Digits, Half, Fixed, Dot, Unit, Sketch, RadiusSquare, RadiusBias, KCodes,
                KScale, SketchCodes, row, row_ok, cell, here, token, base, seed, layer, kv_head, STACK, PERIOD, D,
                GROUPS, R, RADIUS, WP, BLOCK_M, BLOCK_N, DIGITS,
            )  # fmt: skip
            y += y_more
            c += c_more
            fixed += fixed_more
            dot += dot_more
            square += square_more
            tilt += tilt_more
            lost = lost | lost_more
        if BANDS > 0:
            witness = _witness_bound(
                Witness, WitnessCodes, BandShare, KScale, row, row_ok, cell, here, step, GROUPS, BANDS, BLOCK_M, BLOCK_N
            )
            c = tl.minimum(c, witness)
        if RADIUS:
            level = tl.log(tl.maximum(length, 1).to(tl.float32)) + log_term
            c = tl.minimum(c, tl.sqrt_rn(square * level) + tilt)
        c += fixed
        if KEPT > 0:
            size = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for i in tl.static_range(KEPT):
                channel = tl.load(Bypass + cell * KEPT + i, mask=here, other=0.0).to(tl.float32)
                product = tl.load(Kept + row * KEPT + i, mask=row_ok, other=0.0)[:, None] * channel[None, :]
                y += product
                size += tl.abs(product)
            size *= (KEPT + 12) * U
            c += size
            dot += size
        z_tile = z_shift
        if SHIFT:
            y += shift[:, None]
        if BIAS:
            bias, ok = biased(Bias, bias_tokens, row, token, ok, here, row_ok)
            y += bias
            z_tile += tl.max(tl.abs(bias), 1) * ADD_ERROR
        z_row = tl.maximum(z_row, z_tile)
        if CAP:
            y = softcap(y, cap)
        flagged = lost[None, :]
        if KEPT > 0 or SHIFT or BIAS:
            infinite = ~(tl.abs(y) < float("inf")) | ~(c < float("inf"))
            y = tl.where(infinite, 0.0, y)
            c = tl.where(infinite, 0.0, c)
            flagged = flagged | infinite
        if TOKENWISE:
            z_max = tl.maximum(z_max, tl.max(tl.where(ok, dot, 0.0), 1))
        count += tl.sum(ok.to(tl.int32), 1) if ROWWISE or BIAS else here.to(tl.int32)

        at = cell[:, None] * (DV // UNIT) + column[None, :]
        if DVP == DV:
            codes = tl.load(VCodes + at)
        else:
            codes = tl.load(VCodes + at, mask=(column < DV // UNIT)[None, :], other=0)
        steps, rho_token = _value_steps(VScale, cell, here, column, DV, GROUPS_V, HALF_RHO)
        if not CERTIFICATE:
            rho_token = tl.zeros((1, BLOCK_N), tl.float32)
        p, factor, m, l, a1, a2, c_max, rho, m_wide, l_wide = fold(  # noqa: E741
            y, c, flagged, rho_token, ok, m, l, a1, a2, c_max, rho, m_wide, l_wide, not CERTIFICATE,
            not (ROWWISE or BIAS), INTERPRET,
        )  # fmt: skip
        part, odd_part = _value_product(
            p,
            codes,
            steps,
            page_norm if PAGE >= BLOCK_N else tl.max(page_norm, 0),
            Q.dtype.element_ty == tl.float32,
            PAIRED,
            GROUPS_V,
            INTERPRET,
        )
        acc = acc * factor[:, None] + part
        odd = odd * factor[:, None] + odd_part

    if not CERTIFICATE:
        c_max = tl.full((BLOCK_M,), float("inf"), tl.float32)
    if not TOKENWISE:
        z_max = tl.load(Dot + row, mask=row_ok, other=0.0) * tl.max(largest, 0)
    if not (ROWWISE or BIAS):
        count = tl.sum(count, 0)
    if PAIRED:
        acc = tl.reshape(tl.join(acc, odd), (BLOCK_M, DVP))
    store_row(
        Acc, Stats, split, slots, total, row, row_ok, acc, m, l, a1, a2, c_max, rho, m_wide, l_wide, z_max, z_row, norm,
        count, DV, DVP,
    )  # fmt: skip


def packed_room(
    read: Read,
    workspace: Workspace,
    *,
    r: int,
    bands: int,
    groups: int,
    kept: int,
    digits: int,
    with_radius: bool,
) -> tuple[PackedDigits, Tensor, Tensor]:
    """All temporaries of a packed decode: the query's coefficients, and what the splits leave."""
    rows, heads, d = read.q.shape
    query = PackedDigits.take(
        workspace, rows, heads, d, r=r, bands=bands, groups=groups, kept=kept, digits=digits, with_radius=with_radius
    )
    return query, *read.scratch(FIELDS, workspace)


def decode_packed(
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
    scalars: dict[str, int],
    causal: bool,
    sm_scale: float,
    cap: float,
    window_left: int,
    delta_local: float,
    splits: int,
    workspace: Tensor | None = None,
    digits: int = DIGITS,
    telemetry: Tensor | None = None,
    certificate: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`witcert_kernels.certified_decode`.

    Returns out, lse, meter, eform, risk, value_error, compressed and shares.

    Grids and scratch follow from shapes alone, so the host never waits and a CUDA graph can hold the call. No page's
    share is computed: shares are empty.

    Args:
        tensors, scalars: as for :class:`witcert_kernels.reader.PackedReader`.
        splits: below 1 for as many as fill the device.
        workspace: uint8, room for all temporaries; None to allocate them.
        digits: base-256 digits of a query channel, 2 or 3.
        telemetry: buffer of a :class:`witcert_kernels.Telemetry` that counts the cells.
        certificate: False to leave out what the certificate costs, for benchmarks: every meter is then 1.

    Raises:
        ValueError: a CPU tensor without ``TRITON_INTERPRET=1``, or a workspace that is too small.
    """
    check_device(q)
    t = tensors
    _, page_size, kv_heads, d = t["k_codes"].shape
    groups, groups_v, d_v = t["k_scale"].shape[-1], t["v_scale"].shape[-1], exact_v.shape[-1]
    bands, r, kept = (t[name].shape[-1] for name in ("witness", "sketch", "bypass"))
    read = Read(
        q.contiguous(), page_table, seq_lens, qo_indptr, k_new, v_new, exact_pages, exact_k, exact_v, sinks, bias,
        causal, sm_scale, cap, window_left, splits, page_size, kv_heads, groups=groups,
        resident=resident_programs(q.dtype, groups, kept, bool(scalars["dither"])),
    )  # fmt: skip
    query, acc, stats = packed_room(
        read, Workspace(q.device, workspace), r=r, bands=bands, groups=groups, kept=kept, digits=digits,
        with_radius=delta_local > 0,
    )  # fmt: skip
    packed_digits(query, read.q, t["mu"], t["f"], t["u"], t["bypass_channels"], t["band_of_channel"], sm_scale)
    # centred and uncentred logits meet: the shift common to a row's centred ones must be in them
    mixed = read.has_exact or sinks is not None or cap != 0
    if read.programs:
        given = read.given
        # with more rows the compiler gives two products that share an operand to few warps
        paired = groups_v == 1 and q.dtype != torch.float32 and read.block_m < 16
        v_codes = t["v_codes"].view(torch.int16) if paired else t["v_codes"]
        _packed_kernel[read.grid](
            read.q, given(qo_indptr), given(page_table), given(seq_lens), given(exact_pages), given(bias),
            query.digits, query.unit, query.sketch, query.half, query.fixed, query.dot, query.witness,
            query.radius_square, query.radius_bias, query.kept, query.shift, query.shift_error, query.band_share,
            t["k_codes"], t["k_scale"], t["sketch"], t["witness"], t["bypass"], v_codes, t["v_scale"], t["v_norm"],
            acc, stats, *read.scalars(len(acc)), _log_term(delta_local), scalars["seed"], as_int32(scalars["layer"]),
            **read.constants(), GROUPS=groups, GROUPS_V=groups_v, R=r, BANDS=bands, KEPT=kept,
            PERIOD=scalars["dither_period"] if scalars["dither"] else 0, RADIUS=delta_local > 0, SHIFT=mixed,
            DIGITS=digits, WP=padded(d // groups, 32),
            HALF_RHO=math.sqrt(d_v if groups_v == 1 else 1) / 2 * rounding.STEP_WIDEN * (1 + (d_v + 16) * rounding.U),
            PAIRED=paired, CERTIFICATE=certificate, maxnreg=read.registers, num_stages=3,
        )  # fmt: skip
        if read.has_exact:
            read_exact(read, query.bad, acc, stats)
    outputs = merge(
        acc, stats, None if mixed else query.shift, query.bad, sinks, read.q, tokens=read.tokens, tile=read.block_n,
        cap=cap, weight_error=weight_error(q.dtype, read.has_exact, groups_v), telemetry=telemetry,
        layer=scalars["layer"],
    )  # fmt: skip
    return (*outputs, q.new_empty(len(page_table), kv_heads, 0, dtype=torch.float32))


def _log_term(delta_local: float) -> float:
    """``log(2 / δ)`` rounded up, with room for the kernel's own logarithm; 0 when no radius is on offer."""
    return math.log(2 / delta_local) * (1 + 2.0**-20) + 2.0**-18 if delta_local > 0 else 0.0
