"""Every computable definition of the Lean development, at 60 digits.

Names are the Lean names in snake case. The right side of a theorem that has no name of its own in Lean is named after
the theorem. Vectors are sequences of numbers, indexed by token, channel or band.
"""

# mypy: disable-error-code="import-untyped"
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import product
from typing import TypeAlias

from mpmath import MPContext, mpc, mpf

CTX = MPContext()
CTX.dps = 60

Real: TypeAlias = mpf | float
Vector: TypeAlias = Sequence[Real]
Pair: TypeAlias = tuple[Real, Real]
Head: TypeAlias = Sequence[Pair]
Dither: TypeAlias = tuple[int, ...]
HALF = CTX.mpf(1) / 2


def real(x: Real) -> mpf:
    """A number of `ℝ`."""
    return CTX.convert(x)


def total(terms: Iterable[Real]) -> mpf:
    """`∑`."""
    return sum((real(x) for x in terms), CTX.zero)


def norm(v: Vector) -> mpf:
    """The Euclidean norm, one instance of the norm of `output_error_le`."""
    return CTX.sqrt(total(real(x) ** 2 for x in v))


# Basic


def is_prob(p: Vector, slack: Real = 0) -> bool:
    """`IsProb`, up to `slack`."""
    return all(x >= 0 for x in p) and abs(total(p) - 1) <= slack


def tv(p: Vector, q: Vector) -> mpf:
    """`tv`."""
    return HALF * total(abs(real(x) - real(y)) for x, y in zip(p, q, strict=True))


def softmax(x: Vector) -> list[mpf]:
    """`softmax`."""
    weights = [CTX.exp(real(t)) for t in x]
    return [w / total(weights) for w in weights]


def tilt_z(p: Vector, eps: Vector) -> mpf:
    """`tiltZ`."""
    return total(real(x) * CTX.exp(-real(e)) for x, e in zip(p, eps, strict=True))


def tilt(p: Vector, eps: Vector) -> list[mpf]:
    """`tilt`."""
    z = tilt_z(p, eps)
    return [real(x) * CTX.exp(-real(e)) / z for x, e in zip(p, eps, strict=True)]


def exp_mean(p: Vector, c: Vector) -> mpf:
    """`expMean`."""
    return total(real(x) * CTX.exp(real(t)) for x, t in zip(p, c, strict=True))


def exp_var(p: Vector, c: Vector) -> mpf:
    """`expVar`."""
    mean = exp_mean(p, c)
    return total(real(x) * (CTX.exp(real(t)) - mean) ** 2 for x, t in zip(p, c, strict=True))


def exp_var_eq(p: Vector, c: Vector) -> mpf:
    """The right side of `expVar_eq`."""
    excess = [CTX.expm1(real(t)) for t in c]
    square = total(real(x) * t**2 for x, t in zip(p, excess, strict=True))
    return square - total(real(x) * t for x, t in zip(p, excess, strict=True)) ** 2


def exp_sd(p: Vector, c: Vector) -> mpf:
    """`√(expVar p c)`."""
    return CTX.sqrt(exp_var(p, c))


def tv_eq_sum_pos(p: Vector, q: Vector) -> mpf:
    """The right side of `tv_eq_sum_pos`."""
    return total(real(y) - real(x) for x, y in zip(p, q, strict=True) if real(x) < real(y))


# Certificate


def mass_tilt_le(p: Vector, c: Vector, members: Collection[int]) -> mpf:
    """`X / (X + B)` of `mass_tilt_le`."""
    inside = total(real(p[t]) * CTX.exp(real(c[t])) for t in members)
    outside = total(real(p[t]) * CTX.exp(-real(c[t])) for t in range(len(p)) if t not in members)
    return inside / (inside + outside)


def eform(a: Real) -> mpf:
    """The right side of `tv_tilt_le_eform`, as a function of `A`."""
    return HALF * (real(a) ** 2 - 1)


def twosided(p: Vector, c: Vector) -> mpf:
    """The right side of `tv_tilt_le_twosided`."""
    up = exp_mean(p, c)
    down = exp_mean(p, [-real(t) for t in c])
    return HALF * (up / down - down / up)


def sharp_mad(p: Vector, c: Vector) -> mpf:
    """The right side of `tv_tilt_le_sharp_mad`."""
    a = exp_mean(p, c)
    deviation = total(real(x) * abs(CTX.exp(real(t)) - a) for x, t in zip(p, c, strict=True))
    return (a - 1 + HALF * deviation) / (a + 1)


def sharp(a: Real, sigma: Real) -> mpf:
    """`sharp`."""
    return (real(a) - 1 + real(sigma) / 2) / (real(a) + 1)


def phi(a: Real) -> mpf:
    """`phi`."""
    a = real(a)
    return 1 - 1 / a if a <= 2 else a**2 / (a**2 + 4)


def tanh(c_max: Real) -> mpf:
    """The right side of `tv_tilt_le_tanh`."""
    return CTX.tanh(real(c_max) / 2)


def rc_tanh(c_max: Real) -> mpf:
    """The right side of `tv_tilt_le_rc_tanh`."""
    return CTX.tanh(real(c_max))


def meter(a: Real, sigma: Real, c_max: Real) -> mpf:
    """`meter`."""
    return min(phi(a), min(sharp(a, sigma), tanh(c_max)))


def tv_tilt_le_meter(p: Vector, c: Vector, c_max: Real) -> mpf:
    """The right side of `tv_tilt_le_meter`."""
    return meter(exp_mean(p, c), exp_sd(p, c), c_max)


def sharp_attained(c_max: Real) -> tuple[list[mpf], list[mpf]]:
    """The witnesses `p` and `ε` of `sharp_attained`."""
    c = real(c_max)
    e = CTX.exp(c)
    return [1 / (e + 1), e / (e + 1)], [-c, c]


# Counterexample


def dispersion_bound(p: Vector, c: Vector, c_max: Real) -> mpf:
    """`dispersionBound`."""
    m = total(real(x) * real(t) for x, t in zip(p, c, strict=True))
    spread = total(real(x) * abs(real(t) - m) for x, t in zip(p, c, strict=True))
    return HALF * CTX.exp(2 * real(c_max)) * (spread + m * (CTX.exp(real(c_max)) - 1))


def variance_averaged(p: Vector, c: Vector) -> mpf:
    """The left side of `variance_averaged_unsound`."""
    return HALF * (CTX.exp(2 * CTX.sqrt(total(real(x) * real(t) ** 2 for x, t in zip(p, c, strict=True)))) - 1)


def page_drop(p: Vector, c: Vector, dropped: int) -> mpf:
    """The left side of `page_drop_not_exact`."""
    return exp_mean(p, c) - real(p[dropped]) * (CTX.exp(real(c[dropped])) - 1)


# Rope


def dot(x: Head, y: Head) -> mpf:
    """`dot`."""
    return total(real(a) * real(c) + real(b) * real(d) for (a, b), (c, d) in zip(x, y, strict=True))


def sub(x: Head, y: Head) -> list[Pair]:
    """Subtraction of heads."""
    return [(real(a) - real(c), real(b) - real(d)) for (a, b), (c, d) in zip(x, y, strict=True)]


def band_norm(band: Sequence[int], x: Head, b: int) -> mpf:
    """`bandNorm`."""
    return CTX.sqrt(total(real(u) ** 2 + real(v) ** 2 for j, (u, v) in zip(band, x, strict=True) if j == b))


def band_norms(band: Sequence[int], x: Head, bands: int) -> list[mpf]:
    """`bandNorm` for every band."""
    return [band_norm(band, x, b) for b in range(bands)]


def rope(theta: Vector, n: Real, x: Head) -> list[Pair]:
    """`rope`."""
    angles = [real(n) * real(t) for t in theta]
    return [
        (CTX.cos(a) * real(u) - CTX.sin(a) * real(v), CTX.sin(a) * real(u) + CTX.cos(a) * real(v))
        for a, (u, v) in zip(angles, x, strict=True)
    ]


def logit_bound(band: Sequence[int], scale: Real, q: Head, w: Vector) -> mpf:
    """The right side of `abs_logit_error_le`."""
    norms = band_norms(band, q, len(w))
    return real(scale) * total(a * real(b) for a, b in zip(norms, w, strict=True))


# TierA


def logits(scale: Real, q: Head, keys: Sequence[Head]) -> list[mpf]:
    """The logits of `tierA_certificate`."""
    return [real(scale) * dot(q, k) for k in keys]


def tier_a_certificate(band: Sequence[int], scale: Real, q: Head, stored: Sequence[Head], w: Sequence[Vector]) -> mpf:
    """The right side of `tierA_certificate`, with the smallest `C`."""
    c = [logit_bound(band, scale, q, x) for x in w]
    return tv_tilt_le_meter(softmax(logits(scale, q, stored)), c, max(c))


# Dither


def grid(n: int, i: int) -> mpf:
    """`grid`."""
    return real(2 * i + 1) / (2 * n) - HALF


def round_half_up(x: Real) -> mpf:
    """`round` of Mathlib: ties go up."""
    return CTX.floor(real(x) + HALF)


def code(y: Real, xi: Real) -> mpf:
    """The code `round (y + ξ)` of `abs_code_le`."""
    return round_half_up(real(y) + real(xi))


def residual(y: Real, xi: Real) -> mpf:
    """`residual`."""
    return code(y, xi) - real(xi) - real(y)


def mgf_residual(n: int, y: Real, slope: Real) -> tuple[mpf, mpf]:
    """Both sides of `mgf_residual`."""
    left = total(CTX.exp(real(slope) * residual(y, grid(n, i))) for i in range(n)) / n
    return left, CTX.exp(real(slope) ** 2 / 24 + abs(real(slope)) / (2 * n))


def mgf_progression(n: int, start: Real, slope: Real) -> tuple[mpf, mpf]:
    """Both sides of `mgf_progression`."""
    start, slope = real(start), real(slope)
    left = total(CTX.exp(slope * (start + real(i) / n)) for i in range(n)) / n
    return left, CTX.exp(slope * (start + real(n - 1) / (2 * n)) + slope**2 / 24)


def sinh_le_mul_exp(x: Real) -> tuple[mpf, mpf]:
    """Both sides of `sinh_le_mul_exp`."""
    return CTX.sinh(real(x)), real(x) * CTX.exp(real(x) ** 2 / 6)


def sinh_nat_mul_le(n: int, x: Real) -> tuple[mpf, mpf]:
    """Both sides of `sinh_nat_mul_le`."""
    x = real(x)
    return CTX.sinh(n * x), n * CTX.sinh(x) * CTX.exp((n**2 - 1) * x**2 / 6)


def mul_cosh_sub_sinh_le(t: Real) -> tuple[mpf, mpf]:
    """Both sides of `mul_cosh_sub_sinh_le`."""
    t = real(t)
    return t * CTX.cosh(t) - CTX.sinh(t), t**2 / 3 * CTX.sinh(t)


# TierB


def dithers(d: int, n: int) -> list[Dither]:
    """The probability space `Fin d → Fin n`."""
    return list(product(range(n), repeat=d))


def frac(d: int, n: int, event: Callable[[Dither], bool]) -> mpf:
    """`frac`."""
    draws = dithers(d, n)
    return total(event(w) for w in draws) / len(draws)


def logit_error(scale: Real, n: int, q: Vector, s: Vector, y: Vector, w: Dither) -> mpf:
    """`logitError`."""
    steps = zip(q, s, y, w, strict=True)
    return real(scale) * total(real(a) * (real(b) * residual(v, grid(n, i))) for a, b, v, i in steps)


def proxy(scale: Real, q: Vector, s: Vector) -> mpf:
    """`proxy`."""
    return real(scale) ** 2 * total(real(a) ** 2 * real(b) ** 2 / 12 for a, b in zip(q, s, strict=True))


def bias(scale: Real, n: int, q: Vector, s: Vector) -> mpf:
    """`bias`."""
    return real(scale) * total(abs(real(a)) * real(b) / (2 * n) for a, b in zip(q, s, strict=True))


def radius(scale: Real, n: int, q: Vector, s: Vector, level: Real) -> mpf:
    """`radius`."""
    return CTX.sqrt(2 * proxy(scale, q, s) * real(level)) + bias(scale, n, q, s)


def mgf_logit_error(scale: Real, n: int, q: Vector, s: Vector, y: Vector, slope: Real) -> tuple[mpf, mpf]:
    """Both sides of `mgf_logitError`."""
    slope = real(slope)
    draws = dithers(len(q), n)
    left = total(CTX.exp(slope * logit_error(scale, n, q, s, y, w)) for w in draws) / len(draws)
    return left, CTX.exp(slope**2 * proxy(scale, q, s) / 2 + abs(slope) * bias(scale, n, q, s))


def tier_b_token(level: Real) -> mpf:
    """The right side of `tierB_token`."""
    return 2 * CTX.exp(-real(level))


def tier_b_level(tokens: int, delta: Real) -> mpf:
    """The level `log (2 |ι| / δ)` of `tierB_all_tokens`."""
    return CTX.log(2 * tokens / real(delta))


def tier_b_logits(scale: Real, q: Vector, s: Sequence[Vector], y: Sequence[Vector]) -> list[mpf]:
    """The exact logits `x` of `tierB_certificate`."""
    keys = [[real(a) * real(b) for a, b in zip(st, yt, strict=True)] for st, yt in zip(s, y, strict=True)]
    return [real(scale) * total(real(a) * b for a, b in zip(q, k, strict=True)) for k in keys]


# Budget


def delta_local(delta_req: Real, layers: int, heads: int, steps: int) -> mpf:
    """`deltaLocal`."""
    return real(delta_req) / (layers * heads * steps)


def any_of_group(meters: Vector, threshold: Real) -> bool:
    """The condition `∃ g, τ < meter g` of `any_of_group`."""
    return any(real(threshold) < real(m) for m in meters)


# Output


def weighted(p: Vector, v: Sequence[Vector]) -> list[mpf]:
    """`∑ t, p t • v t`."""
    return [total(real(x) * real(row[i]) for x, row in zip(p, v, strict=True)) for i in range(len(v[0]))]


def output_bound(p: Vector, q: Vector, r: Real, rho: Vector) -> mpf:
    """The right side of `output_error_le`."""
    return 2 * tv(p, q) * real(r) + total(real(x) * real(e) for x, e in zip(q, rho, strict=True))


# Merge


def average(w: Vector, f: Vector) -> mpf:
    """The left side of `merge_splits`."""
    return total(real(x) * real(y) for x, y in zip(w, f, strict=True)) / total(w)


def merge_splits(split: Sequence[int], w: Vector, f: Vector) -> mpf:
    """The right side of `merge_splits`."""
    parts = [[t for t, k in enumerate(split) if k == s] for s in sorted(set(split))]
    return total(
        total(w[t] for t in part) / total(w) * average([w[t] for t in part], [f[t] for t in part]) for part in parts
    )


def sum_blockwise(block: Sequence[int], p: Vector, g: Vector) -> mpf:
    """The right side of `sum_blockwise`."""
    return total(total(x for x, k in zip(p, block, strict=True) if k == b) * real(y) for b, y in enumerate(g))


def repaired(c: Vector, tokens: Collection[int]) -> list[mpf]:
    """`c'` of `tv_tilt_le_meter_of_repaired`."""
    return [CTX.zero if t in tokens else real(x) for t, x in enumerate(c)]


def evict(p: Vector, kept: Collection[int]) -> list[mpf]:
    """The renormalised distribution of `tv_evict`."""
    mass = total(p[t] for t in kept)
    return [real(x) / mass if t in kept else CTX.zero for t, x in enumerate(p)]


def evicted_mass(p: Vector, kept: Collection[int]) -> mpf:
    """The right side of `tv_evict`."""
    return total(x for t, x in enumerate(p) if t not in kept)


# Rounding


def logit_error_of_relative(eta: Real) -> mpf:
    """The right side of `abs_log_le_of_relative`."""
    return -CTX.log(1 - real(eta))


def fl_sum(terms: Vector, errors: Vector) -> mpf:
    """A value of `FlSum`: the last term is added first, each addition with its own relative error."""
    value = CTX.zero
    for x, e in zip(reversed(terms), reversed(errors), strict=True):
        value = (value + real(x)) * (1 + real(e))
    return value


def sum_le_fl_sum_div(value: Real, unit: Real, length: int) -> mpf:
    """The right side of `sum_le_flSum_div`."""
    return real(value) / (1 - real(unit)) ** length


def fl_sum_div_le_sum(value: Real, unit: Real, length: int) -> mpf:
    """The left side of `flSum_div_le_sum`."""
    return real(value) / (1 + real(unit)) ** length


# Rigidity


def sketch(m: Sequence[Sequence[mpc]], n: Sequence[Sequence[mpc]], z: Sequence[mpc]) -> list[mpc]:
    """`sketch`."""
    return [
        sum((a * x + b * CTX.conj(x) for a, b, x in zip(row, conj_row, z, strict=True)), CTX.mpc(0))
        for row, conj_row in zip(m, n, strict=True)
    ]


def rope_c(theta: Vector, n: int, z: Sequence[mpc]) -> list[mpc]:
    """`ropeC`."""
    return [CTX.expj(n * real(t)) * x for t, x in zip(theta, z, strict=True)]
