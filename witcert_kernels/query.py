"""What the read needs of a query, in float64, before it sees a token.

With z = q∘f, a = z·u and w = z − Σ a u, every per-token quantity of the packed store is linear in the token's steps, so
the read path only multiplies a coefficient by a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import rounding
from .philox import GRID_STEP


@dataclass(frozen=True)
class PackedQuery:
    """Coefficients of the packed read, each ``[kv_heads, rows, …]`` with rows = query rows times query heads a kv head.

    z float32 ``[…, d]`` (times sm_scale, 0 on bypass channels); a_unit float32 ``[…, r, groups]`` (times sm_scale: what
    a sketch code of 1 takes off the logit, per unit step); half, sketch_error, dot_error float32 ``[…, groups]``: upper
    bounds per unit step; witness ``[…, B]`` per byte; radius_square, radius_bias ``[…, groups]``; bypass float64
    ``[…, 2 m]``; shift, shift_error float64 ``[…]``: sm_scale·q·μ and what its own sum may be off by; bad bool ``[…]``.
    """

    z: Tensor
    a_unit: Tensor
    half: Tensor
    sketch_error: Tensor
    dot_error: Tensor
    witness: Tensor
    radius_square: Tensor
    radius_bias: Tensor
    bypass: Tensor
    shift: Tensor
    shift_error: Tensor
    bad: Tensor


def group_rows(q: Tensor, kv_heads: int) -> Tensor:
    """``[n, heads, d] -> [kv_heads, n * G, d]``, row ``i * G + g`` being query row i, head ``kv_head * G + g``."""
    n, heads, d = q.shape
    per_head = heads // kv_heads
    return q.view(n, kv_heads, per_head, d).transpose(0, 1).reshape(kv_heads, n * per_head, d)


def finite_rows(q: Tensor) -> tuple[Tensor, Tensor]:
    """The queries in float64 with rows that are not finite set to 0, and which rows those are."""
    bad = ~q.isfinite().all(-1)
    return q.to(torch.float64).masked_fill(bad[..., None], 0.0), bad


def up(x: Tensor) -> Tensor:
    """float64, not negative, to a float32 upper bound that also covers the products it enters."""
    return (x * rounding.FLOAT_UP).to(torch.float32)


def packed_query(
    q: Tensor,
    mu: Tensor,
    f: Tensor,
    u: Tensor,
    bypass_channels: Tensor,
    band_of_channel: Tensor,
    bands: int,
    groups: int,
    sm_scale: float,
) -> PackedQuery:
    """Coefficients for queries ``q`` ``[kv_heads, rows, d]`` of any float dtype; calibration as in the pool."""
    q64, bad = finite_rows(q)
    d, r = q.shape[-1], u.shape[1]
    channels = bypass_channels[:, None, :].expand(-1, q.shape[1], -1)
    mu64, f64, u64 = mu.to(torch.float64), f.to(torch.float64), u.to(torch.float64)
    z = (q64 * f64[:, None, :]).scatter(-1, channels, 0.0)
    # any coefficient is sound, so the rounded one is the coefficient
    a = (z @ u64.transpose(1, 2)).to(torch.float32).to(torch.float64)
    w = (z - a @ u64).scatter(-1, channels, 0.0).abs()
    unit = u64.abs().unflatten(-1, (groups, -1)).sum(-1) / 254  # [kv_heads, r, groups]
    a_abs = a.abs() @ unit
    zs = (sm_scale * z).to(torch.float32)
    magnitude = rounding.CODE_MAX * (sm_scale * z).abs().unflatten(-1, (groups, -1)).sum(-1) + 127 * sm_scale * a_abs
    terms = d + r + groups + rounding.DOT_EXTRA
    widened = sm_scale * rounding.STEP_WIDEN * (1 + (groups + 8) * rounding.U)
    grouped = w.unflatten(-1, (groups, -1))
    half = widened / 2 * grouped.sum(-1)
    coefficient = PackedQuery(
        z=zs,
        a_unit=(sm_scale * a[..., None] * unit[:, None]).to(torch.float32),
        half=up(half),
        sketch_error=up(sm_scale * rounding.DELTA_WIDEN / 2 * a_abs),
        dot_error=up(magnitude * terms * rounding.U * (1 + 2.0**-10)),
        witness=up(_band_norms(w, band_of_channel, bands) * (sm_scale / 508 * (1 + (bands + 8) * rounding.U))),
        radius_square=up((sm_scale * rounding.STEP_WIDEN) ** 2 / 6 * grouped.square().sum(-1)),
        radius_bias=up(half * GRID_STEP),
        bypass=sm_scale * q64.gather(-1, channels),
        shift=sm_scale * (q64 * mu64[:, None, :]).sum(-1),
        shift_error=sm_scale * (q64 * mu64[:, None, :]).abs().sum(-1) * ((d + 4) * rounding.U64),
        bad=bad | ~zs.isfinite().all(-1) | ~(magnitude < 1e30).all(-1),
    )
    return coefficient


def _band_norms(w: Tensor, band_of_channel: Tensor, bands: int) -> Tensor:
    if bands == 0:
        return w[..., :0]
    band = torch.nn.functional.one_hot(band_of_channel, bands).to(torch.float64)
    return (w.square() @ band).sqrt()


@dataclass(frozen=True)
class ObservatoryQuery:
    """Coefficients of the observatory's read, float64 ``[kv_heads, rows, …]``, all times sm_scale.

    q ``[…, d]``; witness ``[…, B]`` of q∘f, outside ``[…, B]`` of what q∘f has outside the directions; a ``[…, r]``;
    a_error ``[…]`` times a token's sketch unit bounds the sketch's own error.
    """

    q: Tensor
    witness: Tensor
    outside: Tensor
    a: Tensor
    a_error: Tensor
    bad: Tensor


def observatory_query(
    q: Tensor, f: Tensor, u: Tensor, band_of_channel: Tensor, bands: int, sm_scale: float
) -> ObservatoryQuery:
    """Coefficients for queries ``q`` ``[kv_heads, rows, d]``."""
    q64, bad = finite_rows(q)
    u64 = u.to(torch.float64)
    z = q64 * f.to(torch.float64)[:, None, :]
    a = z @ u64.transpose(1, 2)
    w = z - a @ u64
    scale = sm_scale * (1 + 2.0**-40)
    return ObservatoryQuery(
        q=sm_scale * q64,
        witness=scale * _band_norms(z, band_of_channel, bands),
        outside=scale * _band_norms(w, band_of_channel, bands),
        a=sm_scale * a,
        a_error=scale * rounding.DELTA_WIDEN / 2 * a.abs().sum(-1),
        bad=bad,
    )
