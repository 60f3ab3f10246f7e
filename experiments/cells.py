"""What an experiment measures in each cell, and its account over prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from torch import Tensor

from experiments.result import Violations
from experiments.stores import Attention, Store
from experiments.synthetic import BOUNDS, TAU
from witcert_ref import sketch

Array = NDArray[np.float64]
EFORM = "eform (paper)"


class Cells:
    """Rows of one layer that read a store: stored logits y, c, eps, p and p_tilde [cells, tokens], tv [cells].

    Args:
        attention: the exact keys and the queries.
        error: stored minus exact logits [kv_heads, rows, tokens].
        c: a bound on its magnitude.
    """

    def __init__(self, attention: Attention, error: Tensor, c: Tensor) -> None:
        hidden = attention.hidden
        exact = attention.logits
        self.c = array(c.masked_fill(hidden, 0.0))
        self.eps = array(error.masked_fill(hidden, 0.0))
        self.y = array(exact + error.masked_fill(hidden, 0.0))
        self.p, self.p_tilde = softmax(array(exact)), softmax(self.y)
        self.tv: Array = np.abs(self.p - self.p_tilde).sum(-1) / 2

    def values(
        self, names: Iterable[str], bounds: Mapping[str, Callable[[Array, Array], Array]] = BOUNDS
    ) -> dict[str, Array]:
        """The bounds of these names."""
        return {name: bounds[name](self.p_tilde, self.c) for name in names}


def two_part(attention: Attention, error: Tensor, sketched: Store) -> Array:
    """The two-part meter of logits with this error, part of which a sketch knows: [cells]."""
    parts = (error, sketched.correction(attention.q), sketched.tier_a(attention.q))
    error, known, c = (part.masked_fill(attention.hidden, 0.0) for part in parts)
    return sketch.two_part_meter(array(attention.logits + error), array(known), array(c))


def mix(weights: Array, x: Tensor) -> Array:
    """Σ_t weight_t x_t for weights [cells, tokens] and x [kv_heads, tokens, m]: [cells, m]."""
    kv_heads, tokens, _ = x.shape
    return np.asarray((weights.reshape(kv_heads, -1, tokens) @ x.numpy()).reshape(len(weights), -1))


def norm(x: Array) -> Array:
    """Euclidean norm over the last axis."""
    return np.asarray(np.linalg.norm(x, axis=-1))


def array(x: Tensor) -> Array:
    """[kv_heads, rows, …] -> [cells, …]."""
    return np.asarray(x.flatten(0, 1).numpy(), dtype=np.float64)


def softmax(x: Array) -> Array:
    """Softmax over the last axis; a hidden token gets exactly 0."""
    weight = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(weight / weight.sum(-1, keepdims=True))


class Account:
    """Values of cells by store, prompt and name, and how often a bound was below the truth."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], dict[int, list[Array]]] = {}
        self._counts: dict[str, list[int]] = {}

    def add(self, store: str, prompt: int, values: Mapping[str, Array]) -> None:
        """Cells of a prompt under a store, [n] each."""
        for name, value in values.items():
            self._parts.setdefault((store, name), {}).setdefault(prompt, []).append(np.asarray(value, dtype=np.float64))

    def check(self, claim: str, bounds: Iterable[Array], truths: Iterable[Array]) -> None:
        """Count cells where a bound is not at least a truth (a NaN is not), tolerance 0."""
        found = self._counts.setdefault(claim, [0, 0])
        kept = list(truths)
        for bound in bounds:
            for truth in kept:
                found[0] += int((~(bound >= truth)).sum())
                found[1] += truth.size

    def bounds(self, cells: Cells, every: bool, kind: str = "") -> dict[str, Array]:
        """E-form, rc_tanh and meter of cells, or every one of `BOUNDS`, checked against what they bound; c too."""
        values = cells.values(BOUNDS if every else (EFORM, "rc_tanh", "meter"))
        sound = [value for name, value in values.items() if name != "attained"]
        self.check(f"{kind}every bound >= true total variation", sound, [cells.tv])
        self.check(f"{kind}every bound >= attained total variation", sound, [values[n] for n in ("attained",) if every])
        self.check(f"{kind}c >= every logit error", [cells.c], [np.abs(cells.eps)])
        return values

    def beside(self, store: str, prompts: Iterable[int] | None = None) -> dict[str, Array]:
        """All `BOUNDS` of a store, [prompts, cells] each."""
        kept = None if prompts is None else list(prompts)
        return {name: self(store, name, kept) for name in BOUNDS}

    def violations(self) -> list[Violations]:
        """All claims that were checked."""
        return [Violations(claim, count, checks) for claim, (count, checks) in self._counts.items()]

    def __call__(self, store: str, name: str, prompts: Iterable[int] | None = None) -> Array:
        """Values [prompts, cells]."""
        parts = self._parts[store, name]
        return np.stack([np.concatenate(parts[i]) for i in (parts if prompts is None else prompts)])


def covered(values: Array) -> Array:
    """1 where a bound is at most τ, [prompts, cells]."""
    return (values <= TAU).astype(np.float64)


def every_head(passed: ArrayLike, kv_heads: int, steps: int) -> Array:
    """1 where all query heads of a kv head pass, [kv_heads · group · steps] -> [kv_heads · steps]."""
    return np.asarray(passed).reshape(kv_heads, -1, steps).all(1).ravel().astype(np.float64)


def auc(score: Array, danger: NDArray[np.bool_]) -> float | None:
    """The probability that a dangerous cell has the larger score (half for ties); None without both kinds."""
    positive = int(danger.sum())
    negative = danger.size - positive
    if not positive or not negative:
        return None
    return float((rankdata(score)[danger].sum() - positive * (positive + 1) / 2) / (positive * negative))
