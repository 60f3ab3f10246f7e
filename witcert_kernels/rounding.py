"""The error budget: every constant by which a reported bound exceeds its real-number formula.

U is the unit roundoff of float32. Logit errors are in natural-log units.

============== =============================================================================================
STEP_WIDEN     the writer's own rounding of (k − μ)/f, of x/s (+ ξ) and of s·code: three float32 roundings of a
               number of at most 127.5 steps, 1.2e-4 of half a step, are below 2^-12
DELTA_WIDEN    the sketch coordinate's own rounding: a float64 sum on the CPU, float32 in a kernel, of at most
               1024 products of 127 units, below 2^-5 of half a unit
FLOAT_UP       turns a few float32 roundings of a non-negative number into an upper bound
DOT_EXTRA      roundings of a logit besides its dot product's d additions: z = q∘f, the sketch's r terms are
               counted by the caller, times s, times sm_scale, less the dither's scalar, plus the sketch's
LOGIT_ADDS     roundings of the running logit: bypass, shift, bias, cap
EXP_ERROR      exp's own error as a logit error: 2 units in the last place
TANH_ERROR     tanh's own error over the cap: 2 units in the last place
MOMENT_REL     relative error of a moment: float32 products, float64 sums
UNDERFLOW      weights below float32's normal range, a token
============== =============================================================================================
"""

from __future__ import annotations

U = 2.0**-24
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
