"""The witness (paper, section 4.1, Tier A): band norms of the residual, rounded up, against those of the query."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from witcert_ref._checks import Array, dims, floats, nonnegative, scalar
from witcert_ref._fp16 import round_up
from witcert_ref.rope import RopeLayout, band_norms
from witcert_ref.spec import implements


def byte_unit(
    steps: ArrayLike, head_dim: int, n_bands: int, layout: RopeLayout, rotary_dim: int | None = None
) -> Array:
    """√(Σ_{j in band} s_j²) / 508 for steps [tokens, d] or [tokens, 1] -> [tokens, n_bands].

    Code 254 is the norm of a residual of half a step in every channel; a step that is +Inf makes its unit +Inf.
    """
    step = nonnegative("steps", steps, finite=False)
    step = np.broadcast_to(step, (*step.shape[:-1], head_dim))
    return band_norms(step, n_bands, layout, rotary_dim) / 508


def witness(
    residual: ArrayLike,
    n_bands: int,
    layout: RopeLayout,
    steps: ArrayLike | None = None,
    rotary_dim: int | None = None,
) -> NDArray[np.float16] | NDArray[np.uint8]:
    """What is stored of the residual k̂ - k (x̂ - x with an equaliser), [tokens, d] -> [tokens, n_bands], rounded up.

    Without steps: the norms in float16, +Inf where one overflows or is not finite. With steps, broadcastable to
    [tokens, d]: one unsigned byte a band in units of `byte_unit`; a token whose steps are +Inf gets code 0, as its
    unit says the rest. Raises ValueError beyond 255 units, which a writer that rounds to nearest never leaves.
    """
    error = np.asarray(residual, dtype=np.float64)
    dims("residual", error, None, None)
    # covers the rounding of the norm (at most d + 4 operations), of the unit (as many) and of the quotient
    norms = band_norms(error, n_bands, layout, rotary_dim) * (1 + (2 * error.shape[1] + 16) * 2.0**-53)
    if steps is None:
        return round_up(norms)
    unit = byte_unit(steps, error.shape[1], n_bands, layout, rotary_dim)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(np.isinf(unit) | (norms == 0), 0.0, np.ceil(norms / unit))
    if not (codes <= 255).all():
        raise ValueError(f"residual: got a band norm of {codes.max()} units, want at most 255 (half a step is 254)")
    return codes.astype(np.uint8)


def decode(codes: ArrayLike, unit: ArrayLike) -> Array:
    """The norms that byte codes stand for, codes · unit, [tokens, n_bands]; +Inf where the unit is."""
    code, size = floats("codes", codes), nonnegative("unit", unit, finite=False)
    return np.where(np.isinf(size), np.inf, code * np.where(np.isinf(size), 0.0, size))


@implements("WitCert.abs_logit_error_le")
@implements("WitCert.abs_dot_le_sum_bandNorm")
def logit_bound(
    q: ArrayLike, w: ArrayLike, sm_scale: float, layout: RopeLayout, rotary_dim: int | None = None
) -> Array:
    """sm_scale · Σ_b ‖q_b‖ w_{t,b}: the paper's Theorem 2, any scheme, any query, always.

    q [d] in the residual's coordinates, w [tokens, n_bands] norms (byte codes go through `decode`), +Inf where nothing
    is known; returns [tokens]. Raises ValueError for a negative w or sm_scale, or shapes that do not fit.
    """
    query, norm, factor = floats("q", q), nonnegative("w", w, finite=False), scalar("sm_scale", sm_scale, 0)
    dims("q", query, None)
    dims("w", norm, None, None)
    infinite = np.isinf(norm)
    bound = np.where(infinite, 0.0, norm) @ band_norms(query, norm.shape[1], layout, rotary_dim)
    return np.where(infinite.any(-1), np.inf, factor * bound)
