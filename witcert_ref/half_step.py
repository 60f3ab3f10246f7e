"""The half-step source: a quantiser that rounds to the nearest code moves each channel by at most half of its step."""

import numpy as np
from numpy.typing import ArrayLike

from witcert_ref._checks import Array, floats, nonnegative, scalar
from witcert_ref.spec import implements


@implements("WitCert.abs_logit_error_le_half_step", pending=True)
@implements("WitCert.abs_scale_sum_le_half_step", pending=True)
@implements("WitCert.halfStep_certificate", pending=True)
def logit_bound(q: ArrayLike, steps: ArrayLike, sm_scale: float) -> Array:
    """sm_scale · Σ_j |q_j| s_{t,j} / 2: a bound on each token's logit error, any query, always.

    q [d] in the coordinates that were quantised (q∘f with an equaliser; what a sketch leaves of it with a sketch),
    steps [tokens, d] or [tokens, 1], +Inf where a scale overflowed; returns [tokens], +Inf for a token with such a
    step. Raises ValueError for negative steps or sm_scale, or shapes that do not fit.
    """
    query, step, factor = floats("q", q), nonnegative("steps", steps, finite=False), scalar("sm_scale", sm_scale, 0)
    return factor * weighted(np.abs(query), step) / 2


def weighted(weights: Array, steps: Array) -> Array:
    """Σ_j w_j s_{t,j} for weights [d] >= 0, steps [tokens, d] or [tokens, 1] -> [tokens]; +Inf where a step is."""
    if weights.ndim != 1 or steps.ndim != 2 or steps.shape[1] not in (1, weights.size):
        raise ValueError(f"steps: got shape {steps.shape}, want [tokens, {weights.size}] or [tokens, 1]")
    infinite = np.isinf(steps)
    total = np.sum(weights * np.where(infinite, 0.0, steps), -1)
    return np.where(infinite.any(-1), np.inf, total)
