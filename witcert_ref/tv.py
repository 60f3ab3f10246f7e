"""Attention distributions and their total variation."""

import numpy as np
from numpy.typing import ArrayLike

from witcert_ref._checks import Array, floats, nonnegative, same_last_axis
from witcert_ref.spec import implements


def logsumexp(x: Array) -> Array:
    """log Σ e^x over the last axis, [..., n] -> [...]; -Inf for n = 0 and where every x is -Inf."""
    top = np.max(x, axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(top[..., 0] + np.log(np.sum(np.exp(x - top), axis=-1)))[()]


@implements("WitCert.softmax_isProb")
@implements("WitCert.softmax_add_const", pending=True)
def softmax(x: ArrayLike) -> Array:
    """Softmax over the last axis, [..., n] -> [..., n].

    Raises ValueError for n = 0, for NaN or +Inf, and where every logit is -Inf (-Inf alone is weight 0).
    """
    logits = floats("x", x, finite=False)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"x: got shape {logits.shape}, want at least one logit")
    top = np.max(logits, axis=-1, keepdims=True)
    if not np.isfinite(top).all():
        raise ValueError("x: got a largest logit that is not finite, want a finite one")
    weights = np.exp(logits - top)
    return np.asarray(weights / np.sum(weights, axis=-1, keepdims=True))


@implements("WitCert.tv_eq_sum_pos")
@implements("WitCert.tv_le_of_forall")
@implements("WitCert.tv_evict")
@implements("WitCert.tv_comm", pending=True)
@implements("WitCert.tv_triangle", pending=True)
def total_variation(p: ArrayLike, q: ArrayLike) -> Array:
    """½ Σ |p - q| over the last axis, [..., n], [..., n] -> [...] (paper, section 3).

    Raises ValueError unless the last axes agree.
    """
    left, right = floats("p", p), floats("q", q)
    same_last_axis("q", right, left)
    return np.asarray(0.5 * np.sum(np.abs(left - right), axis=-1))[()]


@implements("WitCert.softmax_eq_tilt")
@implements("WitCert.tilt_isProb")
def tilt(p_tilde: ArrayLike, eps: ArrayLike) -> Array:
    """The exact distribution p_t ∝ p̃_t e^(-ε_t), [..., n] -> [..., n].

    Raises ValueError for a negative p̃, an ε that is not finite, or last axes that disagree.
    """
    p, error = nonnegative("p_tilde", p_tilde), floats("eps", eps)
    same_last_axis("eps", error, p)
    with np.errstate(divide="ignore"):
        return softmax(np.log(p) - error)
