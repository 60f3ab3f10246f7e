"""The bounds and the radius again, in mpmath: 50 correct digits, from exact inputs.

Arguments are sequences of numbers (float, Fraction, mpf), taken exactly; one distribution at a time. Scalars are
rounded to 50 digits after 20 guard digits, so that bounds that coincide compare equal; vectors (softmax, tilt) keep
the guard digits.
"""

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import mpmath
from mpmath import mp
from numpy.typing import NDArray

DIGITS, GUARD = 50, 20

Numbers = Sequence[Any] | NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])


def number(x: Any) -> Any:
    """An exact mpf (a Fraction: to the working precision)."""
    if isinstance(x, Fraction):
        return mp.mpf(x.numerator) / x.denominator
    return mp.mpf(x) if isinstance(x, mpmath.mpf | int) else mp.mpf(float(x))


def _golden(function: F) -> F:
    @functools.wraps(function)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        with mp.workdps(DIGITS + GUARD):
            result = function(*args, **kwargs)
        if isinstance(result, list):
            return result
        with mp.workdps(DIGITS):
            return tuple(+x for x in result) if isinstance(result, tuple) else +result

    return evaluated  # type: ignore[return-value]


def _vectors(*arrays: Numbers) -> list[list[Any]]:
    vectors = [[number(x) for x in array] for array in arrays]
    if len({len(vector) for vector in vectors}) > 1:
        raise ValueError(f"c: got lengths {[len(vector) for vector in vectors]}, want one length")
    return vectors


@_golden
def softmax(x: Numbers) -> list[Any]:
    """Softmax of finite logits."""
    (logits,) = _vectors(x)
    top = max(logits)
    weights = [mp.exp(y - top) for y in logits]
    total = mp.fsum(weights)
    return [w / total for w in weights]


@_golden
def tilt(p_tilde: Numbers, eps: Numbers) -> list[Any]:
    """p̃ e^(-ε), normalised."""
    p, error = _vectors(p_tilde, eps)
    weights = [a * mp.exp(-e) for a, e in zip(p, error, strict=True)]
    total = mp.fsum(weights)
    return [w / total for w in weights]


@_golden
def total_variation(p: Numbers, q: Numbers) -> Any:
    """½ Σ |p - q|."""
    return mp.fsum(abs(a - b) for a, b in zip(*_vectors(p, q), strict=True)) / 2


def _moments(p_tilde: Numbers, c: Numbers) -> tuple[Any, Any]:
    """(a1, σ)."""
    p, bound = _vectors(p_tilde, c)
    a1 = mp.fsum(w * mp.expm1(e) for w, e in zip(p, bound, strict=True))
    return a1, mp.sqrt(mp.fsum(w * (mp.expm1(e) - a1) ** 2 for w, e in zip(p, bound, strict=True)))


@_golden
def moments(p_tilde: Numbers, c: Numbers) -> tuple[Any, Any, Any, Any]:
    """(a1, a2, c_max, log_a) as `bounds.moments`."""
    a1, sigma = _moments(p_tilde, c)
    return a1, sigma**2 + a1**2, max(number(e) for e in c), mp.log1p(a1)


@_golden
def eform(p_tilde: Numbers, c: Numbers) -> Any:
    """½ (A² - 1)."""
    a1, _ = _moments(p_tilde, c)
    return a1 * (a1 + 2) / 2


@_golden
def two_sided(p_tilde: Numbers, c: Numbers) -> Any:
    """½ (A/A⁻ - A⁻/A)."""
    p, bound = _vectors(p_tilde, c)
    a1, _ = _moments(p_tilde, c)
    below = mp.fsum(w * mp.exp(-e) for w, e in zip(p, bound, strict=True))
    down = -mp.fsum(w * mp.expm1(-e) for w, e in zip(p, bound, strict=True))
    return (a1 + down) * (1 / below + 1 / (1 + a1)) / 2


@_golden
def rc_tanh(p_tilde: Numbers, c: Numbers) -> Any:
    """tanh(max c)."""
    return mp.tanh(max(_vectors(p_tilde, c)[1]))


@_golden
def tanh(p_tilde: Numbers, c: Numbers) -> Any:
    """tanh(½ max c)."""
    return mp.tanh(max(_vectors(p_tilde, c)[1]) / 2)


@_golden
def phi(p_tilde: Numbers, c: Numbers) -> Any:
    """1 - 1/A for A <= 2, else A²/(A² + 4)."""
    a1, _ = _moments(p_tilde, c)
    return a1 / (1 + a1) if a1 <= 1 else 1 / (1 + (2 / (1 + a1)) ** 2)


@_golden
def sharp(p_tilde: Numbers, c: Numbers) -> Any:
    """(A - 1 + σ/2)/(A + 1)."""
    a1, sigma = _moments(p_tilde, c)
    return (a1 + sigma / 2) / (a1 + 2)


def meter(p_tilde: Numbers, c: Numbers) -> Any:
    """min(phi, sharp, tanh)."""
    return min(phi(p_tilde, c), sharp(p_tilde, c), tanh(p_tilde, c))


@_golden
def two_part_meter(y: Numbers, known: Numbers, c: Numbers) -> Any:
    """½ sd(e^r)/mean(e^r) + meter, both under softmax(y - r); not capped."""
    logits, r = _vectors(y, known)
    p_w = softmax([a - b for a, b in zip(logits, r, strict=True)])
    mean = mp.fsum(w * mp.exp(x) for w, x in zip(p_w, r, strict=True))
    variance = mp.fsum(w * (mp.exp(x) - mean) ** 2 for w, x in zip(p_w, r, strict=True))
    return mp.sqrt(variance) / (2 * mean) + meter(p_w, c)


@_golden
def worst_case_relaxed(p_tilde: Numbers, c: Numbers) -> Any:
    """As `bounds.worst_case_relaxed`: prefixes by decreasing c with one fractional token, its part where X + B = √N."""
    tokens = sorted(zip(*_vectors(p_tilde, c), strict=True), key=lambda token: -token[1])
    best = a = up = mp.mpf(0)  # over the tokens before: mass and Σ p̃ (e^c - 1)
    for k, (w, e) in enumerate(tokens):
        b = mp.fsum(x for x, _ in tokens[k:])
        below = mp.fsum(x * mp.exp(-y) for x, y in tokens[k:])
        down = -mp.fsum(x * mp.expm1(-y) for x, y in tokens[k:])
        part = mp.mpf(0)
        if e > 0:
            x = a + up
            slope = below * mp.expm1(e) + x * mp.expm1(-e) + (x + below) * (down - up)  # N - (X + B)²
            root = mp.sqrt(mp.exp(e) * below + mp.exp(-e) * x)
            part = min(max(slope / (root + x + below) / (2 * mp.sinh(e)), part), w)
        mass, grown = a + part, up + part * mp.expm1(e)
        if mass > 0:
            gain = (b - part) * grown + mass * (down + part * mp.expm1(-e))
            best = max(best, gain / (mass + grown + below - part * mp.exp(-e)))
        a, up = a + w, up + w * mp.expm1(e)
    return best


@_golden
def radius(q: Numbers, scale: Numbers, sm_scale: Any, tokens: int, delta_local: Any, grid: int = 2**15) -> Any:
    """As `radius.radius`, for one token with its steps [d]."""
    query, step = _vectors(q, scale)
    products = [abs(a) * s for a, s in zip(query, step, strict=True)]
    log_term = mp.log(2 * tokens / number(delta_local))
    deviation = mp.sqrt(2 * log_term * mp.fsum(x**2 for x in products) / 12)
    return number(sm_scale) * (deviation + mp.fsum(products) / (2 * grid))
