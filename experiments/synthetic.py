"""Synthetic keys and queries, the paper's block store, and the certificates of its attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from witcert_ref import bounds, half_step
from witcert_ref.dither import dequantize, dither, quantize, scale_of
from witcert_ref.radius import radius
from witcert_ref.store import bypass_channels, select_bypass
from witcert_ref.tv import softmax, total_variation

Array = NDArray[np.float64]

TAU = 0.2
DELTA = 1e-2  # of a request
BLOCK = 256  # tokens that share a scale
QUERIES = 24  # of a store, as in the paper
SCALES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)  # of the queries: the standard deviation of a logit over standard normal keys
SPLITS = {"24 cells": (1, 1, QUERIES), "model": (28, 28, 32768)}
"""Layers, query heads and steps that share `DELTA`: what is computed here, or Qwen2.5-7B over the context's length."""
NEAREST_LEVELS, DITHER_LEVELS = 127.0, 126.5

BOUNDS: dict[str, Callable[[Array, Array], Array]] = {
    "eform (paper)": bounds.eform,
    "two_sided": bounds.two_sided,
    "rc_tanh": bounds.rc_tanh,
    "tanh": bounds.tanh,
    "phi": bounds.phi,
    "sharp": bounds.sharp,
    "meter": bounds.meter,
    "attained": lambda p, c: bounds.worst_case_lower(p, c)[0],
}
"""Bounds of (p̃, c); `attained` is none, but a total variation that some |ε| <= c reaches, so no bound can be below."""


def implied(eform: float) -> float:
    """The radius, one for all tokens, whose e-form this is: it grows in proportion to the queries."""
    return float(np.log1p(2 * eform)) / 2


def split_of(name: str) -> str:
    """A split in words."""
    return "delta_req / ({} · {} · {}) for layers, query heads, steps".format(*SPLITS[name])


def gaussian(rng: np.random.Generator, tokens: int, head_dim: int) -> Array:
    """Standard normal keys [tokens, head_dim] of float16 precision, so that a bypass keeps them exactly."""
    return rng.standard_normal((tokens, head_dim)).astype(np.float16).astype(np.float64)


def token_dither(seed: int, tokens: int, head_dim: int) -> Array:
    """The paper's dither, a vector for every token: [tokens, head_dim]."""
    step = 4096
    starts = range(0, tokens, step)
    parts = [dither(seed, 0, 0, np.arange(i, min(i + step, tokens))[:, None], head_dim) for i in starts]
    return np.concatenate(parts)


@dataclass(frozen=True)
class Store:
    """Keys as read, [tokens, d], and the steps behind them, [rows, d]: 0 on bypass; a row serves tokens/rows tokens."""

    k_hat: Array
    steps: Array

    def radius(self, q: Array, delta_local: float, proxy: float = 1.0) -> Array:
        """Tier B's c for queries [n, d]: [n, tokens]; `proxy` times the sub-Gaussian proxy s²/12 of a dither."""
        tokens, d = self.k_hat.shape
        steps = np.sqrt(proxy) * self.steps
        return self._spread([radius(x, steps, d**-0.5, tokens, delta_local) for x in q])

    def half_step(self, q: Array) -> Array:
        """The c of rounding to nearest, for any query: [n, d] -> [n, tokens]."""
        return self._spread([half_step.logit_bound(x, self.steps, self.k_hat.shape[1] ** -0.5) for x in q])

    def _spread(self, rows: list[Array]) -> Array:
        return np.repeat(np.stack(rows), len(self.k_hat) // len(self.steps), axis=-1)


def block_store(k: Array, *, bypass: int = 0, levels: float, xi: Array | None = None, subtract: bool = True) -> Store:
    """The paper's store of keys [tokens, d]: int8 codes, a scale for each channel of a block, `bypass` RoPE pairs.

    xi [tokens, d] is added before rounding (None: round to nearest) and subtracted on reading; without `subtract` that
    is stochastic rounding. A block keeps its own pairs, those with the most scale energy.
    """
    tokens, d = k.shape
    blocks = k.reshape(-1, BLOCK, d)
    noise = np.zeros(1) if xi is None else xi.reshape(blocks.shape)
    scale = scale_of(np.swapaxes(blocks, 1, 2), BLOCK, levels=levels)[..., 0]
    exact = bypass_channels(select_bypass(scale, bypass, "half"), d, "half")
    codes = quantize(blocks, scale[:, None], noise, exact[:, None])
    read = np.where(exact[:, None], blocks, dequantize(codes, scale[:, None], noise if subtract else 0.0))
    return Store(read.reshape(tokens, d), np.where(exact, 0.0, scale.astype(np.float64)))


def unsound(values: dict[str, Array], tv: Array) -> tuple[int, int]:
    """(violations, checks) of the `BOUNDS` in values, [n] each, against the true total variation and `attained`."""
    true = [tv] + [value for name, value in values.items() if name == "attained"]
    claims = [value for name, value in values.items() if name != "attained"]
    return sum(int((~(claim >= t)).sum()) for claim in claims for t in true), len(claims) * len(true) * tv.size


@dataclass(frozen=True)
class Cells:
    """n queries over one store: attention, logit errors and bounds [n, tokens], what really moved [n]."""

    p_tilde: Array
    c: Array
    eps: Array
    tv: Array
    output_error: Array  # of Σ p k, as the paper takes it: the keys stand for the values

    def outside(self) -> NDArray[np.bool_]:
        """Where a logit erred by more than its bound: [n]."""
        return np.asarray((~(np.abs(self.eps) <= self.c)).any(-1))


def attend(q: Array, k: Array, store: Store, c: Array) -> Cells:
    """Exact and stored attention of queries [n, d] over keys [tokens, d]."""
    sm_scale = k.shape[1] ** -0.5
    exact, read = sm_scale * q @ k.T, sm_scale * q @ store.k_hat.T
    p, p_tilde = softmax(exact), softmax(read)
    y = p @ k
    error = np.linalg.norm(p_tilde @ store.k_hat - y, axis=-1) / np.linalg.norm(y, axis=-1)
    return Cells(p_tilde, c, read - exact, np.asarray(total_variation(p, p_tilde)), error)
