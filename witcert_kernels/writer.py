"""The writer, vectorised on tensors: the path for CPU tensors, and what the Triton writer must agree with.

A pure function of a token's key and value (and of layer, kv head and logical position for a dither): batch, page order
and chunking cannot change the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import rounding
from .philox import dither

FP16_TINY = 2.0**-24


def scale_up(amax: Tensor, levels: float) -> Tensor:
    """Smallest fp16 number with ``scale * levels >= amax``, at least the smallest positive one; Inf on overflow.

    ``amax`` float32 of any shape, not negative.
    """
    wanted = amax.to(torch.float64) / levels
    scale = wanted.to(torch.float32).to(torch.float16).clamp_min(FP16_TINY)
    for _ in range(2):  # one step for each of the two roundings
        low = scale.to(torch.float64) * levels < amax
        scale = (scale.view(torch.int16) + low).view(torch.float16)
    return scale


def group_amax(x: Tensor, groups: int) -> Tensor:
    """Largest magnitude of each channel group, ``[…, d] -> […, groups]``."""
    return x.abs().unflatten(-1, (groups, -1)).amax(-1)


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
    """Write tokens into the packed store. See :func:`witcert_kernels.quantize_` for the contract.

    k ``[n, kv_heads, d]``, v ``[n, kv_heads, d_v]``, slots and positions int64 ``[n]`` with slots ≥ 0.
    """
    page_size, groups, groups_v = k_codes.shape[1], k_scale.shape[-1], v_scale.shape[-1]
    page, offset = slots // page_size, slots % page_size
    d = k.shape[-1]
    width = d // groups

    key = k.to(torch.float32)
    finite = key.isfinite().all(-1)
    key = key.masked_fill(~finite[..., None], 0.0)
    x = (key - mu) / f
    x.scatter_(-1, bypass_channels.expand(len(k), -1, -1), 0.0)
    finite &= x.isfinite().all(-1)
    x = x.masked_fill(~finite[..., None], 0.0)
    scale = scale_up(group_amax(x, groups), 126.5 if dither_on else 127.0)
    finite &= scale.isfinite().all(-1)
    dead = ~finite[..., None]
    step = scale.to(torch.float32).masked_fill(dead, 1.0).repeat_interleave(width, -1)
    ratio = x.masked_fill(dead, 0.0) / step
    if dither_on:
        xi = dither(seed, layer, k.shape[1], positions // dither_period, d)
        ratio = ratio + xi
    codes = ratio.round()
    codes.masked_fill_(dead, 0.0).scatter_(-1, bypass_channels.expand(len(k), -1, -1), 0.0)

    k_codes[page, offset] = codes.to(torch.int8)
    k_scale[page, offset] = scale.masked_fill(dead, float("inf"))
    if bypass.shape[-1]:
        kept = k.gather(-1, bypass_channels.expand(len(k), -1, -1))
        bypass[page, offset] = kept.masked_fill(dead, 0.0)
    if sketch.shape[-1] or witness.shape[-1]:
        stored = codes - xi if dither_on else codes
        residual = stored.to(torch.float64) * step - x
        residual.masked_fill_(dead, 0.0).scatter_(-1, bypass_channels.expand(len(k), -1, -1), 0.0)
        wide = step.to(torch.float64)
    if sketch.shape[-1]:
        coordinate = torch.einsum("nkd,krd->nkr", residual, u.to(torch.float64))
        unit = torch.einsum("nkd,krd->nkr", wide, u.abs().to(torch.float64)) / 254
        sketch[page, offset] = torch.where(unit > 0, coordinate / unit, 0.0).round().to(torch.int8)
    if witness.shape[-1]:
        band = torch.nn.functional.one_hot(band_of_channel, witness.shape[-1]).to(torch.float64)
        unit = (wide.square() @ band).sqrt() / 508
        norm = (residual.square() @ band).sqrt()
        witness[page, offset] = (norm / unit + 2.0**-6).ceil().to(torch.uint8)

    value = v.to(torch.float32)
    finite_v = value.isfinite().all(-1)
    value = value.masked_fill(~finite_v[..., None], 0.0)
    scale_v = scale_up(group_amax(value, groups_v), 127.0)
    finite_v &= scale_v.isfinite().all(-1)
    dead_v = ~finite_v[..., None]
    step_v = scale_v.to(torch.float32).masked_fill(dead_v, 1.0).repeat_interleave(v.shape[-1] // groups_v, -1)
    codes_v = (value.masked_fill(dead_v, 0.0) / step_v).round()
    v_codes[page, offset] = codes_v.to(torch.int8)
    v_scale[page, offset] = scale_v.masked_fill(dead_v, float("inf"))
    half = step_v.to(torch.float64).square().sum(-1).sqrt() * (rounding.STEP_WIDEN / 2)
    norm_v = (codes_v.to(torch.float64) * step_v).square().sum(-1).sqrt() + half
    norm_v = (norm_v * rounding.FLOAT_UP).masked_fill(~finite_v, 0.0).to(torch.float32)
    v_norm.scatter_reduce_(0, page[:, None].expand_as(norm_v), norm_v, "amax")


def half_up(x: Tensor) -> Tensor:
    """Round float64 numbers, not negative, up to fp16; Inf on overflow."""
    low = x.to(torch.float32).to(torch.float16)
    for _ in range(2):
        low = (low.view(torch.int16) + (low.to(torch.float64) < x)).view(torch.float16)
    return low


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
    """Write reconstructions with their witness. See :func:`witcert_kernels.observe_` for the contract.

    k, v exact and k_new, v_new reconstructed, ``[n, kv_heads, d]`` and ``[n, kv_heads, d_v]``; slots int64 ``[n]``.
    """
    page_size = k_hat.shape[1]
    page, offset = slots // page_size, slots % page_size
    stored = k_new.to(k_hat.dtype)
    finite = stored.isfinite().all(-1) & k.isfinite().all(-1)
    dead = ~finite[..., None]
    stored = stored.masked_fill(dead, 0.0)
    residual = (stored.to(torch.float64) - k.to(torch.float64).masked_fill(dead, 0.0)) / f.to(torch.float64)
    k_hat[page, offset] = stored
    band = torch.nn.functional.one_hot(band_of_channel, witness.shape[-1]).to(torch.float64)
    norm = half_up((residual.square() @ band).sqrt() * (1 + 2.0**-40))
    witness[page, offset] = norm.masked_fill(dead, float("inf"))
    if sketch.shape[-1]:
        coordinate = torch.einsum("nkd,krd->nkr", residual, u.to(torch.float64))
        unit = half_up(coordinate.abs().amax(-1, keepdim=True) / 127).clamp_min(FP16_TINY)
        lost = ~unit.isfinite() | dead
        unit = unit.masked_fill(lost, 1.0)
        sketch[page, offset] = (coordinate / unit.to(torch.float64)).masked_fill(lost, 0.0).round().to(torch.int8)
        sketch_scale[page, offset] = unit.masked_fill(lost, float("inf"))

    stored_v = v_new.to(v_hat.dtype)
    finite_v = stored_v.isfinite().all(-1) & v.isfinite().all(-1)
    dead_v = ~finite_v[..., None]
    stored_v = stored_v.masked_fill(dead_v, 0.0)
    v_hat[page, offset] = stored_v
    error = (stored_v.to(torch.float64) - v.to(torch.float64).masked_fill(dead_v, 0.0)).square().sum(-1).sqrt()
    error = half_up(error * (1 + 2.0**-40))
    v_error[page, offset] = error[..., None].masked_fill(dead_v, float("inf"))
    norm_v = stored_v.to(torch.float64).square().sum(-1).sqrt() + error.to(torch.float64)
    norm_v = (norm_v * rounding.FLOAT_UP).masked_fill(~finite_v, 0.0).to(torch.float32)
    v_norm.scatter_reduce_(0, page[:, None].expand_as(norm_v), norm_v, "amax")
