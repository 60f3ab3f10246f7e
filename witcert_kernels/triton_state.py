"""A row's running sums in the Triton kernels, and the kernel that merges splits and evaluates the meter.

The counterpart of :mod:`witcert_kernels.state` for base-2 logits. What a split leaves behind for a row is one number a
field below, float64 ``[FIELDS, splits, rows * heads]``, and Σ 2^(y − m) v̂, float32 ``[splits, rows * heads, d_v]``.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rounding
from . import telemetry as counting
from .state import cast_error
from .triton_common import power_of_two, power_of_two_wide

M = tl.constexpr(0)  # integer maximum, −Inf for no token
L = tl.constexpr(1)  # sums of 2^(y − m): alone,
A1 = tl.constexpr(2)  # times e^c − 1,
A2 = tl.constexpr(3)  # and its square
C_MAX = tl.constexpr(4)  # largest c in base 2; Inf marks a token that is not finite
Z_MAX = tl.constexpr(5)  # largest rounding error of a logit, in base 2,
Z_ROW = tl.constexpr(6)  # and the part of it that does not depend on the token
RHO = tl.constexpr(7)  # Σ 2^(y − m) ρ; Inf marks a value that is not finite
NORM = tl.constexpr(8)  # largest ‖v̂‖ + ρ
M_WIDE = tl.constexpr(9)  # log-sum-exp of y + c where c is large: maximum,
L_WIDE = tl.constexpr(10)  # sum
COUNT = tl.constexpr(11)  # compressed tokens attended
FIELDS = 12
KNOWN_M = tl.constexpr(12)  # the same under w = y − r, of what an observatory read,
KNOWN_L = tl.constexpr(13)
KNOWN_A1 = tl.constexpr(14)
KNOWN_A2 = tl.constexpr(15)
KNOWN_C_MAX = tl.constexpr(16)
ER = tl.constexpr(17)  # sums of 2^(w − m) times 2^(r − r_top), in float64 as KNOWN_L,
EE = tl.constexpr(18)  # and its square
R_TOP = tl.constexpr(19)  # integer maximum of r in base 2, −Inf for no token
KNOWN_FIELDS = 8
U = tl.constexpr(rounding.U)
BINS = tl.constexpr(counting.BINS)
PLACES = tl.constexpr(counting.PLACES)
WORST = tl.constexpr(counting.WORST)
NON_FINITE = tl.constexpr(counting.NON_FINITE)
VALUE_NON_FINITE = tl.constexpr(counting.VALUE_NON_FINITE)
SUM = tl.constexpr(counting.SUM)
COVERED = tl.constexpr(counting.COVERED)
UNIT = tl.constexpr(counting.UNIT)
WIDE_BITS = tl.constexpr(28.0)  # c in base 2 (19.4) from which products are formed in the exponent
RISE_UP = tl.constexpr(rounding.RISE_UP)
RISE_LIMIT = tl.constexpr(rounding.RISE_LIMIT)
RISE_0, RISE_1, RISE_2, RISE_3, RISE_4 = (tl.constexpr(x) for x in rounding.RISE)


@triton.jit
def _add(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _larger(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def rescale(x, factor):
    """``x * factor`` where infinity times a vanished factor stays infinite."""
    return tl.where(x == float("inf"), x, x * factor)


@triton.jit
def rise_of(c):
    """Upper bound of 2^c − 1 for float32 c in [0, RISE_LIMIT], without the special-function unit."""
    return c * (RISE_0 + c * (RISE_1 + c * (RISE_2 + c * (RISE_3 + c * RISE_4))))


@triton.jit
def _sum_of_powers(x):
    """Σ 2^x over the tokens of float32 ``[rows, tokens]`` that may leave float32's range, float64, Inf from 1024 on."""
    top = tl.ceil(tl.max(x, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    return tl.sum(tl.exp2(x - base[:, None]), 1).to(tl.float64) * power_of_two_wide(base)


@triton.jit
def fold(
    y, c, lost, rho, ok, m, l, a1, a2, c_max, rho_sum, m_wide, l_wide,  # noqa: E741
    EXACT: tl.constexpr, UNIFORM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Add a tile to the running sums.

    y, c float32 ``[rows, tokens]`` in base 2, finite; the others broadcast to it: lost the tokens that are not finite,
    rho what is summed besides, Inf for a lost value, ok the tokens that are attended. With EXACT c is 0 and not read.
    With UNIFORM all rows attend to the same tokens, and c, lost and rho are 0 at the others. Returns the weights, the
    factor that brings older weights to the new maximum, and the sums.
    """
    y = tl.where(ok, y, float("-inf"))
    if not UNIFORM:
        c = tl.where(ok, c, 0.0)
        lost = lost & ok
        rho = tl.where(ok, rho, 0.0)
    flagged = tl.where(lost, float("inf"), tl.zeros_like(y) if EXACT else c)
    if INTERPRET:
        top, c_top = tl.max(y, 1), tl.max(flagged, 1)
    else:
        top, c_top = tl.reduce((y, flagged), 1, _larger)
    c_max = tl.maximum(c_max, c_top)
    newer = tl.maximum(m, tl.ceil(top))
    base = tl.where(newer == float("-inf"), 0.0, newer)
    drop = tl.where(m == float("-inf"), float("-inf"), m - base)
    factor = power_of_two_wide(drop)
    shifted = y - base[:, None]
    p = tl.exp2(shifted)
    weighted = tl.where(rho == float("inf"), float("inf"), p * tl.where(rho == float("inf"), 0.0, rho))
    if EXACT:
        l = l * factor + tl.sum(p, 1).to(tl.float64)  # noqa: E741
        a1 = rescale(a1, factor)
        a2 = rescale(a2, factor)
        rho_sum = rescale(rho_sum, factor) + tl.sum(weighted, 1).to(tl.float64)
    else:
        rise = rise_of(c)
        excess = p * rise
        square = excess * rise
        a1 = rescale(a1, factor)
        a2 = rescale(a2, factor)
        most = tl.max(c_top, 0)
        if most > RISE_LIMIT:
            rise = tl.exp2(c) * RISE_UP - 1.0
            excess = p * rise
            square = excess * rise
            if most > WIDE_BITS:
                # e^c may leave float32's range while its weight is tiny, or becomes so when the maximum rises
                wide = (c > WIDE_BITS) & ok
                excess = tl.where(c > WIDE_BITS, 0.0, excess)
                square = tl.where(c > WIDE_BITS, 0.0, square)
                a1 += _sum_of_powers(tl.where(wide, shifted + c, float("-inf")))
                a2 += _sum_of_powers(tl.where(wide, shifted + 2.0 * c, float("-inf")))
                newer_wide = tl.maximum(m_wide, tl.ceil(tl.max(y + c, 1)))
                base_wide = tl.where(newer_wide == float("-inf"), 0.0, newer_wide)
                old = tl.where(m_wide == float("-inf"), float("-inf"), m_wide - base_wide)
                mass = tl.sum(tl.exp2(y + c - base_wide[:, None]), 1)
                l_wide = l_wide * power_of_two_wide(old) + mass.to(tl.float64)
                m_wide = newer_wide
        if INTERPRET:
            s0, s1, s2, s3 = tl.sum(p, 1), tl.sum(excess, 1), tl.sum(square, 1), tl.sum(weighted, 1)
        else:
            s0, s1, s2, s3 = tl.reduce((p, excess, square, weighted), 1, _add)
        l = l * factor + s0.to(tl.float64)  # noqa: E741
        a1 += s1.to(tl.float64)
        a2 += s2.to(tl.float64)
        rho_sum = rescale(rho_sum, factor) + s3.to(tl.float64)
    return p, power_of_two(drop), newer, l, a1, a2, c_max, rho_sum, m_wide, l_wide


@triton.jit
def softcap(x, cap):
    """``cap * tanh(x / cap)``, float32."""
    a = tl.abs(x / cap)
    square = a * a
    series = 0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203)
    near = a * (1.0 + square * (-0.3333333333333333 + square * series))
    far = 1.0 - 2.0 / (1.0 + tl.exp2(a * 2.8853900817779268))
    t = tl.where(a < 0.25, near, far)
    return cap * tl.where(x < 0, -t, t)


@triton.jit
def _field(Stats, field, split, present, splits, total, row, other):
    return tl.load(Stats + (split + splits * field).to(tl.int64) * total + row, mask=present, other=other)


@triton.jit
def _upper(x):
    """float64, not negative, to float32 towards +Inf."""
    y = x.to(tl.float32)
    more = (y.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where(y.to(tl.float64) < x, more, y)


@triton.jit
def _half_tanh(x):
    """``tanh(x / 2)`` of a float64 that is not negative."""
    e = tl.exp(tl.minimum(x, 80.0))
    return (e - 1.0) / (e + 1.0)


@triton.jit
def _bound(l, a1, a2, c_max, relative, absolute):  # noqa: E741
    """The meter and the upper bound of a1 / l, float64 scalars, see :meth:`witcert_kernels.state.Moments.meter`."""
    up = a1 / l * (1.0 + relative) + absolute
    low = tl.maximum(a1 / l * (1.0 - relative) - absolute, 0.0)
    square = a2 / l * (1.0 + relative) + absolute
    infinite = (square == float("inf")) | (low == float("inf"))
    variance = tl.where(infinite, float("inf"), tl.maximum(square - low * low, 0.0))
    mass = 1.0 + up
    phi = tl.where(mass <= 2.0, up / mass, 1.0 / (1.0 + 4.0 / (mass * mass)))
    sharp = (up + tl.sqrt(variance) / 2.0) / (mass + 1.0)
    sharp = tl.where(sharp == sharp, sharp, 1.0)
    bound = tl.minimum(tl.minimum(phi, _half_tanh(c_max)), sharp)
    return tl.where(a1 == float("inf"), 1.0, bound), up


@triton.jit
def _count_cell(Telemetry, meter, non_finite, value_non_finite, layer, head, counted, TAUS: tl.constexpr):
    """Add a cell, if it is ``counted``, to a :class:`witcert_kernels.Telemetry`'s buffer; meter float32 in [0, 1]."""
    one = tl.cast(1, tl.int64)
    wide = meter.to(tl.float64)
    tl.atomic_add(Telemetry + NON_FINITE, one, mask=counted & non_finite, sem="relaxed")
    tl.atomic_add(Telemetry + VALUE_NON_FINITE, one, mask=counted & value_non_finite, sem="relaxed")
    tl.atomic_add(Telemetry + SUM, tl.ceil(wide / UNIT).to(tl.int64), mask=counted, sem="relaxed")
    for i in tl.static_range(TAUS):
        tau = tl.load(Telemetry + COVERED + TAUS + BINS + 1 + i).to(tl.float64, bitcast=True)
        tl.atomic_add(Telemetry + COVERED + i, one, mask=counted & (wide <= tau), sem="relaxed")
    entry = tl.ceil(wide * BINS).to(tl.int32)  # exact: 24 bits times 10
    tl.atomic_add(Telemetry + COVERED + TAUS + entry, one, mask=counted, sem="relaxed")
    place = tl.minimum(layer, PLACES - 1).to(tl.int64) * PLACES + tl.minimum(head, PLACES - 1)
    packed = (meter.to(tl.int32, bitcast=True).to(tl.int64) << 32) + place
    tl.atomic_max(Telemetry + WORST, packed, mask=counted, sem="relaxed")


@triton.jit(do_not_specialize=["layer", "total", "splits", "known_splits"])
def _merge_kernel(
    Acc,
    Stats,
    Shift,
    Bad,
    Sinks,
    Out,
    Lse,
    Meter,
    Eform,
    Risk,
    ErrorBound,
    Compressed,
    Telemetry,
    layer,
    total,
    splits,
    known_splits,
    tokens,
    relative,
    wide_relative,
    row_error,
    sum_error,
    out_error,
    out_floor,
    value_floor,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    SP: tl.constexpr,
    KNOWN: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ADD_SHIFT: tl.constexpr,
    UNDERFLOW: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_ERROR: tl.constexpr,
    UP: tl.constexpr,
    LN2: tl.constexpr,
    LOG2E: tl.constexpr,
    TAUS: tl.constexpr,
):
    """One row: the splits' sums under one maximum, then what :func:`witcert_kernels.state.finish` evaluates."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DVP)
    some = tl.arange(0, SP)
    zero = tl.zeros((), tl.float64)
    m = zero + float("-inf")
    m_wide = zero + float("-inf")
    for first in range(0, splits, SP):
        split, present = first + some, first + some < splits
        m = tl.maximum(m, tl.max(_field(Stats, M, split, present, splits, total, row, float("-inf")), 0))
        wide = _field(Stats, M_WIDE, split, present, splits, total, row, float("-inf"))
        m_wide = tl.maximum(m_wide, tl.max(wide, 0))
    l = zero  # noqa: E741
    z_row = zero
    known_m = m
    if KNOWN:
        known_m = zero + float("-inf")
        r_top = zero + (0.0 if HAS_SINKS else float("-inf"))
        for first in range(0, splits, SP):
            split, read = first + some, first + some < known_splits
            other = _field(Stats, M, split, (read == 0) & (split < splits), splits, total, row, float("-inf"))
            mine = _field(Stats, KNOWN_M, split, read, splits, total, row, float("-inf"))
            known_m = tl.maximum(known_m, tl.max(tl.where(read, mine, other), 0))
            mine = _field(Stats, R_TOP, split, read, splits, total, row, float("-inf"))
            r_top = tl.maximum(r_top, tl.max(tl.where(other > float("-inf"), 0.0, mine), 0))
    if HAS_SINKS:
        sink = tl.load(Sinks + row % HEADS).to(tl.float64) * LOG2E
        m = tl.maximum(m, tl.ceil(sink))
        known_m = tl.maximum(known_m, tl.ceil(sink))
        l = tl.exp2(sink - m)  # noqa: E741
        z_row = (1.0 + tl.abs(sink)) * U
    base = tl.where(m == float("-inf"), 0.0, m)
    base_wide = tl.where(m_wide == float("-inf"), 0.0, m_wide)

    a1 = zero
    a2 = zero
    c_max = zero
    z_max = zero
    rho = zero
    norm = zero
    l_wide = zero
    count = zero
    acc = tl.zeros((DVP,), tl.float64)
    for first in range(0, splits, SP):
        split, present = first + some, first + some < splits
        weight = power_of_two_wide(_field(Stats, M, split, present, splits, total, row, float("-inf")) - base)
        wide = _field(Stats, M_WIDE, split, present, splits, total, row, float("-inf")) - base_wide
        l += tl.sum(weight * _field(Stats, L, split, present, splits, total, row, 0.0), 0)  # noqa: E741
        a1 += tl.sum(rescale(_field(Stats, A1, split, present, splits, total, row, 0.0), weight), 0)
        a2 += tl.sum(rescale(_field(Stats, A2, split, present, splits, total, row, 0.0), weight), 0)
        rho += tl.sum(rescale(_field(Stats, RHO, split, present, splits, total, row, 0.0), weight), 0)
        mass = power_of_two_wide(wide) * _field(Stats, L_WIDE, split, present, splits, total, row, 0.0)
        l_wide += tl.sum(mass, 0)
        c_max = tl.maximum(c_max, tl.max(_field(Stats, C_MAX, split, present, splits, total, row, 0.0), 0))
        z_max = tl.maximum(z_max, tl.max(_field(Stats, Z_MAX, split, present, splits, total, row, 0.0), 0))
        z_row = tl.maximum(z_row, tl.max(_field(Stats, Z_ROW, split, present, splits, total, row, 0.0), 0))
        norm = tl.maximum(norm, tl.max(_field(Stats, NORM, split, present, splits, total, row, 0.0), 0))
        count += tl.sum(_field(Stats, COUNT, split, present, splits, total, row, 0.0), 0)
        at = Acc + (split.to(tl.int64)[:, None] * total + row) * DV + column[None, :]
        part = tl.load(at, mask=present[:, None] & (column < DV)[None, :], other=0.0).to(tl.float64)
        acc += tl.sum(part * weight[:, None], 0)

    seen = l > 0
    l = tl.where(seen, l, 1.0)  # noqa: E741
    bad = (tl.load(Bad + row) != 0) | (c_max == float("inf"))
    # the rounding error that all tokens of a row share comes on top of every c
    zeta = tl.minimum(z_row * (LN2 * UP) + row_error, 40.0)
    grown = tl.exp(zeta)
    rise = (grown - 1.0) * UP
    a2 = grown * grown * a2 + 2.0 * grown * rise * a1 + rise * rise * l
    a1 = grown * a1 + rise * l
    c_max = tl.where(c_max == float("inf"), 0.0, c_max) * (LN2 * UP) + zeta
    relative = relative + tl.where(c_max > WIDE, c_max * WIDE_ERROR, 0.0)
    largest = tl.exp(tl.minimum(c_max, WIDE))
    floor = tokens * UNDERFLOW
    bound, a1_up = _bound(l, a1, a2, c_max, relative, floor * largest * largest / l)
    rounded = _half_tanh(z_max * (LN2 * UP) + zeta) + floor
    meter = tl.minimum((bound + rounded) * UP, 1.0)
    meter = tl.where(bad, 1.0, tl.where(seen, meter, 0.0))
    eform = tl.where(bad, float("inf"), tl.where(seen, a1_up + a1_up * a1_up / 2.0, 0.0))

    if KNOWN:
        # exact tokens have r = 0 and c = 0
        known_base = tl.where(known_m == float("-inf"), 0.0, known_m)
        r_base = tl.where(r_top == float("-inf"), 0.0, r_top)
        unmoved = power_of_two_wide(tl.minimum(-r_base, 0.0))  # r_top < 0 only where no token has r = 0
        known_l = tl.exp2(sink - known_base) if HAS_SINKS else zero
        er = known_l * unmoved
        ee = er * unmoved
        known_a1 = zero
        known_a2 = zero
        known_c = zero
        for first in range(0, splits, SP):
            split, read = first + some, first + some < known_splits
            exact = (read == 0) & (split < splits)
            other = _field(Stats, M, split, exact, splits, total, row, float("-inf"))
            weight = power_of_two_wide(other - known_base)
            mass = tl.sum(weight * _field(Stats, L, split, exact, splits, total, row, 0.0), 0)
            known_l += mass
            er += mass * unmoved
            ee += mass * unmoved * unmoved
            weight = power_of_two_wide(
                _field(Stats, KNOWN_M, split, read, splits, total, row, float("-inf")) - known_base
            )
            known_l += tl.sum(weight * _field(Stats, KNOWN_L, split, read, splits, total, row, 0.0), 0)
            known_a1 += tl.sum(rescale(_field(Stats, KNOWN_A1, split, read, splits, total, row, 0.0), weight), 0)
            known_a2 += tl.sum(rescale(_field(Stats, KNOWN_A2, split, read, splits, total, row, 0.0), weight), 0)
            turn = power_of_two_wide(_field(Stats, R_TOP, split, read, splits, total, row, float("-inf")) - r_base)
            er += tl.sum(_field(Stats, ER, split, read, splits, total, row, 0.0) * turn * weight, 0)
            ee += tl.sum(_field(Stats, EE, split, read, splits, total, row, 0.0) * turn * turn * weight, 0)
            known_c = tl.maximum(known_c, tl.max(_field(Stats, KNOWN_C_MAX, split, read, splits, total, row, 0.0), 0))
        known_l = tl.where(known_l > 0, known_l, 1.0)
        # Σ e^w Σ e^(w + 2 r) over (Σ e^(w + r))² is 1 + sd²/mean² of e^r; as e^(r − r_top) ≤ 1 underflow takes at most
        # a floor from each sum
        ratio = ee / er * (known_l / er)
        trusted = (known_c < float("inf")) & (er > 0) & (ratio < float("inf"))
        ratio = tl.where(trusted, ratio, 1.0)
        er = tl.where(trusted, er, 1.0)
        spread = tl.maximum(ratio - 1.0, 0.0) + 8.0 * wide_relative * ratio + 4.0 * floor / er * (known_l / er)
        deviation = tl.sqrt(spread) / 2.0 * UP
        known_a2 = grown * grown * known_a2 + 2.0 * grown * rise * known_a1 + rise * rise * known_l
        known_a1 = grown * known_a1 + rise * known_l
        known_c = tl.where(trusted, known_c, 0.0) * (LN2 * UP) + zeta
        known_relative = relative + tl.where(known_c > WIDE, known_c * WIDE_ERROR, 0.0)
        largest = tl.exp(tl.minimum(known_c, WIDE))
        rest, _ = _bound(known_l, known_a1, known_a2, known_c, known_relative, floor * largest * largest / known_l)
        # r as it was read differs from the real one, and y − r from w, by a rounding error each; the exact tokens' mass
        # is a sum in float32
        two_part = (deviation + rest + _half_tanh(3.0 * zeta + relative) + floor) * UP
        meter = tl.where(trusted & seen & (bad == 0), tl.minimum(meter, two_part), meter)

    # where Σ e^(x + c) left float32's range, what is left of it are the large c and at most e^(WIDE + 1) a weight more
    huge = tl.log(tl.where(l_wide > 0, l_wide, 1.0)) + (base_wide - base) * LN2
    least = tl.log(l) + (WIDE + 1.0)
    more = tl.maximum(huge, least)
    huge = more + tl.log(tl.exp(huge - more) + tl.exp(least - more)) - tl.log(l)
    risk = tl.where(a1 == float("inf"), huge, tl.log(1.0 + tl.where(a1 == float("inf"), 0.0, a1) / l))
    risk = tl.where(bad, float("inf"), tl.where(seen, tl.maximum(risk, 0.0), 0.0))

    error = 2.0 * meter * norm + rho / l * (1.0 + sum_error) + (sum_error + value_floor / l) * norm
    error = (error + out_error * (norm + error) + out_floor) * UP
    error = tl.where(bad & (norm == float("inf")), float("inf"), tl.where(seen, error, 0.0))
    lse = (base + tl.log(l) * LOG2E) * LN2
    if ADD_SHIFT:
        lse += tl.load(Shift + row) * LN2
    out = tl.where(seen, acc / l, 0.0).to(tl.float32)
    if Out.dtype.element_ty == tl.float16:  # the exact output is within v's range: clamping to it can only help
        out = tl.minimum(tl.maximum(out, -65504.0), 65504.0)
    tl.store(Out + row * DV + column, out.to(Out.dtype.element_ty), mask=column < DV)
    tl.store(Lse + row, tl.where(seen, lse, float("-inf")).to(tl.float32))
    reported = _upper(meter)
    tl.store(Meter + row, reported)
    if TAUS >= 0:
        _count_cell(
            Telemetry, reported, risk == float("inf"), error == float("inf"), layer, row % HEADS, count > 0, TAUS
        )
    tl.store(Eform + row, _upper(eform))
    tl.store(Risk + row, _upper(risk))
    tl.store(ErrorBound + row, _upper(error))
    tl.store(Compressed + row, count.to(tl.int32))


def merge(
    acc: Tensor,
    stats: Tensor,
    shift: Tensor | None,
    bad: Tensor,
    sinks: Tensor | None,
    like: Tensor,
    *,
    tokens: int,
    tile: int,
    cap: float,
    weight_error: float,
    known_slots: int = 0,
    telemetry: Tensor | None = None,
    layer: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Merge splits and evaluate. Returns out, lse, meter, eform, risk, value_error, compressed.

    Args:
        acc, stats: what the splits left, see the module.
        shift: float64 ``[rows, heads]`` in base 2, added to lse, or None where the logits have it.
        bad: int8 ``[rows, heads]``, queries that are not finite.
        sinks: ``[heads]`` or None.
        like: the queries, ``[rows, heads, d]``; out has their dtype.
        tokens: most tokens that a row can attend to.
        tile: tokens a tile.
        cap: the soft cap.
        weight_error: relative error of a weight, and of v̂, as they enter their product.
        known_slots: slots with a second set of sums, the first ones; the others hold exact tokens.
        telemetry, layer: buffer of a :class:`witcert_kernels.Telemetry` that counts the cells, as of this layer.
    """
    (n, heads, _), (splits, _, d_v) = like.shape, acc.shape
    lse, meter, eform, risk, error = (like.new_empty(n, heads, dtype=torch.float32) for _ in range(5))
    out, compressed = like.new_empty(n, heads, d_v), like.new_empty(n, heads, dtype=torch.int32)
    out_error, out_floor = cast_error(like.dtype)
    if n:
        _merge_kernel[(n * heads,)](
            acc, stats, bad if shift is None else shift, bad, bad if sinks is None else sinks, out, lse, meter,
            eform, risk, error, compressed, bad if telemetry is None else telemetry, min(layer, counting.PLACES),
            n * heads, splits, known_slots, float(tokens), (tile + 8) * rounding.U,
            (tile + tokens / tile + 2 * splits + 16) * 2.0**-53,
            rounding.TRITON_EXP_ERROR + cap * rounding.TRITON_TANH_ERROR,
            weight_error + (2 * tile + 2 * tokens / tile + 16) * rounding.U, out_error, out_floor * math.sqrt(d_v),
            tokens * 2.0**-36 * math.sqrt(d_v), HEADS=heads, DV=d_v, DVP=triton.next_power_of_2(d_v),
            SP=min(16, triton.next_power_of_2(splits)), KNOWN=known_slots > 0,
            HAS_SINKS=sinks is not None, ADD_SHIFT=shift is not None,
            UNDERFLOW=rounding.TRITON_UNDERFLOW, WIDE=rounding.WIDE, WIDE_ERROR=rounding.WIDE_ERROR,
            UP=rounding.FLOAT_UP, LN2=math.log(2), LOG2E=math.log2(math.e),
            TAUS=-1 if telemetry is None else counting.count_taus(telemetry), num_warps=1 if d_v <= 128 else 4,
        )  # fmt: skip
    return out, lse, meter, eform, risk, error, compressed


def weight_error(dtype: torch.dtype, exact: bool, groups_v: int) -> float:
    """Relative error of casting a weight, and a value of several groups, for their product."""
    if dtype == torch.float32:
        return 0.0
    half = 2.0**-11 * (1 if groups_v == 1 else 2 + 2.0**-10)
    return max(half, torch.finfo(dtype).eps / 2 if exact else 0.0)
