"""Attention of one query head, its certificate, and the merge of splits.

One head: q [d], k [tokens, d], v [tokens, d_v]. Only attended tokens are passed, so a causal mask or a window is a
slice. A logit is g(sm_scale q·k + bias), g the soft cap or the identity; a sink is one more logit, whose value is 0
and whose c is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from witcert_ref import bounds, radius, sketch, witness
from witcert_ref._checks import Array, dims, floats, nonnegative, scalar
from witcert_ref.dither import GRID
from witcert_ref.rope import RopeLayout
from witcert_ref.spec import implements
from witcert_ref.tv import logsumexp, softmax

Guarantee = Literal["any_query", "fixed_trajectory"]
_WEAKER: dict[Guarantee, int] = {"any_query": 0, "fixed_trajectory": 1}


@implements("WitCert.abs_softcap_sub_le", pending=True)
def soft_cap(x: ArrayLike, cap: float) -> Array:
    """cap · tanh(x/cap), or x for cap = 0. It does not enlarge a difference, so c holds on either side of it."""
    limit = scalar("cap", cap, 0)
    logits = floats("x", x, finite=False)
    return limit * np.tanh(logits / limit) if limit else logits


def logits(
    q: ArrayLike, k: ArrayLike, sm_scale: float, *, bias: ArrayLike = 0.0, logits_soft_cap: float = 0.0
) -> Array:
    """g(sm_scale q·k + bias), [tokens]. Raises ValueError for shapes that do not fit or numbers that are not finite."""
    query, key = floats("q", q), floats("k", k)
    dims("q", query, None)
    dims("k", key, None, query.size)
    return soft_cap(scalar("sm_scale", sm_scale, 0) * (key @ query) + floats("bias", bias), logits_soft_cap)


def exact(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    sm_scale: float,
    *,
    bias: ArrayLike = 0.0,
    logits_soft_cap: float = 0.0,
    sink: float | None = None,
) -> tuple[Array, float]:
    """(out [d_v], lse): attention, and the log-sum-exp of its logits with the sink's; (0, -Inf) without any."""
    x, value = logits(q, k, sm_scale, bias=bias, logits_soft_cap=logits_soft_cap), floats("v", v)
    dims("v", value, x.size, None)
    whole = _append(x, sink)
    if whole.size == 0:
        return np.zeros(value.shape[1]), -np.inf
    return softmax(whole)[: x.size] @ value, float(logsumexp(whole))


def compressed(
    q: ArrayLike,
    k_hat: ArrayLike,
    v_hat: ArrayLike,
    sm_scale: float,
    *,
    bias: ArrayLike = 0.0,
    logits_soft_cap: float = 0.0,
    sink: float | None = None,
) -> tuple[Array, float]:
    """`exact` over what the store gives back."""
    return exact(q, k_hat, v_hat, sm_scale, bias=bias, logits_soft_cap=logits_soft_cap, sink=sink)


@dataclass(frozen=True)
class Certificate:
    """What is known about TV(p, p̃) of one row.

    p_tilde [tokens], then the sink's weight if there is one; meter in [0, 1], a bound on TV; eform, the paper's
    ½ (A² - 1); risk = log A; guarantee "any_query" or "fixed_trajectory".
    """

    p_tilde: Array
    meter: float
    eform: float
    risk: float
    guarantee: Guarantee


@implements("WitCert.tv_tilt_le_meter_of_repaired")
@implements("WitCert.tv_tilt_eq_zero_of_all_repaired")
@implements("WitCert.abs_add_le_of_rounding")
@implements("WitCert.read_certificate", pending=True)
@implements("WitCert.tv_softmax_le_meter", pending=True)
@implements("WitCert.tv_softmax_le_meter_of_rounding", pending=True)
def certify(
    y: ArrayLike,
    c: ArrayLike,
    *,
    zeta: ArrayLike = 0.0,
    known: ArrayLike | None = None,
    c_known: ArrayLike | None = None,
    sink: float | None = None,
    guarantee: Guarantee = "any_query",
) -> Certificate:
    """The certificate of logits y [tokens] that err by at most c [tokens]: 0 where exact, +Inf where nothing is known.

    zeta [tokens] bounds how far a kernel's own arithmetic moved y: meter(softmax y, c + zeta) + tanh(½ max zeta). If a
    part `known` [tokens] of the error was left in y, and c_known bounds the rest, the smaller of the one-part and the
    two-part meter counts. Raises ValueError for shapes that do not fit, for c < 0 or NaN, or for known without c_known.
    """
    tokens, bound = floats("y", y), nonnegative("c", c, finite=False)
    dims("y", tokens, None)
    dims("c", bound, tokens.size)
    rounding = np.broadcast_to(nonnegative("zeta", zeta, finite=False), tokens.shape)
    if (known is None) != (c_known is None):
        raise ValueError("c_known: got one of known and c_known, want both or neither")
    whole = _append(tokens, sink)
    if whole.size == 0:
        return Certificate(whole, 0.0, 0.0, 0.0, guarantee)
    zero = None if sink is None else 0.0
    total, p, log_p = _append(bound + rounding, zero), softmax(whole), whole - logsumexp(whole)
    meter = float(bounds.meter(p, total, log_p))
    if known is not None and c_known is not None:
        rest = _append(nonnegative("c_known", c_known, finite=False) + rounding, zero)
        meter = min(meter, float(sketch.two_part_meter(whole, _append(floats("known", known), zero), rest)))
    meter = min(1.0, meter + float(np.tanh(np.max(rounding, initial=0.0) / 2)))
    risk = float(bounds.moments(p, total, log_p)[3])
    return Certificate(p, meter, float(bounds.eform(p, total, log_p)), risk, guarantee)


@implements("WitCert.tierA_certificate")
def certify_tier_a(
    q: ArrayLike,
    k_hat: ArrayLike,
    w: ArrayLike,
    sm_scale: float,
    layout: RopeLayout,
    rotary_dim: int | None = None,
) -> Certificate:
    """Tier A: any scheme's keys k_hat [tokens, d] with their witness norms w [tokens, n_bands]; any query."""
    return certify(logits(q, k_hat, sm_scale), witness.logit_bound(q, w, sm_scale, layout, rotary_dim))


@implements("WitCert.tierB_certificate")
@implements("WitCert.tierB_sketch_certificate", pending=True)
def certify_tier_b(
    q: ArrayLike,
    k_hat: ArrayLike,
    steps: ArrayLike,
    sm_scale: float,
    delta_local: float,
    grid: int = GRID,
    *,
    u: ArrayLike | None = None,
    codes: ArrayLike | None = None,
) -> Certificate:
    """Tier B: dithered keys k_hat [tokens, d], steps [tokens, d or 1]; a sketch u [r, d] with its codes, or none.

    Holds with probability at least 1 - delta_local, for queries that do not depend on the dither.
    """
    if (u is None) != (codes is None):
        raise ValueError("codes: got one of u and codes, want both or neither")
    y = logits(q, k_hat, sm_scale)
    if y.size == 0:
        return certify(y, y, guarantee="fixed_trajectory")
    directions = np.zeros((0, np.shape(q)[0])) if u is None else floats("u", u)
    coordinates = np.zeros((y.size, 0)) if codes is None else codes
    w, a = sketch.outside(q, directions)
    y = y - sm_scale * sketch.correction(a, coordinates, directions, steps)
    c = radius.radius(w, steps, sm_scale, y.size, delta_local, grid)
    return certify(y, c + sketch.code_error(a, sketch.unit(directions, steps), sm_scale), guarantee="fixed_trajectory")


@dataclass(frozen=True)
class TwoPart:
    """A split's second set of sums, under its own normaliser p_w = softmax(y - r).

    lse of y - r; a1, a2 of the remaining c; its maximum; r1 = Σ p_w (e^r - 1) and r2 = Σ p_w (e^r - 1)².
    """

    lse: float
    a1: float
    a2: float
    c_max: float
    r1: float
    r2: float

    @property
    def meter(self) -> float:
        """½ sd(e^r)/mean(e^r) + the meter of c; 1 where e^r over- or underflows."""
        if not (np.isfinite(self.r2) and self.r1 > -1):
            return 1.0
        return float(np.sqrt(max(self.r2 - self.r1**2, 0.0))) / (2 * (1 + self.r1)) + _meter(self)


@dataclass(frozen=True)
class Part:
    """What one split of the tokens keeps, and what a whole row ends with.

    out [d_v], lse; a1, a2, c_max, log_a as `bounds.moments`; zeta = max ζ; rho = Σ p̃ ρ;
    value_norm = Σ p̃ ‖v̂‖; reach = max (‖v̂‖ + ρ); the guarantee; the two-part sums, if there is a known part.
    A c_max of +Inf flags a token whose c is +Inf: it survives merging even where the token's weight underflows; the
    other sums leave that token out.
    """

    out: Array
    lse: float
    a1: float = 0.0
    a2: float = 0.0
    c_max: float = 0.0
    log_a: float = 0.0
    zeta: float = 0.0
    rho: float = 0.0
    value_norm: float = 0.0
    reach: float = 0.0
    guarantee: Guarantee = "any_query"
    two_part: TwoPart | None = None

    @property
    def meter(self) -> float:
        """A bound on TV(p, p̃), in [0, 1]."""
        meter = _meter(self)
        if self.two_part is not None:
            meter = min(meter, self.two_part.meter)
        return min(1.0, meter + float(np.tanh(self.zeta / 2)))

    @property
    def eform(self) -> float:
        """½ (A² - 1)."""
        return float("inf") if np.isinf(self.c_max) else self.a1 * (self.a1 + 2) / 2

    @property
    def risk(self) -> float:
        """log A."""
        return float("inf") if np.isinf(self.c_max) else self.log_a

    def value_error(self, weight_error: float = 0.0) -> float:
        """A bound on ‖y - ŷ‖ (`values.output_bound` with centre 0, and v known only through v̂ and ρ)."""
        return 2 * self.meter * self.reach + self.rho + weight_error * self.value_norm


def part(
    y: ArrayLike,
    c: ArrayLike,
    v_hat: ArrayLike,
    *,
    rho: ArrayLike = 0.0,
    zeta: ArrayLike = 0.0,
    known: ArrayLike | None = None,
    c_known: ArrayLike | None = None,
    guarantee: Guarantee = "any_query",
) -> Part:
    """The sums of one split: the arguments of `certify`, with v_hat [tokens, d_v] and rho [tokens] >= ‖v̂ - v‖."""
    tokens, bound, value = floats("y", y), nonnegative("c", c, finite=False), floats("v_hat", v_hat)
    dims("y", tokens, None)
    dims("c", bound, tokens.size)
    dims("v_hat", value, tokens.size, None)
    if (known is None) != (c_known is None):
        raise ValueError("c_known: got one of known and c_known, want both or neither")
    if tokens.size == 0:
        return Part(np.zeros(value.shape[1]), -np.inf, guarantee=guarantee)
    rounding = np.broadcast_to(nonnegative("zeta", zeta), tokens.shape)
    error = np.broadcast_to(nonnegative("rho", rho), tokens.shape)
    p, norm = softmax(tokens), np.linalg.norm(value, axis=-1)
    a1, a2, c_max, log_a = _moments(tokens, bound + rounding)
    two_part = None
    if known is not None and c_known is not None:
        r, rest = floats("known", known), nonnegative("c_known", c_known, finite=False)
        w = tokens - r
        p_w = softmax(w)
        with np.errstate(over="ignore", invalid="ignore"):
            grown = np.expm1(r)
            first, second = float(p_w @ grown), float(p_w @ grown**2)
        two_part = TwoPart(float(logsumexp(w)), *_moments(w, rest + rounding)[:3], first, second)
    return Part(
        out=p @ value,
        lse=float(logsumexp(tokens)),
        a1=a1,
        a2=a2,
        c_max=c_max,
        log_a=log_a,
        zeta=float(rounding.max()),
        rho=float(p @ error),
        value_norm=float(p @ norm),
        reach=float(np.max(norm + error)),
        guarantee=guarantee,
        two_part=two_part,
    )


@implements("WitCert.merge_splits")
def merge(parts: Sequence[Part], sink: float | None = None) -> Part:
    """One row from its splits, in any order; a sink's logit enters here, once. Empty splits weigh nothing.

    Averages merge under the splits' log-sum-exp weights, the two-part ones under their own; c_max (with its flag),
    zeta and reach by maximum; lse and log A by log-sum-exp; the guarantee is the weakest. Raises ValueError for no
    parts, for outputs of different d_v, or for two-part sums in some non-empty parts only.
    """
    if not parts:
        raise ValueError("parts: got none, want at least one")
    if len({part.out.shape for part in parts}) > 1:
        raise ValueError(f"parts: got outputs of shapes {sorted({part.out.shape for part in parts})}, want one shape")
    weakest = max((part.guarantee for part in parts), key=_WEAKER.__getitem__)
    live = [part for part in parts if part.lse > -np.inf]
    two = [part.two_part for part in live if part.two_part is not None]
    if two and len(two) < len(live):
        raise ValueError(f"parts: got two-part sums in {len(two)} of {len(live)} splits, want all or none")
    if sink is not None:
        logit = scalar("sink", sink, -np.inf)
        extra = TwoPart(logit, 0.0, 0.0, 0.0, 0.0, 0.0) if two else None
        live = [*live, Part(np.zeros_like(parts[0].out), logit, two_part=extra)]
        two = [*two, extra] if extra else two
    if not live:
        return Part(np.zeros_like(parts[0].out), -np.inf, guarantee=weakest)

    lse = np.array([part.lse for part in live])
    share = softmax(lse)
    return Part(
        out=share @ np.stack([part.out for part in live]),
        lse=float(logsumexp(lse)),
        a1=_average(share, [part.a1 for part in live]),
        a2=_average(share, [part.a2 for part in live]),
        c_max=max(part.c_max for part in live),
        log_a=float(logsumexp(lse + np.array([part.log_a for part in live])) - logsumexp(lse)),
        zeta=max(part.zeta for part in live),
        rho=_average(share, [part.rho for part in live]),
        value_norm=_average(share, [part.value_norm for part in live]),
        reach=max(part.reach for part in live),
        guarantee=weakest,
        two_part=_merge_two_part(two) if two else None,
    )


def _merge_two_part(parts: list[TwoPart]) -> TwoPart:
    lse = np.array([part.lse for part in parts])
    share = softmax(lse)
    return TwoPart(
        lse=float(logsumexp(lse)),
        a1=_average(share, [part.a1 for part in parts]),
        a2=_average(share, [part.a2 for part in parts]),
        c_max=max(part.c_max for part in parts),
        r1=_average(share, [part.r1 for part in parts]),
        r2=_average(share, [part.r2 for part in parts]),
    )


def _moments(logits: Array, c: Array) -> tuple[float, float, float, float]:
    """`bounds.moments` of the tokens with a finite c; c_max is +Inf if there are others."""
    finite = np.where(np.isinf(c), 0.0, c)
    a1, a2, _, log_a = bounds.moments(softmax(logits), finite, logits - logsumexp(logits))
    return float(a1), float(a2), float(np.max(c)), float(log_a)


def _meter(sums: Part | TwoPart) -> float:
    return 1.0 if np.isinf(sums.c_max) else float(bounds.meter_of_moments(sums.a1, sums.a2, sums.c_max))


def _append(x: Array, value: float | None) -> Array:
    return x if value is None else np.append(x, scalar("sink", value, -np.inf))


def _average(share: Array, values: list[float]) -> float:
    """Σ share · value, where an overflowed value counts only if its share is not 0."""
    return float(sum(s * x for s, x in zip(share, values, strict=True) if s > 0))
