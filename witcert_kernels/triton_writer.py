"""The writers in Triton: the bytes of :mod:`witcert_kernels.writer`, some tokens of a kv head a program."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from . import rounding
from .triton_common import INTERPRETED, as_int32, check_device, dither_of, padded, round_even, round_even_wide

TOKENS = 32 if INTERPRETED else 4


@triton.jit
def _scale_up(amax, LEVELS: tl.constexpr):
    """As :func:`witcert_kernels.writer.scale_up`; amax float32."""
    wide = amax.to(tl.float64)
    scale = tl.maximum((wide / LEVELS).to(tl.float32), 0.000000059604644775390625).to(tl.float16)
    for _ in tl.static_range(2):
        low = scale.to(tl.float64) * LEVELS < wide
        scale = (scale.to(tl.int16, bitcast=True) + low.to(tl.int16)).to(tl.float16, bitcast=True)
    return scale


@triton.jit
def _any_not_finite(x):
    """Tokens ``[tokens]`` with a NaN or an infinity, of ``[tokens, groups, width]``."""
    return tl.max(tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), 2), 1) > 0


@triton.jit(do_not_specialize=["count", "seed", "layer"])
def _write_kernel(
    K,
    V,
    Slots,
    Positions,
    KCodes,
    KScale,
    Sketch,
    Witness,
    Bypass,
    VCodes,
    VScale,
    VNorm,
    Mu,
    F,
    Directions,
    BypassChannels,
    BandOfChannel,
    count,
    seed,
    layer,
    PERIOD: tl.constexpr,
    KV: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_V: tl.constexpr,
    R: tl.constexpr,
    BANDS: tl.constexpr,
    KEPT: tl.constexpr,
    DITHER: tl.constexpr,
    TOKENS: tl.constexpr,
    GP: tl.constexpr,
    WP: tl.constexpr,
    GVP: tl.constexpr,
    WVP: tl.constexpr,
    WIDEN_HALF: tl.constexpr,
    FLOAT_UP: tl.constexpr,
):
    """TOKENS tokens of a kv head, channels as ``[TOKENS, groups, width]``; see :mod:`witcert_kernels.writer`."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    kv_head = tl.program_id(1)
    here = token < count
    slot = tl.load(Slots + token, mask=here, other=0)
    cell = slot * KV + kv_head
    at = (token * KV + kv_head)[:, None, None]

    group = tl.arange(0, GP)[None, :, None]
    within = tl.arange(0, WP)[None, None, :]
    channel = group * (D // GROUPS) + within
    inside = (group < GROUPS) & (within < D // GROUPS)
    mask = here[:, None, None] & inside
    kept = channel < 0
    for j in tl.static_range(KEPT):
        kept = kept | (channel == tl.load(BypassChannels + kv_head * KEPT + j).to(tl.int32))

    raw = tl.load(K + at * D + channel, mask=mask, other=0.0).to(tl.float32)
    dead = _any_not_finite(raw)
    mu = tl.load(Mu + kv_head * D + channel, mask=inside, other=0.0)
    f = tl.load(F + kv_head * D + channel, mask=inside, other=1.0)
    x = tl.where(dead[:, None, None], 0.0, raw) - mu
    x = tl.where(kept, 0.0, tl.div_rn(x, tl.broadcast_to(f, (TOKENS, GP, WP))))
    dead = dead | _any_not_finite(x)
    scale = _scale_up(tl.max(tl.abs(tl.where(dead[:, None, None], 0.0, x)), 2), 126.5 if DITHER else 127.0)
    dead = dead | (tl.max((scale.to(tl.float32) == float("inf")).to(tl.int32), 1) > 0)
    step = tl.where(dead[:, None], 1.0, scale.to(tl.float32))
    x = tl.where(dead[:, None, None], 0.0, x)
    ratio = tl.div_rn(x, tl.broadcast_to(step[:, :, None], (TOKENS, GP, WP)))
    if DITHER:
        period = (tl.load(Positions + token, mask=here, other=0) // PERIOD).to(tl.int32)
        xi = dither_of(seed, layer, kv_head, period[:, None, None], channel)
        ratio = ratio + xi
    codes = tl.where(dead[:, None, None] | kept, 0.0, round_even(ratio))

    tl.store(KCodes + cell[:, None, None] * D + channel, codes.to(tl.int8), mask=mask)
    group_at = tl.arange(0, GP)[None, :]
    stored = tl.where(dead[:, None], float("inf"), scale.to(tl.float32)).to(tl.float16)
    tl.store(KScale + cell[:, None] * GROUPS + group_at, stored, mask=here[:, None] & (group_at < GROUPS))
    for j in tl.static_range(KEPT):
        source = tl.load(BypassChannels + kv_head * KEPT + j)
        value = tl.load(K + (token * KV + kv_head) * D + source, mask=here, other=0.0)
        tl.store(Bypass + cell * KEPT + j, tl.where(dead, 0.0, value.to(tl.float32)).to(value.dtype), mask=here)

    if R + BANDS > 0:
        wide = tl.where(inside, tl.broadcast_to(step[:, :, None], (TOKENS, GP, WP)), 0.0).to(tl.float64)
        residual = (codes - xi if DITHER else codes).to(tl.float64) * wide - x.to(tl.float64)
        residual = tl.where(dead[:, None, None] | kept | (inside == 0), 0.0, residual)
        for i in tl.static_range(R):
            u = tl.load(Directions + (kv_head * R + i) * D + channel, mask=inside, other=0.0).to(tl.float64)
            coordinate = tl.sum(tl.sum(residual * u, 2), 1)
            unit = tl.sum(tl.sum(wide * tl.abs(u), 2), 1) / 254.0
            code = round_even_wide(tl.where(unit > 0, coordinate / tl.where(unit > 0, unit, 1.0), 0.0))
            tl.store(Sketch + cell * R + i, code.to(tl.int8), mask=here)
        band = tl.load(BandOfChannel + channel, mask=inside, other=-1)
        for b in tl.static_range(BANDS):
            unit = tl.sqrt(tl.sum(tl.sum(tl.where(band == b, wide * wide, 0.0), 2), 1)) / 508.0
            norm = tl.sqrt(tl.sum(tl.sum(tl.where(band == b, residual * residual, 0.0), 2), 1))
            tl.store(Witness + cell * BANDS + b, tl.ceil(norm / unit + 0.015625).to(tl.uint8), mask=here)

    group_v = tl.arange(0, GVP)[None, :, None]
    within_v = tl.arange(0, WVP)[None, None, :]
    channel_v = group_v * (DV // GROUPS_V) + within_v
    inside_v = (group_v < GROUPS_V) & (within_v < DV // GROUPS_V)
    mask_v = here[:, None, None] & inside_v
    value = tl.load(V + at * DV + channel_v, mask=mask_v, other=0.0).to(tl.float32)
    dead_v = _any_not_finite(value)
    scale_v = _scale_up(tl.max(tl.abs(tl.where(dead_v[:, None, None], 0.0, value)), 2), 127.0)
    dead_v = dead_v | (tl.max((scale_v.to(tl.float32) == float("inf")).to(tl.int32), 1) > 0)
    value = tl.where(dead_v[:, None, None], 0.0, value)
    step_v = tl.broadcast_to(tl.where(dead_v[:, None], 1.0, scale_v.to(tl.float32))[:, :, None], (TOKENS, GVP, WVP))
    codes_v = round_even(tl.div_rn(value, step_v))
    tl.store(VCodes + cell[:, None, None] * DV + channel_v, codes_v.to(tl.int8), mask=mask_v)
    group_at_v = tl.arange(0, GVP)[None, :]
    stored_v = tl.where(dead_v[:, None], float("inf"), scale_v.to(tl.float32)).to(tl.float16)
    tl.store(VScale + cell[:, None] * GROUPS_V + group_at_v, stored_v, mask=here[:, None] & (group_at_v < GROUPS_V))
    wide_v = tl.where(inside_v, step_v, 0.0).to(tl.float64)
    read_v = codes_v.to(tl.float64) * wide_v
    half_v = tl.sqrt(tl.sum(tl.sum(wide_v * wide_v, 2), 1)) * WIDEN_HALF
    norm_v = (tl.sqrt(tl.sum(tl.sum(read_v * read_v, 2), 1)) + half_v) * FLOAT_UP
    tl.atomic_max(VNorm + slot // PAGE * KV + kv_head, tl.where(dead_v, 0.0, norm_v).to(tl.float32), mask=here)


def write_packed(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    sketch: Tensor,
    witness: Tensor,
    bypass: Tensor,
    v_codes: Tensor,
    v_scale: Tensor,
    v_norm: Tensor,
    mu: Tensor,
    f: Tensor,
    u: Tensor,
    bypass_channels: Tensor,
    band_of_channel: Tensor,
    dither_on: bool,
    dither_period: int,
    seed: int,
    layer: int,
) -> None:
    """As :func:`witcert_kernels.writer.write_packed`, with the same bytes.

    Raises:
        ValueError: a CPU tensor without ``TRITON_INTERPRET=1``.
    """
    check_device(k)
    n, kv_heads, d = k.shape
    d_v, groups, groups_v = v.shape[-1], k_scale.shape[-1], v_scale.shape[-1]
    if n == 0:
        return
    # a warp a token, and enough tokens a program to fill one
    tokens = TOKENS if max(d, d_v) <= 256 or INTERPRETED else 1
    _write_kernel[(triton.cdiv(n, tokens), kv_heads)](
        k.contiguous(), v.contiguous(), slots.contiguous(), positions.contiguous(), k_codes, k_scale, sketch, witness,
        bypass, v_codes, v_scale, v_norm, mu, f, u, bypass_channels, band_of_channel, n, seed,
        as_int32(layer), PERIOD=dither_period, KV=kv_heads, PAGE=k_codes.shape[1], D=d, DV=d_v, GROUPS=groups,
        GROUPS_V=groups_v, R=sketch.shape[-1], BANDS=witness.shape[-1], KEPT=bypass.shape[-1], DITHER=dither_on,
        TOKENS=tokens, GP=padded(groups, 1), WP=padded(d // groups, 1), GVP=padded(groups_v, 1),
        WVP=padded(d_v // groups_v, 1), WIDEN_HALF=rounding.STEP_WIDEN / 2, FLOAT_UP=rounding.FLOAT_UP, num_warps=4,
    )  # fmt: skip


@triton.jit
def _half_up(x):
    """As :func:`witcert_kernels.writer.half_up`; x float64."""
    half = x.to(tl.float32).to(tl.float16)
    for _ in tl.static_range(2):
        low = half.to(tl.float64) < x
        half = (half.to(tl.int16, bitcast=True) + low.to(tl.int16)).to(tl.float16, bitcast=True)
    return half


@triton.jit
def _nearest(x, TYPE: tl.constexpr):
    """float32 to the nearest number of a 16-bit type, ties to even, in float32: the interpreter truncates bfloat16."""
    if TYPE.is_bf16():
        bits = x.to(tl.int32, bitcast=True)
        bits = ((bits + 32767 + ((bits >> 16) & 1)) >> 16) << 16
        near = tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)
    else:
        near = x.to(TYPE).to(tl.float32)
    return near


@triton.jit
def _reconstruction(X, New, at, mask, TYPE: tl.constexpr):
    """A reconstruction as it is stored, in float32, the exact numbers, and the tokens ``[tokens]`` that are not finite
    and count as zeros; all of ``[tokens, channels]``.
    """
    exact = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    stored = _nearest(tl.load(New + at, mask=mask, other=0.0).to(tl.float32), TYPE)
    finite = (tl.abs(exact) < float("inf")) & (tl.abs(stored) < float("inf"))
    dead = tl.max((finite == 0).to(tl.int32), 1) > 0
    return tl.where(dead[:, None], 0.0, stored), tl.where(dead[:, None], 0.0, exact), dead


@triton.jit(do_not_specialize=["count"])
def _observe_kernel(
    K,
    V,
    KNew,
    VNew,
    Slots,
    KHat,
    Witness,
    Sketch,
    SketchScale,
    VHat,
    VError,
    VNorm,
    F,
    Directions,
    BandOfChannel,
    count,
    KV: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,
    BANDS: tl.constexpr,
    TOKENS: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    WIDE_UP: tl.constexpr,
    FLOAT_UP: tl.constexpr,
):
    """TOKENS tokens of a kv head; see :func:`witcert_kernels.writer.write_observatory`."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    kv_head = tl.program_id(1)
    here = token < count
    slot = tl.load(Slots + token, mask=here, other=0)
    cell, row = slot * KV + kv_head, token * KV + kv_head

    channel = tl.arange(0, DP)
    inside = channel < D
    mask = here[:, None] & inside[None, :]
    stored, exact, dead = _reconstruction(K, KNew, row[:, None] * D + channel[None, :], mask, KHat.dtype.element_ty)
    tl.store(KHat + cell[:, None] * D + channel[None, :], stored.to(KHat.dtype.element_ty), mask=mask)
    f = tl.load(F + kv_head * D + channel, mask=inside, other=1.0).to(tl.float64)
    residual = (stored.to(tl.float64) - exact.to(tl.float64)) / tl.broadcast_to(f[None, :], (TOKENS, DP))
    band = tl.load(BandOfChannel + channel, mask=inside, other=-1)[None, :]
    for b in tl.static_range(BANDS):
        norm = _half_up(tl.sqrt(tl.sum(tl.where(band == b, residual * residual, 0.0), 1)) * WIDE_UP)
        norm = tl.where(dead, float("inf"), norm.to(tl.float32)).to(tl.float16)
        tl.store(Witness + cell * BANDS + b, norm, mask=here)
    if R > 0:
        largest = tl.zeros((TOKENS,), tl.float64)
        for i in tl.static_range(R):
            u = tl.load(Directions + (kv_head * R + i) * D + channel, mask=inside, other=0.0).to(tl.float64)
            largest = tl.maximum(largest, tl.abs(tl.sum(residual * u[None, :], 1)))
        unit = tl.maximum(_half_up(largest / 127.0).to(tl.float32), 0.000000059604644775390625)
        lost = dead | (unit == float("inf"))
        tl.store(SketchScale + cell, tl.where(lost, float("inf"), unit).to(tl.float16), mask=here)
        step = tl.where(lost, 1.0, unit).to(tl.float64)
        for i in tl.static_range(R):
            u = tl.load(Directions + (kv_head * R + i) * D + channel, mask=inside, other=0.0).to(tl.float64)
            code = round_even_wide(tl.where(lost, 0.0, tl.sum(residual * u[None, :], 1) / step))
            tl.store(Sketch + cell * R + i, code.to(tl.int8), mask=here)

    column = tl.arange(0, DVP)
    mask_v = here[:, None] & (column < DV)[None, :]
    stored_v, exact_v, dead_v = _reconstruction(
        V, VNew, row[:, None] * DV + column[None, :], mask_v, VHat.dtype.element_ty
    )
    tl.store(VHat + cell[:, None] * DV + column[None, :], stored_v.to(VHat.dtype.element_ty), mask=mask_v)
    read = stored_v.to(tl.float64)
    difference = read - exact_v.to(tl.float64)
    error = _half_up(tl.sqrt(tl.sum(difference * difference, 1)) * WIDE_UP)
    tl.store(VError + cell, tl.where(dead_v, float("inf"), error.to(tl.float32)).to(tl.float16), mask=here)
    norm_v = (tl.sqrt(tl.sum(read * read, 1)) + error.to(tl.float64)) * FLOAT_UP
    tl.atomic_max(VNorm + slot // PAGE * KV + kv_head, tl.where(dead_v, 0.0, norm_v).to(tl.float32), mask=here)


def write_observatory(
    k: Tensor,
    v: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    slots: Tensor,
    k_hat: Tensor,
    witness: Tensor,
    sketch: Tensor,
    sketch_scale: Tensor,
    v_hat: Tensor,
    v_error: Tensor,
    v_norm: Tensor,
    f: Tensor,
    u: Tensor,
    band_of_channel: Tensor,
) -> None:
    """As :func:`witcert_kernels.writer.write_observatory`; norms may differ by a unit in fp16's last place, upwards or
    downwards, as sums in float64 are ordered otherwise.

    Raises:
        ValueError: a CPU tensor without ``TRITON_INTERPRET=1``.
    """
    check_device(k)
    n, kv_heads, d = k.shape
    d_v = v.shape[-1]
    if n == 0:
        return
    tokens = TOKENS if max(d, d_v) <= 256 or INTERPRETED else 1
    _observe_kernel[(triton.cdiv(n, tokens), kv_heads)](
        k.contiguous(), v.contiguous(), k_new.contiguous(), v_new.contiguous(), slots.contiguous(), k_hat, witness,
        sketch, sketch_scale, v_hat, v_error, v_norm, f, u, band_of_channel, n, KV=kv_heads, PAGE=k_hat.shape[1], D=d,
        DV=d_v, R=sketch.shape[-1], BANDS=witness.shape[-1], TOKENS=tokens, DP=padded(d, 1), DVP=padded(d_v, 1),
        WIDE_UP=1 + 2.0**-40, FLOAT_UP=rounding.FLOAT_UP, num_warps=4,
    )  # fmt: skip
