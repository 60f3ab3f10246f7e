"""Formal modules `Rope`, `TierA` and, pending, the half-step and sketch certificates: from keys to logit errors."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from mpmath import mp

from witcert_ref import attention, equalizer, golden, half_step, rope, sketch, witness
from witcert_ref.rope import RopeLayout

from .table import agrees, all_agree, dot, dyadic, follows, matrix, minus, norm, vector

LAYOUTS: list[RopeLayout] = ["half", "interleaved"]


def band_channels(d: int, n_bands: int, layout: RopeLayout) -> list[list[int]]:
    """The channels of each band: equal, contiguous groups of RoPE pairs."""
    half = d // 2
    pairs = [(j, j + half) if layout == "half" else (2 * j, 2 * j + 1) for j in range(half)]
    size = half // n_bands
    return [[c for pair in pairs[b * size : (b + 1) * size] for c in pair] for b in range(n_bands)]


def band_norms(x: Sequence[Any], n_bands: int, layout: RopeLayout) -> list[Any]:
    return [norm([x[c] for c in band]) for band in band_channels(len(x), n_bands, layout)]


@dataclasses.dataclass(frozen=True)
class Turn:
    x: list[float]
    y: list[float]
    theta: list[float]
    m: float
    n: float
    layout: RopeLayout


turns = st.builds(
    Turn,
    vector(8),
    vector(8),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    dyadic(64),
    dyadic(64),
    st.sampled_from(LAYOUTS),
)


def rotated(x: Sequence[float], position: float, turn: Turn) -> list[Any]:
    """RoPE at 50 digits; the reference has to agree."""
    out: list[Any] = [None] * len(x)
    for theta, (a, b) in zip(turn.theta, band_channels(len(x), len(x) // 2, turn.layout), strict=True):
        angle = golden.number(position) * golden.number(theta)
        out[a] = mp.cos(angle) * x[a] - mp.sin(angle) * x[b]
        out[b] = mp.sin(angle) * x[a] + mp.cos(angle) * x[b]
    all_agree(rope.rotate(x, position, turn.theta, turn.layout), out, size=norm(x))
    return out


@follows("bandNorm_rope", "rope.rotate", "rope.band_norms", inputs=turns)
def band_norms_do_not_see_rope(turn: Turn) -> None:
    rotated(turn.x, turn.n, turn)
    turned = rope.rotate(turn.x, turn.n, turn.theta, turn.layout)
    for n_bands in (1, 2, 4):
        exact = band_norms(turn.x, n_bands, turn.layout)
        all_agree(rope.band_norms(turn.x, n_bands, turn.layout), exact)
        all_agree(rope.band_norms(turned, n_bands, turn.layout), exact)


@follows("rope_sub", "rope.rotate", inputs=turns)
def rope_is_linear(turn: Turn) -> None:
    difference = rotated([float(a) for a in minus(turn.x, turn.y)], turn.n, turn)
    separate = zip(rotated(turn.x, turn.n, turn), rotated(turn.y, turn.n, turn), strict=True)
    all_agree([float(a - b) for a, b in separate], difference, size=norm(turn.x) + norm(turn.y))


@follows("dot_rope_rope", "rope.rotate", inputs=turns)
def the_logit_depends_on_the_relative_position(turn: Turn) -> None:
    left = mp.fdot(rotated(turn.x, turn.m, turn), rotated(turn.y, turn.n, turn))
    right = mp.fdot(rotated(turn.x, turn.m - turn.n, turn), [golden.number(a) for a in turn.y])
    agrees(float(left), right, size=norm(turn.x) * norm(turn.y))


@dataclasses.dataclass(frozen=True)
class Keys:
    """A query, exact and stored keys, and the logit scale."""

    q: list[float]
    k: list[list[float]]
    k_hat: list[list[float]]
    scale: float
    n_bands: int
    layout: RopeLayout

    @property
    def residual(self) -> np.ndarray:
        return np.subtract(self.k_hat, self.k)

    def logits(self, keys: Sequence[Sequence[float]]) -> list[Fraction]:
        return [Fraction(self.scale) * dot(self.q, key) for key in keys]

    @property
    def errors(self) -> list[Fraction]:
        return [abs(e) for e in minus(self.logits(self.k_hat), self.logits(self.k))]

    @property
    def tv(self) -> Any:
        return golden.total_variation(golden.softmax(self.logits(self.k)), golden.softmax(self.logits(self.k_hat)))


@st.composite
def any_keys(draw: st.DrawFn) -> Keys:
    """Keys of any scheme: often the residual lies along the query, where Cauchy-Schwarz is sharp."""
    tokens, d = draw(st.integers(1, 4)), draw(st.sampled_from([4, 8]))
    q, k = draw(vector(d)), draw(matrix(tokens, d))
    residual = draw(
        matrix(tokens, d, 1) | st.lists(dyadic(1), min_size=tokens, max_size=tokens).map(lambda a: np.outer(a, q))
    )
    n_bands = draw(st.sampled_from([n for n in (1, 2, 4) if d // 2 % n == 0]))
    stored = (np.array(k) + np.array(residual)).tolist()
    return Keys(q, k, stored, draw(st.sampled_from([0.0, 0.125, 0.5])), n_bands, draw(st.sampled_from(LAYOUTS)))


def witness_of(keys: Keys) -> tuple[np.ndarray, list[Any]]:
    """The stored witness, and c from it at 50 digits; the reference has to agree."""
    stored = witness.witness(keys.residual, keys.n_bands, keys.layout)
    query, c = band_norms(keys.q, keys.n_bands, keys.layout), []
    for error, norms in zip(keys.residual, stored, strict=True):
        held = [golden.number(float(w)) for w in norms]
        assert all(w >= n for w, n in zip(held, band_norms(error, keys.n_bands, keys.layout), strict=True))
        c.append(golden.number(keys.scale) * mp.fdot(query, held))
    all_agree(witness.logit_bound(keys.q, stored, keys.scale, keys.layout), c)
    return stored, c


@follows("abs_logit_error_le", "witness.logit_bound", inputs=any_keys())
def the_witness_bounds_the_logit_error(keys: Keys) -> None:
    _, c = witness_of(keys)
    assert all(golden.number(error) <= bound for error, bound in zip(keys.errors, c, strict=True))


@follows("abs_dot_le_sum_bandNorm", "witness.logit_bound", inputs=any_keys())
def cauchy_schwarz_holds_in_each_band(keys: Keys) -> None:
    query = band_norms(keys.q, keys.n_bands, keys.layout)
    norms = [band_norms(error, keys.n_bands, keys.layout) for error in keys.residual]
    exact = [mp.fdot(query, n) for n in norms]
    all_agree(witness.logit_bound(keys.q, np.array(norms, dtype=float), 1.0, keys.layout), exact)
    for error, bound in zip(keys.residual, exact, strict=True):
        assert +golden.number(abs(dot(keys.q, error))) <= bound * (1 + mp.mpf(10) ** -60)


@follows("tierA_certificate", "attention.certify_tier_a", inputs=any_keys())
def tier_a_certifies_any_scheme(keys: Keys) -> None:
    stored, c = witness_of(keys)
    exact = golden.meter(golden.softmax(keys.logits(keys.k_hat)), c)
    agrees(attention.certify_tier_a(keys.q, keys.k_hat, stored, keys.scale, keys.layout).meter, exact)
    assert keys.tv <= exact


@dataclasses.dataclass(frozen=True)
class Rounded(Keys):
    """Keys that are off by at most half a step, with a sketch: directions u and coefficients a (None: q·u)."""

    steps: list[list[float]]
    u: np.ndarray
    a: list[float] | None

    @property
    def coefficients(self) -> list[Fraction]:
        return [dot(self.q, u) for u in self.u] if self.a is None else [Fraction(a) for a in self.a]

    @property
    def outside(self) -> list[Fraction]:
        return [Fraction(x) - dot(self.coefficients, column) for x, column in zip(self.q, self.u.T, strict=True)]

    def half_step(self, w: Sequence[Any]) -> list[Fraction]:
        return [Fraction(self.scale) * dot([abs(x) for x in w], step) / 2 for step in self.steps]

    @property
    def units(self) -> list[list[Fraction]]:
        return [[dot([abs(x) for x in u], step) / 254 for u in self.u] for step in self.steps]

    @property
    def code_errors(self) -> list[Fraction]:
        return [Fraction(self.scale) * dot([abs(a) for a in self.coefficients], unit) / 2 for unit in self.units]

    @property
    def c(self) -> list[Fraction]:
        return [b + e for b, e in zip(self.half_step(self.outside), self.code_errors, strict=True)]

    @property
    def coordinates(self) -> list[list[Fraction]]:
        """What the codes stand for; every code is the nearest, the theorem's hypothesis with δ = unit/2."""
        codes = sketch.encode(self.residual, self.u, self.steps)
        stored = [[int(c) * unit for c, unit in zip(*row, strict=True)] for row in zip(codes, self.units, strict=True)]
        for p, unit, error in zip(stored, self.units, self.residual, strict=True):
            assume(all(abs(dot(u, error) - x) <= h / 2 for u, x, h in zip(self.u, p, unit, strict=True)))
        return stored

    @property
    def corrections(self) -> list[Fraction]:
        return [dot(self.coefficients, p) for p in self.coordinates]

    @property
    def corrected(self) -> list[Fraction]:
        shift = [Fraction(self.scale) * x for x in self.corrections]
        return minus(self.logits(self.k_hat), shift)


@st.composite
def rounded(draw: st.DrawFn) -> Rounded:
    tokens, d, r = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4])), draw(st.integers(0, 2))
    steps = np.abs(draw(matrix(tokens, d, 1)))
    share = np.array(
        draw(
            st.lists(
                st.lists(st.sampled_from([-8, 8]) | st.integers(-8, 8), min_size=d, max_size=d),
                min_size=tokens,
                max_size=tokens,
            )
        )
    )
    k = np.array(draw(matrix(tokens, d)))
    return Rounded(
        q=draw(vector(d)),
        k=k.tolist(),
        k_hat=(k + steps * share / 16).tolist(),
        scale=draw(st.sampled_from([0.0, 0.125, 0.5])),
        n_bands=1,
        layout="half",
        steps=steps.tolist(),
        u=np.reshape(draw(matrix(r, d, 1)), (r, d)),
        a=draw(st.none() | vector(r)),
    )


def certified(x: Sequence[Any], y: Sequence[Any], c: Sequence[Any]) -> None:
    """The meter of y and c bounds the total variation between both, and `certify` gives this meter."""
    exact, attained = golden.softmax(x), golden.softmax(y)
    meter = golden.meter(attained, c)
    assert golden.total_variation(exact, attained) <= meter
    agrees(attention.certify([float(t) for t in y], [float(t) for t in c]).meter, meter)


@follows("abs_scale_sum_le_half_step", "half_step.logit_bound", inputs=rounded())
@follows("abs_logit_error_le_half_step", "half_step.logit_bound", inputs=rounded())
def half_a_step_bounds_the_logit_error(keys: Rounded) -> None:
    bound = keys.half_step(keys.q)
    all_agree(half_step.logit_bound(keys.q, keys.steps, keys.scale), bound)
    assert all(error <= most for error, most in zip(keys.errors, bound, strict=True))


@follows("halfStep_certificate", "half_step.logit_bound", inputs=rounded())
def half_step_certifies(keys: Rounded) -> None:
    all_agree(half_step.logit_bound(keys.q, keys.steps, keys.scale), keys.half_step(keys.q))
    certified(keys.logits(keys.k), keys.logits(keys.k_hat), keys.half_step(keys.q))


@follows("abs_corrected_error_le", "sketch.correction", "sketch.code_error", "sketch.logit_bound", inputs=rounded())
def the_corrected_logit_errs_by_what_the_sketch_leaves(keys: Rounded) -> None:
    a = [float(x) for x in keys.coefficients]
    codes = sketch.encode(keys.residual, keys.u, keys.steps)
    size = [dot([abs(x) for x in keys.coefficients], [127 * x for x in unit]) for unit in keys.units]
    for value, exact, most in zip(sketch.correction(a, codes, keys.u, keys.steps), keys.corrections, size, strict=True):
        agrees(value, exact, size=most)
    all_agree(sketch.code_error(a, [[float(x) for x in unit] for unit in keys.units], keys.scale), keys.code_errors)
    all_agree(sketch.logit_bound(keys.q, keys.u, keys.steps, keys.scale, keys.a), keys.c)
    errors = minus(keys.corrected, keys.logits(keys.k))
    for error, residual, rest, bound in zip(errors, keys.residual, keys.code_errors, keys.c, strict=True):
        assert abs(error) <= abs(Fraction(keys.scale) * dot(keys.outside, residual)) + rest <= bound


@follows("sketch_certificate", "sketch.logit_bound", inputs=rounded())
def the_sketch_certifies(keys: Rounded) -> None:
    all_agree(sketch.logit_bound(keys.q, keys.u, keys.steps, keys.scale, keys.a), keys.c)
    certified(keys.logits(keys.k), keys.corrected, keys.c)


@dataclasses.dataclass(frozen=True)
class Read:
    """A read: sketched keys in equalised coordinates, some tokens exact, a bias and a soft cap."""

    keys: Rounded
    mu: list[float]
    f: list[float]
    bias: list[float]
    exact: list[float | None]
    cap: float


@st.composite
def reads(draw: st.DrawFn) -> Read:
    keys = draw(rounded())
    tokens, d = len(keys.k), len(keys.q)
    return Read(
        keys=keys,
        mu=draw(vector(d)),
        f=draw(st.lists(st.sampled_from([0.25, 1.0, 2.0]), min_size=d, max_size=d)),
        bias=draw(vector(tokens)),
        exact=draw(st.lists(st.none() | dyadic(4), min_size=tokens, max_size=tokens)),
        cap=draw(st.sampled_from([0.0, 2.0, 30.0])),
    )


@follows("read_certificate", "attention.certify", inputs=reads())
def a_read_is_certified(read: Read) -> None:
    keys = read.keys  # its q is z = q∘f, its k is x = (k - μ)/f
    shift = Fraction(keys.scale) * dot(
        [Fraction(z) / Fraction(f) for z, f in zip(keys.q, read.f, strict=True)], read.mu
    )

    def capped(logits: list[Fraction]) -> list[Any]:
        whole = [golden.number(x + shift + Fraction(b)) for x, b in zip(logits, read.bias, strict=True)]
        limited = [read.cap * mp.tanh(x / read.cap) for x in whole] if read.cap else whole
        return [x if e is None else golden.number(e) for x, e in zip(limited, read.exact, strict=True)]

    c = [bound if e is None else Fraction(0) for bound, e in zip(keys.c, read.exact, strict=True)]
    certified(capped(keys.logits(keys.k)), capped(keys.corrected), c)


@follows("softmax_add_const", "equalizer.apply", inputs=reads())
def centred_keys_give_the_same_attention(read: Read) -> None:
    q, k = read.keys.q, read.keys.k
    x = equalizer.apply(k, read.mu, read.f)
    for key, stored in zip(k, x, strict=True):
        exact = [(Fraction(a) - Fraction(m)) / Fraction(f) for a, m, f in zip(key, read.mu, read.f, strict=True)]
        assert [Fraction(s) for s in stored] == exact
    z = [a * f for a, f in zip(q, read.f, strict=True)]
    plain, centred = (golden.softmax([dot(w, key) for key in keys]) for w, keys in ((q, k), (z, x)))
    for a, b in zip(plain, centred, strict=True):
        assert abs(a - b) <= mp.mpf(10) ** -golden.DIGITS


@follows(
    "abs_softcap_sub_le",
    "attention.soft_cap",
    inputs=st.tuples(dyadic(64), dyadic(64), st.sampled_from([0.5, 2.0, 30.0])),
)
def the_soft_cap_does_not_enlarge_a_difference(case: tuple[float, float, float]) -> None:
    a, b, cap = case
    capped = [cap * mp.tanh(golden.number(x) / cap) for x in (a, b)]
    all_agree(attention.soft_cap([a, b], cap), capped)
    assert abs(capped[1] - capped[0]) <= abs(golden.number(b) - golden.number(a))
