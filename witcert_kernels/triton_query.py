"""What the Triton read needs of a query: :mod:`witcert_kernels.query` as a kernel, with the query in int8 digits.

Logits are kept in base 2 here and in the read, so that e^x is one exp2 and a running maximum can be an integer.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rounding
from .philox import GRID_STEP
from .triton_common import INTERPRETED, Workspace, padded, round_even_wide

ROWS = 32 if INTERPRETED else 4
LOG2E = math.log2(math.e)


@triton.jit(do_not_specialize=["rows"])
def _query_kernel(
    Q,
    Mu,
    F,
    Directions,
    BypassChannels,
    BandOfChannel,
    Digits,
    Unit,
    Sketch,
    Half,
    Fixed,
    Dot,
    Witness,
    RadiusSquare,
    RadiusBias,
    Kept,
    Shift,
    ShiftError,
    Bad,
    BandShare,
    rows,
    scale_high,
    scale_low,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    R: tl.constexpr,
    BANDS: tl.constexpr,
    KEPT: tl.constexpr,
    RADIUS: tl.constexpr,
    DIGITS: tl.constexpr,
    LIMIT: tl.constexpr,
    TERMS: tl.constexpr,
    SHIFT_TERMS: tl.constexpr,
    WIDEN: tl.constexpr,
    DELTA_WIDEN: tl.constexpr,
    UP: tl.constexpr,
    GRID: tl.constexpr,
    BLOCK: tl.constexpr,
    GP: tl.constexpr,
    WP: tl.constexpr,
    KP: tl.constexpr,
):
    """BLOCK rows of a kv head, channels as ``[BLOCK, GP, WP]``, in float64; see ``PackedDigits``."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kv_head = tl.program_id(1)
    per_head: tl.constexpr = HEADS // KV
    here = flat < rows * per_head
    row = (flat // per_head).to(tl.int64) * HEADS + kv_head * per_head + flat % per_head
    scale = tl.cast(scale_high, tl.float64) + tl.cast(scale_low, tl.float64)

    group = tl.arange(0, GP)[None, :, None]
    within = tl.arange(0, WP)[None, None, :]
    channel = group * (D // GROUPS) + within
    inside = (group < GROUPS) & (within < D // GROUPS)
    mask = here[:, None, None] & inside
    kept = channel < 0
    for j in tl.static_range(KEPT):
        kept = kept | (channel == tl.load(BypassChannels + kv_head * KEPT + j).to(tl.int32))

    raw = tl.load(Q + row[:, None, None] * D + channel, mask=mask, other=0.0).to(tl.float32)
    bad = tl.max(tl.max((~(tl.abs(raw) < float("inf"))).to(tl.int32), 2), 1) > 0
    q = tl.where(bad[:, None, None], 0.0, raw).to(tl.float64)
    f = tl.load(F + kv_head * D + channel, mask=inside, other=0.0).to(tl.float64)
    mu = tl.load(Mu + kv_head * D + channel, mask=inside, other=0.0).to(tl.float64)
    z = tl.where(kept, 0.0, q * f)
    bad = bad | ~(tl.sum(tl.sum(tl.abs(z), 2), 1) * scale < 1e28)
    z = tl.where(bad[:, None, None], 0.0, z)
    tl.store(Bad + row, bad.to(tl.int8), mask=here)
    tl.store(Shift + row, tl.where(bad, 0.0, scale * tl.sum(tl.sum(q * mu, 2), 1)), mask=here)
    cancelled = scale * tl.sum(tl.sum(tl.abs(q * mu), 2), 1) * SHIFT_TERMS
    tl.store(ShiftError + row, tl.where(bad, 0.0, cancelled * UP).to(tl.float32), mask=here)
    if KEPT > 0:
        j = tl.arange(0, KP)[None, :]
        source = tl.load(BypassChannels + kv_head * KEPT + j, mask=j < KEPT, other=0)
        value = tl.load(Q + row[:, None] * D + source, mask=here[:, None] & (j < KEPT), other=0.0).to(tl.float32)
        value = (tl.where(bad[:, None], 0.0, value).to(tl.float64) * scale).to(tl.float32)
        tl.store(Kept + row[:, None] * KEPT + j, value, mask=here[:, None] & (j < KEPT))

    outside = z
    error = tl.zeros((BLOCK, GP), tl.float64)
    top = tl.max(tl.max(tl.abs(z), 2), 1)
    group_at = tl.arange(0, GP)[None, :]
    store = here[:, None] & (group_at < GROUPS)
    cell = row[:, None] * GROUPS + group_at
    for i in tl.static_range(R):
        u = tl.load(Directions + (kv_head * R + i) * D + channel, mask=inside, other=0.0).to(tl.float64)
        # any coefficient is sound, so the rounded one is the coefficient
        a = tl.sum(tl.sum(z * u, 2), 1).to(tl.float32).to(tl.float64)
        outside -= a[:, None, None] * u
        unit_length = tl.sum(tl.abs(u), 2) / 254.0
        error += tl.abs(a)[:, None] * unit_length
        at = (row[:, None] * R + i) * GROUPS + group_at
        tl.store(Sketch + at, (scale * a[:, None] * unit_length).to(tl.float32), mask=store)
    outside = tl.where(kept, 0.0, tl.abs(outside))

    y = scale * z
    unit = tl.maximum((scale * top / LIMIT).to(tl.float32), 7.888609052210118e-31)
    unit = unit * 1.0000002384185791015625
    wide = unit.to(tl.float64)[:, None, None]
    number = round_even_wide(y / wide)
    lost = tl.sum(tl.abs(y - number * wide), 2)
    tl.store(Unit + row, unit, mask=here)
    number = number.to(tl.int32)
    for i in tl.static_range(DIGITS):
        digit = ((number + 128) & 255) - 128
        number = (number - digit) >> 8
        at = Digits + (row[:, None, None] * DIGITS + i) * D + channel
        tl.store(at, digit.to(tl.int8), mask=mask)

    half = scale * WIDEN / 2 * tl.sum(outside, 2)
    magnitude = 127.5 * tl.sum(tl.abs(y), 2) + 127.0 * scale * error
    dot = magnitude * TERMS + 127.5 * lost
    tl.store(Half + cell, (half * UP).to(tl.float32), mask=store)
    tl.store(Dot + cell, (dot * UP).to(tl.float32), mask=store)
    fixed = dot + scale * DELTA_WIDEN / 2 * error
    tl.store(Fixed + cell, (fixed * UP).to(tl.float32), mask=store)
    if RADIUS:
        square = scale * scale * (WIDEN * WIDEN / 6) * tl.sum(outside * outside, 2)
        tl.store(RadiusSquare + cell, (square * UP).to(tl.float32), mask=store)
        tl.store(RadiusBias + cell, (half * GRID * UP).to(tl.float32), mask=store)
    band = tl.load(BandOfChannel + channel, mask=inside, other=-1)
    for b in tl.static_range(BANDS):
        if GROUPS > 1 and tl.program_id(0) + kv_head == 0:
            share = tl.reshape(tl.sum((band == b).to(tl.float32), 2), (GP,))
            tl.store(BandShare + b * GROUPS + tl.arange(0, GP), share, mask=tl.arange(0, GP) < GROUPS)
        norm = tl.sqrt(tl.sum(tl.sum(tl.where(band == b, outside * outside, 0.0), 2), 1)) * scale / 508.0
        if GROUPS == 1:
            norm *= tl.sqrt(tl.sum(tl.sum((band == b).to(tl.float64), 2), 1))
        tl.store(Witness + row * BANDS + b, (norm * UP).to(tl.float32), mask=here)


def scale_parts(sm_scale: float) -> tuple[float, float]:
    """The logits' scale in base 2 as a float32 number and the rest, since a kernel's float arguments are float32."""
    scale = sm_scale * LOG2E
    high = torch.tensor(scale, dtype=torch.float32).item()
    return high, scale - high


@dataclass(frozen=True)
class PackedDigits:
    """Coefficients of the packed read, a query row and head each, logits in base 2.

    With s a token's step, its logit is ``s (unit Σ_i 256^i digits_i · codes − sketch · sketch codes)``, plus the bypass
    pairs' and the shift. ``half``, ``witness`` and ``radius_*`` bound the error of what the query has outside the
    sketch, ``fixed`` the sketch's own and the rounding, which alone is ``dot``.

    digits int8 ``[rows, heads, digits, d]``, the lowest first; unit float32 ``[rows, heads]``; sketch float32
    ``[…, r, groups]``; half, fixed, dot, radius_square and radius_bias float32 ``[…, groups]``; witness
    float32 ``[…, B]``, with one group times the root of a band's channels; kept float32 ``[…, 2 m]``; shift float64,
    shift_error float32 (what its own sum may be off by) and bad int8 ``[rows, heads]``; band_share float32
    ``[B, groups]``, channels of a band in a group.
    """

    digits: Tensor
    unit: Tensor
    sketch: Tensor
    half: Tensor
    fixed: Tensor
    dot: Tensor
    witness: Tensor
    radius_square: Tensor
    radius_bias: Tensor
    kept: Tensor
    shift: Tensor
    shift_error: Tensor
    bad: Tensor
    band_share: Tensor

    @classmethod
    def take(
        cls,
        workspace: Workspace,
        rows: int,
        heads: int,
        d: int,
        *,
        r: int,
        bands: int,
        groups: int,
        kept: int,
        digits: int,
        with_radius: bool,
    ) -> Self:
        """Room for the coefficients of ``rows`` query rows."""

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return workspace.take(rows, heads, *shape, dtype=dtype)

        return cls(
            digits=new(digits, d, dtype=torch.int8),
            unit=new(),
            sketch=new(r, groups),
            half=new(groups),
            fixed=new(groups),
            dot=new(groups),
            witness=new(bands),
            radius_square=new(groups if with_radius else 0),
            radius_bias=new(groups if with_radius else 0),
            kept=new(kept),
            shift=new(dtype=torch.float64),
            shift_error=new(),
            bad=new(dtype=torch.int8),
            band_share=workspace.take(bands, groups),
        )


def packed_digits(
    out: PackedDigits,
    q: Tensor,
    mu: Tensor,
    f: Tensor,
    u: Tensor,
    bypass_channels: Tensor,
    band_of_channel: Tensor,
    sm_scale: float,
) -> None:
    """Fill ``out`` for queries ``q`` ``[rows, heads, d]`` of any float dtype; calibration as in the pool."""
    n, heads, d = q.shape
    kv_heads, r, kept = mu.shape[0], u.shape[1], bypass_channels.shape[1]
    bands, groups = out.band_share.shape
    digits, with_radius = out.digits.shape[2], out.radius_square.shape[2] > 0
    grid = (triton.cdiv(n * (heads // kv_heads), ROWS), kv_heads)
    if n == 0:
        return
    _query_kernel[grid](
        q, mu, f, u, bypass_channels, band_of_channel, out.digits, out.unit, out.sketch, out.half,
        out.fixed, out.dot, out.witness, out.radius_square, out.radius_bias, out.kept, out.shift,
        out.shift_error, out.bad, out.band_share, n,
        *scale_parts(sm_scale), HEADS=heads, KV=kv_heads, D=d, GROUPS=groups, R=r, BANDS=bands, KEPT=kept,
        RADIUS=with_radius, DIGITS=digits, LIMIT=float(rounding.DIGIT_LIMIT[digits]),
        TERMS=(rounding.DIGIT_TERMS + 2 * r + groups + d / 128) * rounding.U, SHIFT_TERMS=(d + 4) * rounding.U64,
        WIDEN=rounding.STEP_WIDEN, DELTA_WIDEN=rounding.DELTA_WIDEN,
        UP=rounding.FLOAT_UP * (1 + (groups + bands + 8) * rounding.U), GRID=GRID_STEP, BLOCK=ROWS,
        GP=padded(groups, 1), WP=padded(d // groups, 1), KP=padded(kept, 1), num_warps=4,
    )  # fmt: skip
