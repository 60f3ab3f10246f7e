"""The packed store's decode in one pass over the codes, compiled by numba: the reader's plain calls, faster.

A call is plain where few query rows attend to nothing but stored tokens with one scale each: no soft cap, bias, sinks,
exact pages or own chunk. The formulas are those of :mod:`witcert_kernels.reader`, so is the error budget; products with
codes are float32, everything else is float64. Rows with numbers that are not finite are left to the reader.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from . import rounding
from .compiled import Compiled
from .philox import GRID_STEP, dither
from .reader import PackedReader, log_term
from .state import cast_error

MAX_ROWS = 32  # query rows times heads a kv head; with more a matrix product is faster
LANES = (3, 4)  # of them share a pass over the codes
NEAR = 64  # tokens whose codes are read for all kv heads in turn
BLOCK = 1024  # tokens whose weighted values are added in float32
C_MAX = 300.0  # e^2c stays finite
HALF, ZETA, SKETCH, SHIFT, COEFFICIENTS = range(5)


class Constants(NamedTuple):
    """Of the error budget, see :mod:`witcert_kernels.rounding`.

    An argument of what is compiled: as globals they would be baked into numba's cache, which sees no other file change.
    """

    u: float
    u64: float
    step_widen: float
    delta_widen: float
    float_up: float
    code_max: float
    dot_extra: int
    logit_adds: int
    exp_error: float
    moment_rel: float
    underflow: float
    grid_step: float


_NAMES = [name.upper() for name in Constants._fields if name != "grid_step"]


def _constants() -> Constants:
    return Constants._make([*(getattr(rounding, name) for name in _NAMES), GRID_STEP])


ANY_ORDER = {"reassoc", "contract", "nsz"}  # LLVM's liberties: the budget allows them; NaN and Inf keep their meaning


@njit(fastmath={"contract"})
def exp_parts(x):  # type: ignore[no-untyped-def]
    """``(e, s)`` with e^x = s + s·e, s a power of two and \\|e\\| < 0.42, for \\|x\\| <= 700."""
    n = np.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    y = 1 / 6227020800.0
    y = y * r + 1 / 479001600.0
    y = y * r + 1 / 39916800.0
    y = y * r + 1 / 3628800.0
    y = y * r + 1 / 362880.0
    y = y * r + 1 / 40320.0
    y = y * r + 1 / 5040.0
    y = y * r + 1 / 720.0
    y = y * r + 1 / 120.0
    y = y * r + 1 / 24.0
    y = y * r + 1 / 6.0
    y = y * r + 0.5
    return r + r * r * y, np.int64((np.int64(n) + 1023) << 52).view(np.float64)


@njit(fastmath=ANY_ORDER)
def extremes(x):  # type: ignore[no-untyped-def]
    """Smallest and largest float32, as bits of a negative NaN < −Inf < numbers < Inf < NaN.

    Integers with the order of the numbers: minima of floats are not vectorised.
    """
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for t in range(x.shape[0]):
        bits = np.float32(x[t]).view(np.int32)
        key = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
        low, high = min(low, key), max(high, key)
    low ^= (low >> 31) & np.int32(0x7FFFFFFF)
    high ^= (high >> 31) & np.int32(0x7FFFFFFF)
    return np.int32(low).view(np.float32), np.int32(high).view(np.float32)


@njit(fastmath=ANY_ORDER)
def largest(c):  # type: ignore[no-untyped-def]
    """The largest of float64 numbers that are not negative."""
    top = np.int64(0)
    for t in range(c.shape[0]):
        top = max(top, np.float64(c[t]).view(np.int64))
    return np.int64(top).view(np.float64)


@njit(fastmath=ANY_ORDER)
def load_halves(bits, slots, kv_head, out):  # type: ignore[no-untyped-def]
    """Some slots' fp16 numbers, given as int16; Inf, NaN and what is negative become Inf."""
    for t in range(slots.shape[0]):
        half = np.int32(bits[slots[t], kv_head, 0]) & np.int32(0xFFFF)
        subnormal = np.float32(half) * np.float32(2.0**-24)
        normal = np.int32((half << 13) + (112 << 23)).view(np.float32)
        out[t] = np.float32(np.inf) if half >= 0x7C00 else subnormal if half < 1024 else normal


@njit(fastmath=ANY_ORDER)
def load_columns(codes, slots, kv_head, out):  # type: ignore[no-untyped-def]
    """Some slots' sketch or witness codes: out ``[columns, tokens]``."""
    for i in range(out.shape[0]):
        for t in range(slots.shape[0]):
            out[i, t] = np.float32(codes[slots[t], kv_head, i])


@njit(fastmath=ANY_ORDER)
def take_lost(scale):  # type: ignore[no-untyped-def]
    """Replace Inf by 0; returns where it was."""
    lost = np.nonzero(scale == np.float32(np.inf))[0]
    scale[lost] = 0
    return lost


@njit(fastmath=ANY_ORDER)
def any_within(numbers, low, high):  # type: ignore[no-untyped-def]
    """Whether one is in low … high."""
    return ((numbers >= low) & (numbers < high)).any()


@njit(fastmath=ANY_ORDER)
def dots(z, codes, slots, kv_head, x):  # type: ignore[no-untyped-def]
    """z ``[3 or 4, d]`` times the codes of some slots: x ``[3 or 4, tokens]``."""
    z0, z1, z2, z3 = z[0], z[1], z[2], z[z.shape[0] - 1]
    paired = 0
    if z.shape[0] == 3:  # two tokens share what is loaded of z
        paired = slots.shape[0] - slots.shape[0] % 2
        for t in range(0, paired, 2):
            code, other = codes[slots[t], kv_head], codes[slots[t + 1], kv_head]
            s0 = s1 = s2 = o0 = o1 = o2 = np.float32(0)
            for j in range(z.shape[1]):
                value, beside = np.float32(code[j]), np.float32(other[j])
                s0 += z0[j] * value
                s1 += z1[j] * value
                s2 += z2[j] * value
                o0 += z0[j] * beside
                o1 += z1[j] * beside
                o2 += z2[j] * beside
            x[0, t], x[1, t], x[2, t] = s0, s1, s2
            x[0, t + 1], x[1, t + 1], x[2, t + 1] = o0, o1, o2
    for t in range(paired, slots.shape[0]):
        code = codes[slots[t], kv_head]
        s0 = s1 = s2 = s3 = np.float32(0)
        for j in range(z.shape[1]):
            value = np.float32(code[j])
            s0 += z0[j] * value
            s1 += z1[j] * value
            s2 += z2[j] * value
            s3 += z3[j] * value
        x[0, t], x[1, t], x[2, t], x[z.shape[0] - 1, t] = s0, s1, s2, s3


@njit(fastmath=ANY_ORDER)
def subtract_dither(z, xi, kv_head, period, start, x):  # type: ignore[no-untyped-def]
    """Take Σ_j z_j ξ_j, one number a period, off the products of the tokens from ``start`` on."""
    for n in range(xi.shape[0]):
        inner = 0.0
        for j in range(z.shape[0]):
            inner += np.float64(z[j]) * np.float64(xi[n, kv_head, j])
        begin = (start // period + n) * period - start
        for t in range(max(begin, 0), min(begin + period, x.shape[0])):
            x[t] -= np.float32(inner)


@njit(fastmath=ANY_ORDER)
def add_values(weights, codes, slots, kv_head, acc):  # type: ignore[no-untyped-def]
    """Add Σ weight·code of some slots, weights ``[lanes, tokens]``, to float32 acc ``[lanes, d_v]``."""
    lanes, width = acc.shape
    fours = slots.shape[0] - slots.shape[0] % 4
    for t in range(0, fours, 4):
        v0, v1 = codes[slots[t], kv_head], codes[slots[t + 1], kv_head]
        v2, v3 = codes[slots[t + 2], kv_head], codes[slots[t + 3], kv_head]
        for i in range(lanes):
            w0, w1, w2, w3 = weights[i, t], weights[i, t + 1], weights[i, t + 2], weights[i, t + 3]
            for j in range(width):
                first = w0 * np.float32(v0[j]) + w1 * np.float32(v1[j])
                acc[i, j] += first + (w2 * np.float32(v2[j]) + w3 * np.float32(v3[j]))
    for t in range(fours, slots.shape[0]):
        v0 = codes[slots[t], kv_head]
        for i in range(lanes):
            for j in range(width):
                acc[i, j] += weights[i, t] * np.float32(v0[j])


@njit(fastmath=ANY_ORDER)
def add_shares(x, top, c, l, first, page_size, shares):  # type: ignore[no-untyped-def] # noqa: E741
    """Raise shares ``[pages]`` to each page's part of a1 / l, for logits x of the tokens from ``first`` on."""
    begin = 0
    while begin < x.shape[0]:
        page = (first + begin) // page_size
        end = min((page + 1) * page_size - first, x.shape[0])
        total = 0.0
        for t in range(begin, end):
            e, s = exp_parts(max(np.float64(x[t]) - top, -700.0))
            e2, s2 = exp_parts(c[t])
            total += (s + s * e) * (s2 * e2 + (s2 - 1.0))
        shares[page] = max(shares[page], np.float32(total / l))
        begin = end


@njit(fastmath=ANY_ORDER)
def moments(x, top, c, v_scale, weights):  # type: ignore[no-untyped-def]
    """l, a1 and a2 relative to ``top``, and Σ e^(x − top) s_v; writes its terms."""
    l = a1 = a2 = rho = 0.0  # noqa: E741
    for t in range(x.shape[0]):
        e, s = exp_parts(max(np.float64(x[t]) - top, -700.0))
        p = s + s * e
        e, s = exp_parts(c[t])
        rise = s * e + (s - 1.0)
        excess = p * rise
        l += p  # noqa: E741
        a1 += excess
        a2 += excess * rise
        weight = p * v_scale[t]
        rho += weight
        weights[t] = np.float32(weight)
    return l, a1, a2, rho


@njit(fastmath=ANY_ORDER)
def prepare(q, mu, f, u, channels, band, log_term, sm_scale, const, z, coefficients, a_unit, witness, kept):  # type: ignore[no-untyped-def]
    """One query row's coefficients, see :class:`witcert_kernels.query.PackedQuery`; returns whether all are finite.

    Writes z ``[d]``; the bound without a witness, ζ and the sketch's error per step, and sm_scale·q·μ to
    ``coefficients``; a_unit ``[r]``; witness ``[bands]`` per byte and step; kept ``[2 m]``.
    """
    d, r, bands = q.shape[0], u.shape[0], witness.shape[0]
    w = np.empty(d)
    shift = total = a_abs = absolute = square = 0.0
    for j in range(d):
        shift += q[j] * mu[j]
        w[j] = q[j] * f[j]
    for i in range(channels.shape[0]):
        w[channels[i]] = 0.0
        kept[i] = sm_scale * q[channels[i]]
    for j in range(d):
        total += abs(w[j])
        z[j] = np.float32(sm_scale * w[j])
    a = np.empty(r)
    for i in range(r):
        inner = size = 0.0
        for j in range(d):
            inner += w[j] * u[i, j]
            size += abs(u[i, j])
        a[i] = np.float64(np.float32(inner))
        a_abs += abs(a[i]) * size / 254
        a_unit[i] = np.float32(sm_scale * a[i] * size / 254)
    for i in range(r):
        for j in range(d):
            w[j] -= a[i] * u[i, j]
    for i in range(channels.shape[0]):
        w[channels[i]] = 0.0
    for j in range(d):
        absolute += abs(w[j])
        square += w[j] * w[j]
    if bands:
        channels_of = np.zeros(bands)
        witness[:] = 0
        for j in range(d):
            witness[band[j]] += w[j] * w[j]
            channels_of[band[j]] += 1
        for b in range(bands):
            norm = np.sqrt(witness[b] * channels_of[b]) * (1 + 2 * (bands + 8) * const.u)
            witness[b] = sm_scale / 508 * norm * const.float_up
    widened = sm_scale * const.step_widen * (1 + 9 * const.u)
    half = widened / 2 * absolute
    if log_term > 0:
        half = min(half, widened * np.sqrt(square / 6 * log_term) + half * const.grid_step)
    magnitude = sm_scale * (const.code_max * total + 127 * a_abs)
    coefficients[HALF] = half * const.float_up
    coefficients[ZETA] = magnitude * (d + r + 1 + const.dot_extra) * const.u * (1 + 2.0**-10) * const.float_up
    coefficients[SKETCH] = sm_scale * const.delta_widen / 2 * a_abs * const.float_up
    coefficients[SHIFT] = sm_scale * shift
    return magnitude < 1e30


@njit(fastmath=ANY_ORDER)
def up(x):  # type: ignore[no-untyped-def]
    """Not negative, from float64 to float32, towards +Inf."""
    y = np.float32(x)
    return np.int32(y.view(np.int32) + 1).view(np.float32) if np.float64(y) < x else y


@njit(fastmath=ANY_ORDER)
def meter_of(l, a1, a2, c_max, zeta_max, tokens, const):  # type: ignore[no-untyped-def] # noqa: E741
    """Meter and e-form, see :meth:`witcert_kernels.state.Moments.meter` and :func:`witcert_kernels.state.finish`."""
    small = tokens * const.underflow
    absolute = small * np.exp(2 * min(c_max, 20.0)) / l
    a1_up, a2_up = a1 / l * (1 + const.moment_rel) + absolute, a2 / l * (1 + const.moment_rel) + absolute
    a1_low = max(a1 / l * (1 - const.moment_rel) - absolute, 0.0)
    total = 1 + a1_up
    phi = a1_up / total if total <= 2 else 1 / (1 + 4 / (total * total))
    sharp = (a1_up + np.sqrt(max(a2_up - a1_low * a1_low, 0.0)) / 2) / (total + 1)
    bound = min(phi, np.tanh(c_max / 2), sharp) + np.tanh(zeta_max / 2) + small
    return min(bound * (1 + 2.0**-20), 1.0), a1_up + a1_up * a1_up / 2


@njit(fastmath=ANY_ORDER)
def read_row(  # type: ignore[no-untyped-def]
    x, s_k, s_v, kv_head, coefficients, a_unit, of_byte, kept, sketch, witness, bypass, first, page_size, tokens,
    const, c, shares, weights, report,
):  # fmt: skip
    """One query row over the tokens from ``first`` on, whose dot products x become weights e^(x − m) s_v.

    sketch ``[r, tokens]`` and witness ``[bands, tokens]`` are this kv head's.

    Raises shares ``[pages]``, or none, to the pages' parts of A − 1. Returns l, or 0 where something is not finite.
    report ``[5]``: lse, meter, e-form, risk, Σ p s_v.
    """
    half, zeta = coefficients[HALF], coefficients[ZETA]
    for i in range(a_unit.shape[0]):
        for t in range(x.shape[0]):
            x[t] -= a_unit[i] * sketch[i, t]
    for t in range(x.shape[0]):
        x[t] *= s_k[t]
    common = 0.0
    if kept.shape[0]:
        for t in range(x.shape[0]):
            extra = size = 0.0
            for i in range(kept.shape[0]):
                extra += kept[i] * bypass[t, kv_head, i]
                size += abs(kept[i] * bypass[t, kv_head, i])
            x[t] = np.float32(np.float64(x[t]) + extra)
            common = max(common, size)
        common *= (kept.shape[0] + 4) * const.u64 * const.float_up
    low, top = extremes(x)
    if not (low > -np.inf and top < np.inf):
        return 0.0
    size, spread = max(-np.float64(low), np.float64(top)), min(np.float64(top) - np.float64(low), 104.0)
    common += (const.u * (const.logit_adds * size + spread) + const.exp_error) * (1 + 2.0**-10)
    start = 0.0 if of_byte.shape[0] else half
    for t in range(x.shape[0]):
        c[t] = start
    for b in range(of_byte.shape[0]):
        for t in range(x.shape[0]):
            c[t] += of_byte[b] * np.float64(witness[b, t])
    for t in range(x.shape[0]):
        c[t] = (((c[t] if c[t] < half else half) + zeta + coefficients[SKETCH]) * s_k[t] + common) * const.float_up
    c_max = largest(c)
    if c_max > C_MAX:
        return 0.0
    l, a1, a2, rho = moments(x, np.float64(top), c, s_v, weights)  # noqa: E741
    if shares.shape[0]:
        add_shares(x, np.float64(top), c, l, first, page_size, shares)
    for t in range(x.shape[0]):
        x[t] = weights[t]
    report[0] = np.float64(top) + np.log(l) + coefficients[SHIFT]
    report[1], report[2] = meter_of(l, a1, a2, c_max, zeta * extremes(s_k)[1] + common, tokens, const)
    report[3] = np.log1p(a1 / l) * (1 + 2.0**-20)
    report[4] = rho / l
    return l


@njit(fastmath=ANY_ORDER)
def value_error_of(meter, rho, norm, tokens, width, out_error, out_floor, const):  # type: ignore[no-untyped-def]
    """See :func:`witcert_kernels.state.finish`; rho is Σ p s_v."""
    unit = np.sqrt(width) / 2 * const.step_widen * const.float_up
    summed = (BLOCK + 16) * const.u
    error = 2 * meter * norm + rho * unit * (1 + summed) + (summed + const.underflow * tokens) * norm
    return (error + out_error * (norm + error) + out_floor * np.sqrt(width)) * (1 + 2.0**-20)


def read_sequence(  # type: ignore[no-untyped-def]
    q, length, causal, window_left, page_row, page_size, mu, f, u, channels, band, k_codes, k_scale, sketch, witness,
    bypass, v_codes, v_scale, v_norm, xi, period, log_term, sm_scale, const, out_error, out_floor, limit, out, report,
    compressed, shares, unread,
):  # fmt: skip
    """Query rows ``[rows, heads, d]`` of one sequence, its last ones; False if a page is not there.

    ``bypass`` is that of the tokens from :func:`first_read` on, xi ``[periods, kv_heads, d]`` their dither (no periods:
    none). A row that is not finite becomes True in unread ``[rows, heads]``. report ``[5, rows, heads]``: lse, meter,
    e-form, risk, value error.
    """
    rows, heads, d = q.shape
    kv_heads, width = k_codes.shape[1], v_codes.shape[2]
    per_head = heads // kv_heads
    low, high = np.zeros(rows, np.int64), np.full(rows, length, np.int64)
    for row in range(rows):
        position = length - rows + row
        if causal:
            high[row] = max(position + 1, 0)
        if window_left >= 0:
            low[row] = min(max(position - window_left, 0), high[row])
    start, tokens = low.min(), high.max() - low.min()
    for page in range(start // page_size, (start + tokens + page_size - 1) // page_size):
        if page >= page_row.shape[0] or page_row[page] < 0 or page_row[page] >= v_norm.shape[0]:
            return False
    if tokens == 0:
        return True
    slots = np.empty(tokens, np.int64)
    for t in range(tokens):
        slots[t] = np.int64(page_row[(start + t) // page_size]) * page_size + (start + t) % page_size
    lanes = rows * per_head
    together = LANES[0] if lanes % LANES[0] == 0 else LANES[1]
    padded = (lanes + together - 1) // together * together
    z, x = np.zeros((kv_heads, padded, d), np.float32), np.empty((kv_heads, padded, tokens), np.float32)
    coefficients = np.empty((kv_heads, lanes, COEFFICIENTS))
    a_unit = np.empty((kv_heads, lanes, sketch.shape[2]), np.float32)
    of_byte, kept = np.empty((kv_heads, lanes, witness.shape[2])), np.empty((kv_heads, lanes, channels.shape[1]))
    for h in range(kv_heads):
        for i in range(lanes):
            row, head = i // per_head, h * per_head + i % per_head
            unread[row, head] = not prepare(
                q[row, head], mu[h], f[h], u[h], channels[h], band, log_term, sm_scale,
                const, z[h, i], coefficients[h, i], a_unit[h, i], of_byte[h, i], kept[h, i],
            )  # fmt: skip
    # a slot's heads are neighbours in memory, so they are read together
    for first in range(0, tokens, NEAR):
        near = slice(first, min(first + NEAR, tokens))
        for h in range(kv_heads):
            for i in range(0, lanes, together):
                dots(z[h, i : i + together], k_codes, slots[near], h, x[h, i : i + together, near])

    s_k, s_v, c = np.empty(tokens, np.float32), np.empty(tokens, np.float32), np.empty(tokens)
    weights, sums, column = np.empty(tokens, np.float32), np.ones((kv_heads, lanes)), np.empty(5)
    sketched = np.empty((sketch.shape[2], tokens), np.float32)
    witnessed = np.empty((witness.shape[2], tokens), np.float32)
    for h in range(kv_heads):
        load_halves(k_scale, slots, h, s_k)
        load_halves(v_scale, slots, h, s_v)
        load_columns(sketch, slots, h, sketched)
        load_columns(witness, slots, h, witnessed)
        lost, lost_v = take_lost(s_k), take_lost(s_v)
        norm = 0.0
        for page in range(start // page_size, (start + tokens - 1) // page_size + 1):
            of_page = np.float64(v_norm[page_row[page], h])
            norm = max(norm, of_page if of_page < np.inf else np.inf)
        for i in range(lanes):
            row, head = i // per_head, h * per_head + i % per_head
            begin, end = low[row] - start, high[row] - start
            unread[row, head] |= any_within(lost, begin, end)
            if unread[row, head] or end == begin:
                x[h, i] = 0
                continue
            cut = slice(begin, end)
            subtract_dither(z[h, i], xi, h, period, start, x[h, i])
            x[h, i, :begin] = 0
            x[h, i, end:] = 0
            sums[h, i] = read_row(
                x[h, i, cut], s_k[cut], s_v[cut], h, coefficients[h, i], a_unit[h, i], of_byte[h, i], kept[h, i],
                sketched[:, cut], witnessed[:, cut], bypass[cut], low[row], page_size, high[row], const, c[cut],
                shares[h], weights[cut], column,
            )  # fmt: skip
            if sums[h, i] == 0.0:
                unread[row, head], sums[h, i] = True, 1.0
                x[h, i] = 0
                continue
            report[0, row, head] = np.float32(column[0])
            for n in range(1, 4):
                report[n, row, head] = up(column[n])
            error = value_error_of(column[1], column[4], norm, high[row], width, out_error, out_floor, const)
            report[4, row, head] = np.inf if any_within(lost_v, begin, end) or not error < np.inf else up(error)
            compressed[row, head] = end - begin

    part, acc = np.empty((kv_heads, lanes, width), np.float32), np.zeros((kv_heads, lanes, width))
    for block in range(0, tokens, BLOCK):
        part[:] = 0
        stop = min(block + BLOCK, tokens)
        for first in range(block, stop, NEAR):
            near = slice(first, min(first + NEAR, stop))
            for h in range(kv_heads):
                add_values(x[h, :lanes, near], v_codes, slots[near], h, part[h])
        acc += part
    for h in range(kv_heads):
        for i in range(lanes):
            for j in range(width):
                value = min(max(acc[h, i, j] / sums[h, i], -limit), limit)
                out[i // per_head, h * per_head + i % per_head, j] = np.float32(value)
    return True


_read_sequence = Compiled(read_sequence, fastmath=ANY_ORDER)


def first_read(length: int, rows: int, window_left: int) -> int:
    """The first token that the last ``rows`` rows of a sequence attend to."""
    return min(max(length - rows - window_left, 0), length) if window_left >= 0 else 0


def decode(
    q: Tensor,
    reader: PackedReader,
    page_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    exact_pages: Tensor | None,
    otherwise: Callable[[], tuple[Tensor, ...]],
    *,
    causal: bool,
    sm_scale: float,
    window_left: int,
    delta_local: float,
    want_shares: bool,
) -> tuple[Tensor, ...]:
    """What :func:`witcert_kernels.reader.decode` returns for a call without chunk, sinks, bias or soft cap.

    ``otherwise`` is that call. It is taken for a store with channel groups; for sequences that have many rows or exact
    pages; and for rows with something that is not finite. What the other sequences and rows report never depends on it.
    """
    rows, heads, d = q.shape
    lengths = seq_lens.tolist()
    bounds = list(range(rows + 1)) if qo_indptr is None else qo_indptr.tolist()
    most = MAX_ROWS * reader.kv_heads // heads
    left_out = [b - a > most for a, b in pairwise(bounds)]
    if exact_pages is not None:
        exact = (exact_pages >= 0).flatten(1).any(1).tolist()
        left_out = [many or repaired for many, repaired in zip(left_out, exact, strict=True)]
    if reader.groups > 1 or reader.groups_v > 1 or all(left_out):
        return otherwise()
    t, page_size, kv_heads = reader.t, reader.page_size, reader.kv_heads
    k_codes, sketch, witness, v_codes = (_by_slot(t[name]) for name in ("k_codes", "sketch", "witness", "v_codes"))
    k_scale, v_scale = (_by_slot(t[name]).view(np.int16) for name in ("k_scale", "v_scale"))
    fixed = [t[name].numpy() for name in ("mu", "f", "u", "bypass_channels", "band_of_channel")]
    const, cast = _constants(), (*cast_error(q.dtype), torch.finfo(q.dtype).max)
    v_norm, table = t["v_norm"].numpy(), page_table.contiguous().numpy()
    query = q.to(torch.float64).contiguous().numpy()
    out, report = np.zeros((rows, heads, v_codes.shape[2]), np.float32), np.zeros((5, rows, heads), np.float32)
    report[0] = -np.inf
    compressed, unread = np.zeros((rows, heads), np.int32), np.zeros((rows, heads), np.bool_)
    shares = np.zeros((len(lengths), kv_heads, table.shape[1] if want_shares else 0), np.float32)
    dithered, kept = bool(reader.scalars["dither"]), t["bypass"].shape[-1]
    period = reader.scalars["dither_period"] if dithered else 1
    xi, bypass = np.zeros((0, kv_heads, d), np.float32), np.zeros((max(lengths, default=0), kv_heads, 0), np.float32)
    for b, length in enumerate(lengths):
        mine = slice(bounds[b], bounds[b + 1])
        if left_out[b]:
            unread[mine] = True
            continue
        if mine.start == mine.stop:
            continue
        start = first_read(length, mine.stop - mine.start, window_left)
        if kept:
            token = torch.arange(start, min(length, table.shape[1] * page_size), device="cpu")
            page = page_table[b, token // page_size].to(torch.int64).clamp(0, len(v_norm) - 1)
            bypass = t["bypass"][page, token % page_size].to(torch.float32).numpy()
        if dithered:
            periods = torch.arange(start // period, (length - 1) // period + 1, device="cpu")
            xi = dither(reader.scalars["seed"], reader.scalars["layer"], kv_heads, periods, d).numpy()
        there = _read_sequence(
            query[mine], length, causal, window_left, table[b], page_size, *fixed, k_codes, k_scale, sketch, witness,
            bypass, v_codes, v_scale, v_norm, xi, period, log_term(length, delta_local), sm_scale, const, *cast,
            out[mine], report[:, mine], compressed[mine], shares[b], unread[mine],
        )  # fmt: skip
        if not there:  # a traced call was not checked
            raise ValueError(
                f"page_table: got {table[b].tolist()} for {length} tokens of sequence {b}, wants 0..{len(v_norm) - 1}"
                " for each of their pages"
            )
    outputs = tuple(torch.from_numpy(x) for x in (out, *report, compressed))
    outputs = (outputs[0].to(q.dtype), *outputs[1:])
    if not unread.any():
        return *outputs, torch.from_numpy(shares)
    others = otherwise()
    left = torch.from_numpy(unread)
    of_head = left.view(rows, kv_heads, -1).any(-1)
    in_sequence = torch.stack([of_head[a:b].any(0) for a, b in pairwise(bounds)])
    masks = [left[..., None], *(left for _ in outputs[1:]), in_sequence[..., None]]
    found = (*outputs, torch.from_numpy(shares))
    return tuple(torch.where(mask, other, own) for mask, other, own in zip(masks, others, found, strict=True))


def _by_slot(pages: Tensor) -> NDArray[Any]:
    """``[pages, page_size, …]`` as ``[slots, …]``."""
    x = pages.numpy()
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
