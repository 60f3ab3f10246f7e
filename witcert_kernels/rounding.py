"""The error budget: the constants by which a reported bound exceeds its real-number formula. Factors such as
1 + 2^-20, and numbers of terms in a sum, are beside the formula that they serve.

U is the unit roundoff of float32. U64 is twice that of float64: sums of bypass pairs, of the shift and of exact keys,
relative to the magnitudes that they add. Logit errors are in natural-log units.

============== =============================================================================================
STEP_WIDEN     the writer's own rounding of (k − μ)/f, of x/s (+ ξ) and of s·code: three float32 roundings of a
               number of at most 127.5 steps, 1.2e-4 of half a step, are below 2^-12
DELTA_WIDEN    the sketch coordinate's own rounding: a float64 sum on the CPU, float32 in a kernel, of at most
               1024 products of 127 units, below 2^-5 of half a unit
FLOAT_UP       turns a few float32 roundings of a non-negative number into an upper bound
DOT_EXTRA      roundings of a logit besides its dot product's d additions: z = q∘f, the sketch's r terms are
               counted by the caller, times s, times sm_scale, less the dither's scalar, plus the sketch's
LOGIT_ADDS     roundings of the running logit, relative to the largest that it or an added term was: bypass, shift,
               bias, cap
EXP_ERROR      exp's own error as a logit error: 2 units in the last place
TANH_ERROR     tanh's own error over the cap: 2 units in the last place
MOMENT_REL     relative error of a moment: float32 products, float64 sums
UNDERFLOW      weights below float32's normal range, a token
============== =============================================================================================

The Triton kernels keep logits in base 2, sums over a tile in float32 and sums over tiles in float64; a running maximum
is an integer, so that rescaling is exact. Their own constants:

================== =========================================================================================
DIGIT_LIMIT        largest integer that n balanced base-256 digits hold, a query channel in units of its row's
DIGIT_TERMS        roundings of a logit, relative to Σ |z| 127.5 s: two for the digits, the unit, the dither's
                   scalar (its own sum: d / 128), s, and one each for the six additions and products up to the
                   cap; 2 r for the sketch and one a group are added by the caller
ADD_ERROR          the same six, relative to what a bypass pair, the shift or a bias adds
DOT_ERROR          a channel of a dot product on tensor cores, which truncate to 24 bits
TRITON_EXP_ERROR   rounding of x − m above 2^-128, 128 U, and ex2.approx, 2^-21 relative, in natural-log units
TRITON_TANH_ERROR  the soft cap's error over the cap
RISE               coefficients of 2^c − 1 over c up to RISE_LIMIT, lowest first: the quotient's polynomial of least
                   relative error, scaled until it is 16 U above. Horner's nine roundings of positive terms, fewer
                   with fused multiply-adds, take 9 U, so what float32 computes is an upper bound, at most 2^-17 above
                   (bench/rise_bound.py tries every float32). Where the result is below 2^-126 TRITON_UNDERFLOW has it
RISE_LIMIT         largest c in base 2 of the polynomial, one nat
RISE_UP            makes ex2.approx(c) − 1 an upper bound beyond it; what is computed then defines c
FLUSHED            what flushing to zero may take from the square of a channel, in a norm
TRITON_UNDERFLOW   what flushing to zero may take from a token's term, relative to the running maximum's
WIDE_ERROR         relative error of e^x e^c multiplied in the exponent, over the largest c, beyond WIDE
================== =========================================================================================
"""

from __future__ import annotations

U = 2.0**-24
U64 = 2.0**-52
STEP_WIDEN = 1 + 2.0**-12
DELTA_WIDEN = 1 + 2.0**-5
FLOAT_UP = 1 + 2.0**-20
DOT_EXTRA = 12
LOGIT_ADDS = 6
EXP_ERROR = 2.0**-22
TANH_ERROR = 2.0**-22
MOMENT_REL = 2.0**-21
UNDERFLOW = 2.0**-125
CODE_MAX = 127.5

DIGIT_LIMIT = {2: 32639, 3: 8355711}
DIGIT_TERMS = 16
ADD_ERROR = 8 * U
DOT_ERROR = 2 * U
TRITON_EXP_ERROR = 128 * U + 2.0**-21
TRITON_TANH_ERROR = 2.0**-20
RISE = (
    0.6931523084640503,
    0.2401455193758011,
    0.055974267423152924,
    0.008703598752617836,
    0.0020258636213839054,
)
RISE_LIMIT = 1.4427
RISE_UP = 1 + 2.0**-20
FLUSHED = 2.0**-126
TRITON_UNDERFLOW = 2.0**-124
WIDE = 19.0
WIDE_ERROR = 2.0**-18
