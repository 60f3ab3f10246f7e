"""From a bound on each token's logit error to a bound on the total variation of attention.

Every function takes `p_tilde` [..., tokens], attention over compressed keys, and `c` [..., tokens] >= 0, bounds on
the logit errors (natural-log units; +Inf where nothing is known), and returns [...]. With A = Σ p̃ e^c = 1 + a1 and
σ² = Σ p̃ (e^c - A)², no A - 1 and no A² - … is ever formed by subtraction, and c is never truncated: what overflows
becomes its limit.

All raise ValueError where p̃ is not a probability vector, where c is negative or NaN, or where the shapes do not
broadcast.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from witcert_ref._checks import Array, floats, nonnegative, same_last_axis
from witcert_ref.spec import implements
from witcert_ref.tv import logsumexp

__all__ = [
    "eform",
    "meter",
    "meter_of_moments",
    "moments",
    "phi",
    "rc_tanh",
    "sharp",
    "tanh",
    "two_sided",
    "worst_case",
    "worst_case_lower",
    "worst_case_relaxed",
]

_EXP_MAX = 700.0  # e^700 is finite in float64
_TINY = 1e-290  # below, a weight has lost digits, or all
_ENUMERATED = 16  # tokens whose 2^n sets `worst_case` lists


def _checked(p_tilde: ArrayLike, c: ArrayLike) -> tuple[Array, Array]:
    p, bound = nonnegative("p_tilde", p_tilde), nonnegative("c", c, finite=False)
    same_last_axis("c", bound, p)
    if p.shape[-1] == 0:
        raise ValueError(f"p_tilde: got shape {p.shape}, want at least one token")
    if (np.abs(p.sum(-1) - 1) > 1e-9).any():
        raise ValueError(f"p_tilde: got a sum of {p.sum(-1).flat[np.argmax(np.abs(p.sum(-1) - 1))]}, want 1")
    try:
        p, bound = np.broadcast_arrays(p, bound)
    except ValueError:
        raise ValueError(f"c: got shape {bound.shape}, want one that broadcasts with {p.shape}") from None
    return p, bound


def _log(p: Array, log_p: ArrayLike | None) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(p) if log_p is None else np.broadcast_to(floats("log_p", log_p, finite=False), p.shape)


def _excess(w: Array, c: Array, log_w: Array | None = None) -> Array:
    """w (e^c - 1) for w, c >= 0, overflowing only where the result does; +Inf where c is, also for w = 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        far = np.where(np.isinf(c), np.inf, np.exp((np.log(w) if log_w is None else log_w) + c))
    return np.where((c <= _EXP_MAX) & (w > _TINY), w * np.expm1(np.minimum(c, _EXP_MAX)), np.maximum(far - w, 0.0))


def _mean(p: Array, c: Array, log_p: ArrayLike | None = None) -> Array:
    """a1 = Σ p̃ (e^c - 1)."""
    return np.asarray(np.sum(_excess(p, c, _log(p, log_p)), -1))


def _sigma(p: Array, c: Array, a1: Array, log_p: ArrayLike | None = None) -> Array:
    """The standard deviation of e^c in two passes; +Inf where it, or A, overflows."""
    root = np.sqrt(p)
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.sum(np.square(_excess(root, c, _log(p, log_p) / 2) - root * a1[..., None]), -1)
    return np.where(np.isnan(squares), np.inf, np.sqrt(squares))


def _phi(a1: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return np.where(a1 <= 1, a1 / (1 + a1), 1 / (1 + np.square(2 / (1 + a1))))


def _sharp(a1: Array, sigma: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(a1), np.inf, (a1 + sigma / 2) / (a1 + 2))


def _meter(a1: Array, sigma: Array, c_max: Array) -> Array:
    return np.asarray(np.minimum(np.minimum(_phi(a1), _sharp(a1, sigma)), np.tanh(c_max / 2)))


@implements("WitCert.expVar_eq")
@implements("WitCert.one_le_expMean")
def moments(p_tilde: ArrayLike, c: ArrayLike, log_p: ArrayLike | None = None) -> tuple[Array, Array, Array, Array]:
    """(a1, a2, c_max, log_a): Σ p̃ (e^c - 1), Σ p̃ (e^c - 1)², max c, log Σ p̃ e^c; σ² = a2 - a1².

    log_p: log p̃, for tokens whose p̃ underflows while c is large. log_a is finite whenever c is; a1 and a2 are +Inf
    where they overflow.
    """
    p, bound = _checked(p_tilde, c)
    logs = _log(p, log_p)
    a1, c_max = _mean(p, bound, logs), np.max(bound, -1)
    with np.errstate(over="ignore"):
        a2 = np.sum(np.square(_excess(np.sqrt(p), bound, logs / 2)), -1)
        far = logsumexp(np.where(np.isinf(bound), 0.0, bound) + logs)
    log_a = np.where(np.isinf(c_max), np.inf, np.where(a1 <= 1, np.log1p(a1), far))
    return a1[()], a2[()], c_max[()], log_a[()]


@implements("WitCert.tv_tilt_le_eform")
def eform(p_tilde: ArrayLike, c: ArrayLike, log_p: ArrayLike | None = None) -> Array:
    """½ (A² - 1): the paper's Theorem 1. Not capped at 1. log_p: as for `moments`."""
    a1 = _mean(*_checked(p_tilde, c), log_p)
    with np.errstate(over="ignore"):
        return np.asarray(a1 * (a1 + 2) / 2)[()]


@implements("WitCert.tv_tilt_le_twosided")
def two_sided(p_tilde: ArrayLike, c: ArrayLike) -> Array:
    """½ (A/A⁻ - A⁻/A), A⁻ = Σ p̃ e^(-c): the paper's Proposition 1. Not capped at 1."""
    p, bound = _checked(p_tilde, c)
    a1, below = _mean(p, bound), np.sum(p * np.exp(-bound), -1)
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(0.5 * (a1 - np.sum(p * np.expm1(-bound), -1)) * (1 / below + 1 / (1 + a1)))[()]


@implements("WitCert.tv_tilt_le_rc_tanh")
def rc_tanh(p_tilde: ArrayLike, c: ArrayLike) -> Array:
    """tanh(max c): the shape of Runtime-Certified attention (paper, section 6.4.2)."""
    return np.asarray(np.tanh(np.max(_checked(p_tilde, c)[1], -1)))[()]


@implements("WitCert.tv_tilt_le_tanh")
@implements("WitCert.tv_softmax_le_tanh", pending=True)
def tanh(p_tilde: ArrayLike, c: ArrayLike) -> Array:
    """tanh(½ max c): the best bound in max c alone."""
    return np.asarray(np.tanh(np.max(_checked(p_tilde, c)[1], -1) / 2))[()]


@implements("WitCert.tv_tilt_le_phi")
@implements("WitCert.phi_mono")
def phi(p_tilde: ArrayLike, c: ArrayLike) -> Array:
    """1 - 1/A for A <= 2, else A²/(A² + 4): a bound in A alone, never vacuous."""
    return _phi(_mean(*_checked(p_tilde, c)))[()]


@implements("WitCert.tv_tilt_le_sharp")
@implements("WitCert.min_one_sharp_mono")
@implements("WitCert.sharp_attained")
def sharp(p_tilde: ArrayLike, c: ArrayLike) -> Array:
    """(A - 1 + σ/2)/(A + 1); may exceed 1, and is +Inf where A or σ overflows."""
    p, bound = _checked(p_tilde, c)
    a1 = _mean(p, bound)
    return _sharp(a1, _sigma(p, bound, a1))[()]


@implements("WitCert.tv_tilt_le_meter")
@implements("WitCert.meter_le_eform")
@implements("WitCert.meter_lt_one")
@implements("WitCert.tv_softmax_le_meter", pending=True)
def meter(p_tilde: ArrayLike, c: ArrayLike, log_p: ArrayLike | None = None) -> Array:
    """min(phi, sharp, tanh): what is reported. At most 1, and 1 where a c is +Inf. log_p: as for `moments`."""
    p, bound = _checked(p_tilde, c)
    a1 = _mean(p, bound, log_p)
    return _meter(a1, _sigma(p, bound, a1, log_p), np.max(bound, -1))[()]


@implements("WitCert.expVar_eq")
@implements("WitCert.tv_tilt_le_meter")
def meter_of_moments(a1: ArrayLike, a2: ArrayLike, c_max: ArrayLike) -> Array:
    """The meter from merged `moments`, all [...], with σ² = a2 - a1² and the digits that this difference keeps."""
    first, second, top = (nonnegative(name, x, finite=False) for name, x in (("a1", a1), ("a2", a2), ("c_max", c_max)))
    with np.errstate(invalid="ignore", over="ignore"):
        variance = second - np.square(first)
    sigma = np.where(np.isinf(second), np.inf, np.sqrt(np.maximum(variance, 0)))
    return _meter(first, sigma, top)[()]


def _gain(a: Array, b: Array, up: Array, below: Array, down: Array) -> Array:
    """P(S) - p̃(S) at its largest, for a set S of mass a and its complement of mass b.

    P(S) = X/(X + B) with ε = -c on S and +c off it: X = Σ_S p̃ e^c = a + up, B = Σ_Sᶜ p̃ e^(-c) = below = b - down.
    """
    with np.errstate(invalid="ignore"):
        gain = np.where(np.isinf(up), b, (b * up + a * down) / (a + up + below))
    return np.where((a == 0) & (up == 0), 0.0, gain)


@implements("WitCert.mass_tilt_le")
@implements("WitCert.sharp_attained")
def worst_case(p_tilde: ArrayLike, c: ArrayLike, reference: ArrayLike | None = None) -> float:
    """The largest total variation over all |ε| <= c, for one distribution [tokens] of at most 16 tokens.

    TV is a maximum over sets S of P(S) - p̃(S), which is largest at ε = -c on S and +c off it; all sets are enumerated.
    With a `reference` [tokens] the distance is measured from it: for the two-part meter p̃ = softmax(y - r) and the
    reference is softmax(y).
    """
    p, bound = _checked(p_tilde, c)
    if p.ndim != 1 or p.shape[0] > _ENUMERATED:
        raise ValueError(f"p_tilde: got shape {p.shape}, want one distribution of at most {_ENUMERATED} tokens")
    fixed = p if reference is None else nonnegative("reference", reference)
    same_last_axis("reference", fixed, p)
    inside = ((np.arange(2**p.size)[:, None] >> np.arange(p.size)) & 1).astype(bool)

    def total(x: Array, members: NDArray[np.bool_]) -> Array:
        return np.asarray(np.sum(np.where(members, x, 0.0), -1))

    a, up = (total(x, inside) for x in (p, np.where(p > 0, _excess(p, bound), 0.0)))
    b, below, down = (total(x, ~inside) for x in (p, p * np.exp(-bound), -p * np.expm1(-bound)))
    return float(np.max(_gain(a, b, up, below, down) + total(p - fixed, inside)))


def _by_decreasing_c(p: Array, c: Array) -> tuple[Array, Array, NDArray[np.intp]]:
    order = np.argsort(-c, axis=-1, kind="stable")
    return np.take_along_axis(p, order, -1), np.take_along_axis(c, order, -1), order


def _before(x: Array) -> Array:
    """Sums over the tokens before each one."""
    sums = np.cumsum(x, -1)
    return np.concatenate([np.zeros_like(x[..., :1]), sums[..., :-1]], -1)


def _from(x: Array) -> Array:
    """Sums over each token and those after it."""
    return np.asarray(np.flip(np.cumsum(np.flip(x, -1), -1), -1))


@implements("WitCert.mass_tilt_le")
def worst_case_relaxed(p_tilde: ArrayLike, c: ArrayLike) -> Array:
    """The largest total variation over all |ε| <= c when a token may be split into parts with errors of their own.

    An upper bound of `worst_case` for any number of tokens; A, σ and max c do not see a split, so no bound of this
    module is below it. Among (fractional) sets of one mass a, taking the tokens with the largest c makes X largest
    and B smallest, so an optimum is a prefix by decreasing c with one fractional token. On token k the gain is
    concave in its part m, with derivative N/(X + B)² - 1, N = e^c B₀ + e^(-c) X₀: the optimum is where X + B = √N,
    clamped to [0, p̃_k].
    """
    p, bound = _checked(p_tilde, c)
    q, e, _ = _by_decreasing_c(p, bound)
    a0, up0 = _before(q), _before(np.where(q > 0, _excess(q, e), 0.0))
    b0, below0, down0 = _from(q), _from(q * np.exp(-e)), _from(-q * np.expm1(-e))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        x0 = a0 + up0
        total = x0 + below0
        # (√N - total)/(2 sinh c): for small c through N - total² without cancellation, else scaled against overflow
        slope = below0 * np.expm1(e) + x0 * np.expm1(-e) + total * (down0 - up0)
        small = slope / (np.sqrt(np.exp(e) * below0 + np.exp(-e) * x0) + total) / (2 * np.sinh(e))
        large = np.exp(-e / 2) * np.sqrt(below0 + np.exp(-2 * e) * x0) - np.exp(-e) * total
        part = np.where(e < 1, small, large / -np.expm1(-2 * e))
        part = np.where(np.isfinite(part), np.clip(part, 0.0, q), 0.0)
        # N > (X + B)² at m = 0: decides for the c that make a part underflow
        rising = ~(e + np.log(below0) < 2 * np.log(total))
    gain = _gain(
        a0 + part,
        np.maximum(b0 - part, 0.0),
        up0 + np.where(part > 0, _excess(part, e), 0.0),
        np.maximum(below0 - part * np.exp(-e), 0.0),
        np.maximum(down0 + part * np.expm1(-e), 0.0),
    )
    sliver = (q > 0) & (e > _EXP_MAX) & (part == 0) & rising
    return np.asarray(np.minimum(1.0, np.max(np.where(sliver, b0, gain), -1)))[()]


def worst_case_lower(p_tilde: ArrayLike, c: ArrayLike) -> tuple[Array, Array]:
    """(tv, eps): a total variation [...] that the errors eps [..., tokens], |eps| <= c, attain or exceed.

    The best of the prefixes by decreasing c and their complements, without fractions. c must be finite.
    """
    p, bound = _checked(p_tilde, c)
    if np.isinf(bound).any():
        raise ValueError("c: got +Inf, want finite bounds, for an error that attains them")
    q, e, order = _by_decreasing_c(p, bound)
    kinds = (q, np.where(q > 0, _excess(q, e), 0.0), q * np.exp(-e), -q * np.expm1(-e))
    mass, up, below, down = (_before(x) for x in kinds)
    rest, rest_up, rest_below, rest_down = (_from(x) for x in kinds)
    prefix = _gain(mass, rest, up, rest_below, rest_down)
    suffix = _gain(rest, mass, rest_up, below, down)
    n = q.shape[-1]
    both = np.minimum(np.concatenate([prefix, suffix], -1), 1.0)  # a sum of weights may round to more
    best = np.argmax(both, -1)[..., None]
    first = np.arange(n) < best % n
    sign = np.where(first == (best < n), -1.0, 1.0)
    eps = np.empty_like(e)
    np.put_along_axis(eps, order, sign * e, -1)
    return np.take_along_axis(both, best, -1)[..., 0][()], eps


@implements("WitCert.dispersion_unsound")
def dispersion_unsound(p_tilde: ArrayLike, c: ArrayLike) -> Array:
    """½ e^(2 max c) (E|c - c̄| + c̄ (e^(max c) - 1)), the paper's equation (1). Not a bound: kept to stay refuted."""
    p, bound = _checked(p_tilde, c)
    mean, top = np.sum(p * bound, -1), np.max(bound, -1)
    spread = np.sum(p * np.abs(bound - mean[..., None]), -1)
    return np.asarray(0.5 * np.exp(2 * top) * (spread + mean * np.expm1(top)))[()]


@implements("WitCert.variance_averaged_unsound")
def variance_averaged_unsound(p_tilde: ArrayLike, c: ArrayLike) -> Array:
    """½ (e^(2 √(Σ p̃ c²)) - 1) (paper, section 6.1.1). Not a bound: kept to stay refuted."""
    p, bound = _checked(p_tilde, c)
    return np.asarray(0.5 * np.expm1(2 * np.sqrt(np.sum(p * np.square(bound), -1))))[()]
