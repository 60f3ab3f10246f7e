"""Tier B's radius (paper, section 4.2): under dither, a logit's error is sub-Gaussian for queries independent of it."""

import math

import numpy as np
from numpy.typing import ArrayLike

from witcert_ref._checks import Array, floats, integer, nonnegative, scalar
from witcert_ref.dither import GRID
from witcert_ref.half_step import weighted
from witcert_ref.spec import implements


@implements("WitCert.deltaLocal_budget")
@implements("WitCert.request_budget")
@implements("WitCert.request_budget_frac")
def delta_local(delta_req: float, layers: int, heads: int, steps: int) -> float:
    """The failure probability of one cell, δ_req/(layers · query heads · steps).

    steps are the query rows that read the store. Raises ValueError unless 0 < delta_req <= 1 and the counts are >= 1.
    """
    request = _probability("delta_req", delta_req)
    counts = [integer(name, n, 1) for name, n in (("layers", layers), ("heads", heads), ("steps", steps))]
    return request / math.prod(counts)


@implements("WitCert.tierB_token")
@implements("WitCert.tierB_all_tokens")
@implements("WitCert.mgf_logitError")
def radius(q: ArrayLike, scale: ArrayLike, sm_scale: float, tokens: int, delta_local: float, grid: int = GRID) -> Array:
    """sm_scale (√(2L Σ_j q_j² s_{t,j}²/12) + Σ_j |q_j| s_{t,j}/(2·grid)), L = log(2·tokens/delta_local).

    With probability at least 1 - delta_local over the dither, no token's logit errs by more. q [d] (what a sketch
    leaves of it with a sketch), scale the steps, [tokens, d] or [tokens, 1]; returns [tokens], +Inf where a step
    is. Raises ValueError for negative steps or sm_scale, counts below 1, or a delta_local outside (0, 1].
    """
    query, step, factor = floats("q", q), nonnegative("scale", scale, finite=False), scalar("sm_scale", sm_scale, 0)
    log_term = math.log(2 * integer("tokens", tokens, 1) / _probability("delta_local", delta_local))
    variance = weighted(np.square(query), np.square(step)) / 12
    bias = weighted(np.abs(query), step) / (2 * integer("grid", grid, 1))
    return np.asarray(factor * (np.sqrt(2 * log_term * variance) + bias))


def _probability(name: str, value: float) -> float:
    number = scalar(name, value, 0, 1)
    if number == 0:
        raise ValueError(f"{name}: got 0, want a probability above 0")
    return number
