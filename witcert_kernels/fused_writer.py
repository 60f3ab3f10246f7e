"""The packed store's writer in one pass, compiled by numba: the bytes of :mod:`witcert_kernels.writer`, faster.

Float32 and float64 are used where the writer uses them and no liberty is taken with them, so codes and scales are the
same bytes; only the order of float64 sums differs (sketch, witness, norms).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from . import rounding
from .compiled import Compiled
from .philox import dither

INF_HALF = 0x7C00


@njit(error_model="numpy")
def half(bits):  # type: ignore[no-untyped-def]
    """The fp16 number of these bits, not negative."""
    if bits >= INF_HALF:
        return np.float32(np.inf)
    if bits < 1024:
        return np.float32(bits) * np.float32(2.0**-24)
    return np.int32((np.int32(bits) << 13) + (112 << 23)).view(np.float32)


@njit(error_model="numpy")
def scale_up(amax, levels):  # type: ignore[no-untyped-def]
    """Bits of the smallest fp16 number, not 0, with ``scale * levels >= amax``; Inf on overflow."""
    wanted = np.float64(amax) / levels
    if not wanted <= 65504:
        return INF_HALF
    bits = 1
    if wanted >= 2.0**-24:
        exponent = max(math.frexp(wanted)[1] - 1, -14)
        bits = ((exponent + 14) << 10) + int(math.ldexp(wanted, 10 - exponent))
    while np.float64(half(bits)) * levels < amax:
        bits += 1
    return bits


@njit(error_model="numpy")
def quantize(x, xi, levels, scale, step, codes):  # type: ignore[no-untyped-def]
    """Codes of x ``[d]`` with dither xi ``[d]``, float32, and the scales' bits, a channel group each.

    step ``[d]`` is each channel's scale. Returns whether all is finite; if not, codes are 0, scales Inf and steps 1.
    """
    width, finite = x.shape[0] // scale.shape[0], True
    for group in range(scale.shape[0]):
        amax = np.float32(0)
        for j in range(group * width, (group + 1) * width):
            finite &= bool(np.isfinite(x[j]))
            amax = max(amax, abs(x[j]))
        bits = scale_up(amax, levels) if finite else INF_HALF
        finite &= bits < INF_HALF
        scale[group] = bits
        for j in range(group * width, (group + 1) * width):
            step[j] = half(bits)
    if not finite:
        scale[:] = INF_HALF
        step[:] = 1
        codes[:] = 0
        return False
    for j in range(x.shape[0]):
        codes[j] = np.rint(x[j] / step[j] + xi[j])
    return True


def write_tokens(  # type: ignore[no-untyped-def]
    k, v, bits, slots, xi, k_codes, k_scale, sketch, witness, bypass, v_codes, v_scale, v_norm, mu, f, u, channels,
    band, levels, step_widen, float_up,
):  # fmt: skip
    """Write float32 k ``[n, kv_heads, d]`` and v; False, and nothing written, if a slot is not there.

    ``bits`` are k's, as ``bypass`` has them; xi ``[n, kv_heads, d]``, or ``[1, kv_heads, d]`` for all tokens.
    """
    page_size = k_codes.shape[1]
    for i in range(slots.shape[0]):
        if slots[i] < 0 or slots[i] >= k_codes.shape[0] * page_size:
            return False
    d, width = k.shape[2], v.shape[2]
    x, step, codes = np.empty(d, np.float32), np.empty(d, np.float32), np.empty(d, np.float32)
    step_v, codes_v, none = np.empty(width, np.float32), np.empty(width, np.float32), np.zeros(width, np.float32)
    residual = np.empty(d)
    norms, units = np.empty(witness.shape[3]), np.empty(witness.shape[3])
    for i in range(slots.shape[0]):
        page, offset = slots[i] // page_size, slots[i] % page_size
        for h in range(k.shape[1]):
            finite, shift = True, xi[i % xi.shape[0], h]
            for j in range(d):
                finite &= bool(np.isfinite(k[i, h, j]))
                x[j] = (k[i, h, j] - mu[h, j]) / f[h, j]
            for j in channels[h]:
                x[j] = 0
            if not finite:
                x[0] = np.inf
            finite = quantize(x, shift, levels, k_scale[page, offset, h], step, codes)
            for j in range(d):
                residual[j] = np.float64(codes[j] - shift[j]) * np.float64(step[j]) - x[j] if finite else 0.0
            for n in range(channels.shape[1]):
                j = channels[h, n]
                codes[j], residual[j] = 0, 0
                bypass[page, offset, h, n] = bits[i, h, j] if finite else 0
            for j in range(d):
                k_codes[page, offset, h, j] = np.int8(codes[j])
            for r in range(sketch.shape[3]):
                coordinate = unit = 0.0
                for j in range(d):
                    coordinate += residual[j] * np.float64(u[h, r, j])
                    unit += np.float64(step[j]) * abs(np.float64(u[h, r, j]))
                unit /= 254
                sketch[page, offset, h, r] = np.int8(np.rint(coordinate / unit)) if unit > 0 else 0
            norms[:] = 0
            units[:] = 0
            if witness.shape[3]:
                for j in range(d):
                    norms[band[j]] += residual[j] * residual[j]
                    units[band[j]] += np.float64(step[j]) * np.float64(step[j])
            for b in range(witness.shape[3]):
                byte = math.sqrt(norms[b]) / (math.sqrt(units[b]) / 508) + 2.0**-6
                witness[page, offset, h, b] = np.uint8(math.ceil(byte))

            finite = quantize(v[i, h], none, 127.0, v_scale[page, offset, h], step_v, codes_v)
            squares = stored = 0.0
            for j in range(width):
                v_codes[page, offset, h, j] = np.int8(codes_v[j])
                squares += np.float64(step_v[j]) * np.float64(step_v[j])
                stored += (np.float64(codes_v[j]) * np.float64(step_v[j])) ** 2
            norm = (math.sqrt(stored) + math.sqrt(squares) * (step_widen / 2)) * float_up if finite else 0.0
            v_norm[page, h] = max(v_norm[page, h], np.float32(norm))
    return True


_write_tokens = Compiled(write_tokens, error_model="numpy")


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
    """See :func:`witcert_kernels.writer.write_packed`."""
    whole = torch.int32 if bypass.dtype == torch.float32 else torch.int16
    if dither_on:
        xi = dither(seed, layer, k.shape[1], positions // dither_period, k.shape[2])
    else:
        xi = k.new_zeros(1, *k.shape[1:], dtype=torch.float32)
    key, value = k.contiguous(), v.to(torch.float32).contiguous()
    read = (key.to(torch.float32), value, key.view(whole), slots.contiguous(), xi)
    k_scale, v_scale, bypass = k_scale.view(torch.int16), v_scale.view(torch.int16), bypass.view(whole)
    written = (k_codes, k_scale, sketch, witness, bypass, v_codes, v_scale, v_norm)
    fixed = (x.contiguous() for x in (mu, f, u, bypass_channels, band_of_channel))
    there = _write_tokens(
        *(x.numpy() for x in (*read, *written, *fixed)),
        126.5 if dither_on else 127.0, rounding.STEP_WIDEN, rounding.FLOAT_UP,
    )  # fmt: skip
    if not there:  # a traced call was not checked
        raise ValueError(f"slots: got {slots.tolist()}, wants 0..{k_codes.shape[0] * k_codes.shape[1] - 1}")
