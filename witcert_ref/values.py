"""The value side: from a bound on the attention's total variation to a bound on its output."""

import numpy as np
from numpy.typing import ArrayLike

from witcert_ref._checks import Array, dims, floats, nonnegative, scalar
from witcert_ref.spec import implements


@implements("WitCert.output_error_le")
@implements("WitCert.output_rounding_le", pending=True)
def output_bound(
    p_tilde: ArrayLike,
    tv_bound: float,
    v: ArrayLike,
    v_hat: ArrayLike,
    center: ArrayLike | None = None,
    weight_error: float = 0.0,
) -> float:
    """2·TV·max_t ‖v_t - m‖ + Σ p̃_t ‖v̂_t - v_t‖ + η Σ p̃_t ‖v̂_t‖: a bound on ‖y - ŷ‖ (paper, section 4.2).

    p_tilde [tokens], tv_bound a bound on TV(p, p̃), v and v_hat [tokens, d_v], center m [d_v] (None: 0), weight_error
    η, the relative rounding error of the weights that are applied. A sink is a token with v = v̂ = 0. Raises
    ValueError for shapes that do not fit, or negative weights, tv_bound or weight_error.
    """
    p, exact, stored = nonnegative("p_tilde", p_tilde), floats("v", v), floats("v_hat", v_hat)
    dims("v", exact, None, None)
    dims("v_hat", stored, *exact.shape)
    dims("p_tilde", p, exact.shape[0])
    middle = np.zeros(exact.shape[1]) if center is None else floats("center", center)
    dims("center", middle, exact.shape[1])
    reach = np.max(_norm(exact - middle), initial=0.0)
    moved = 2 * scalar("tv_bound", tv_bound, 0) * reach
    return float(moved + p @ _norm(stored - exact) + scalar("weight_error", weight_error, 0) * (p @ _norm(stored)))


def _norm(x: Array) -> Array:
    return np.asarray(np.linalg.norm(x, axis=-1))
