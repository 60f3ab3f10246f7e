"""The query sketch: each token's residual along the few directions that a head's queries keep to.

Directions u [r, d] are unit vectors in the coordinates of z = q∘f. A code stands for code · unit, with
unit = Σ_j |u_{i,j}| s_{t,j}/254, so a residual of half a step a channel never needs more than ±127. A black-box scheme
has no steps; its tokens store a unit of their own (`own_unit`).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from witcert_ref._checks import Array, dims, floats, integer, last_axis, nonnegative, scalar
from witcert_ref._fp16 import TINY, round_up
from witcert_ref.bounds import meter
from witcert_ref.half_step import weighted
from witcert_ref.spec import implements
from witcert_ref.tv import logsumexp, softmax


def fit(queries: ArrayLike, r: int, f: ArrayLike | None = None, exclude: ArrayLike | None = None) -> Array:
    """The r principal directions of z = q∘f, orthonormal [r, d], the strongest first, largest entry positive.

    queries [n, d], of all query heads that share a kv head; f [d] the equaliser's (None: 1); `exclude` [d] (bool) the
    bypass channels, where u = 0. Raises ValueError for no queries, or an r above the channels that are left.
    """
    z = floats("queries", queries)
    dims("queries", z, None, None)
    d = z.shape[1]
    kept = np.flatnonzero(np.ones(d, bool) if exclude is None else ~np.broadcast_to(np.asarray(exclude, bool), d))
    rank = integer("r", r, 0, kept.size)
    if z.shape[0] == 0:
        raise ValueError(f"queries: got shape {z.shape}, want at least one query")
    if f is not None:
        z = z * nonnegative("f", f)
    _, vectors = np.linalg.eigh(z[:, kept].T @ z[:, kept])
    u = np.zeros((rank, d))
    u[:, kept] = vectors.T[::-1][:rank]
    largest = np.take_along_axis(u, np.argmax(np.abs(u), 1)[:, None], 1)
    return u * np.where(largest < 0, -1.0, 1.0)


def unit(u: ArrayLike, steps: ArrayLike) -> Array:
    """Σ_j |u_{i,j}| s_{t,j} / 254 for steps [tokens, d] or [tokens, 1] -> [tokens, r]; +Inf where a step is."""
    directions, step = np.abs(floats("u", u)), nonnegative("steps", steps, finite=False)
    dims("u", directions, None, None)
    rows = [weighted(direction, step) / 254 for direction in directions]
    return np.stack(rows, -1) if rows else np.zeros((step.shape[0], 0))


def own_unit(residual: ArrayLike, u: ArrayLike) -> Array:
    """A token's own unit, max_i |u_i · residual_t| / 127 rounded up to float16: [tokens, d] -> float64 [tokens, 1]."""
    directions, error = floats("u", u), np.asarray(residual, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        largest = np.max(np.abs(error @ directions.T), axis=-1, keepdims=True, initial=0.0)
    return np.maximum(round_up(largest * (1 + 2.0**-50) / 127).astype(np.float64), TINY)


def encode(
    residual: ArrayLike, u: ArrayLike, steps: ArrayLike | None = None, *, unit_size: ArrayLike | None = None
) -> NDArray[np.int8]:
    """Codes of the residual x̂ - x [tokens, d] along u, to the nearest: int8 [tokens, r]; 0 where the unit is +Inf.

    Give `steps` or, for a black-box scheme, `unit_size` (from `own_unit`).
    Raises ValueError for a coordinate past 127½ units, which would clamp and leave an error that no bound knows.
    """
    directions, error = floats("u", u), np.asarray(residual, dtype=np.float64)
    dims("residual", error, None, directions.shape[-1])
    size = _unit(directions, steps, unit_size)
    unread = np.isinf(size) | (size == 0)
    with np.errstate(invalid="ignore", over="ignore"):
        codes = np.rint(np.where(unread, 0.0, error @ directions.T) / np.where(unread, 1.0, size))
    if not (np.abs(codes) <= 127).all():
        raise ValueError(f"residual: got a coordinate of {np.max(np.abs(codes))} units, want at most 127")
    return codes.astype(np.int8)


def outside(q: ArrayLike, u: ArrayLike, a: ArrayLike | None = None) -> tuple[Array, Array]:
    """(w, a): what q [d] has outside the directions, w = q - Σ_i a_i u_i, for coefficients a [r] (None: q·u_i)."""
    query, directions = floats("q", q), floats("u", u)
    dims("u", directions, None, query.size)
    coefficients = directions @ query if a is None else floats("a", a)
    dims("a", coefficients, directions.shape[0])
    return query - coefficients @ directions, coefficients


@implements("WitCert.abs_corrected_error_le", pending=True)
def correction(
    a: ArrayLike,
    codes: ArrayLike,
    u: ArrayLike,
    steps: ArrayLike | None = None,
    *,
    unit_size: ArrayLike | None = None,
) -> Array:
    """Σ_i a_i p_{t,i}, p = code · unit, [tokens]: what the read takes off q·x̂ before sm_scale and the soft cap."""
    coefficients, code = floats("a", a), floats("codes", codes)
    size = _unit(floats("u", u), steps, unit_size)
    last_axis("codes", code, coefficients.size)
    return np.asarray((code * np.where(np.isinf(size), 0.0, size)) @ coefficients)


@implements("WitCert.abs_corrected_error_le", pending=True)
def code_error(a: ArrayLike, unit_size: ArrayLike, sm_scale: float) -> Array:
    """sm_scale Σ_i |a_i| unit_{t,i}/2, what rounding the codes adds to c: [tokens, r] or [tokens, 1] -> [tokens]."""
    size = nonnegative("unit_size", unit_size, finite=False)
    return scalar("sm_scale", sm_scale, 0) * weighted(np.abs(floats("a", a)), size) / 2


@implements("WitCert.abs_corrected_error_le", pending=True)
@implements("WitCert.sketch_certificate", pending=True)
def logit_bound(q: ArrayLike, u: ArrayLike, steps: ArrayLike, sm_scale: float, a: ArrayLike | None = None) -> Array:
    """sm_scale (Σ_j |w_j| s_{t,j}/2 + Σ_i |a_i| unit_{t,i}/2), w = q - Σ_i a_i u_i: half-step with a sketch, any query.

    q [d] is z = q∘f, a [r] the read's coefficients (None: q·u_i), steps [tokens, d] or [tokens, 1]; returns [tokens].
    """
    w, coefficients = outside(q, u, a)
    step, factor = nonnegative("steps", steps, finite=False), scalar("sm_scale", sm_scale, 0)
    return factor * weighted(np.abs(w), step) / 2 + code_error(coefficients, unit(u, step), factor)


@implements("WitCert.tv_softmax_le_known_add_meter", pending=True)
@implements("WitCert.tv_tilt_le_relative_deviation", pending=True)
def two_part_meter(y: ArrayLike, known: ArrayLike, c: ArrayLike) -> Array:
    """½ sd(e^r)/mean(e^r) + meter, both under p_w = softmax(y - r), at most 1.

    Bounds TV(softmax x, softmax y) where |y - r - x| <= c: y [..., tokens] the logits that were used, r = known the
    part of their error that is known, c [..., tokens] a bound on the rest; returns [...].
    """
    logits, r = floats("y", y), floats("known", known)
    w = logits - r
    p_w = softmax(w)
    # e^r/mean(e^r) = softmax(y)/p_w, so its variance is Σ p_w (e^ratio - 1)²
    ratio = r - (logsumexp(logits) - logsumexp(w))[..., None]
    root = (w - logsumexp(w)[..., None]) / 2
    with np.errstate(over="ignore"):
        deviation = np.where(ratio < 700, np.exp(root) * np.expm1(np.minimum(ratio, 700)), np.exp(root + ratio))
        first = np.sqrt(np.sum(np.square(deviation), -1)) / 2
    return np.asarray(np.minimum(1.0, first + meter(p_w, c, 2 * root)))[()]


def _unit(u: Array, steps: ArrayLike | None, unit_size: ArrayLike | None) -> Array:
    if steps is not None and unit_size is None:
        return unit(u, steps)
    if unit_size is not None and steps is None:
        return nonnegative("unit_size", unit_size, finite=False)
    raise ValueError("steps: got both or neither of steps and unit_size, want one of them")
