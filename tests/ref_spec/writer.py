"""Formal modules `Dither`, `TierB` and `Budget`: the writer's rounding, and its dither over whole tiny grids."""

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from mpmath import mp

from witcert_ref import attention, golden, radius, sketch
from witcert_ref import dither as writer

from .table import agrees, all_agree, dot, dyadic, follows, matrix, minus, vector

HALF = Fraction(1, 2)


def grid(n: int, i: int) -> Fraction:
    """The i-th of n dither values."""
    return Fraction(2 * i + 1, 2 * n) - HALF


def residual(y: Fraction, xi: Fraction) -> Fraction:
    """round (y + ξ) - ξ - y, halves up, as Lean rounds."""
    return math.floor(y + xi + HALF) - xi - y


@dataclasses.dataclass(frozen=True)
class Channel:
    """A key in float32, the float16 scale that covers it, and a dither value."""

    k: float
    scale: float
    xi: float

    @property
    def y(self) -> Fraction:
        return Fraction(self.k) / Fraction(self.scale)


@st.composite
def channels(draw: st.DrawFn, levels: float = 126.5, dither: int = writer.GRID) -> Channel:
    """Keys up to `levels` steps, anywhere or next to a tie; one of the `dither` middle values of the grid (0: none)."""
    scale = draw(st.floats(2.0**-14, 512, width=16))
    index = (writer.GRID - dither) // 2 + draw(st.integers(0, max(dither - 1, 0)))
    xi = float(grid(writer.GRID, index)) if dither else 0.0
    y = draw(st.floats(-levels, levels) | st.integers(-254, 254).map(lambda i: i / 2 - xi))
    return Channel(float(np.clip(np.float32(y * scale), -levels * scale, levels * scale)), scale, xi)


def code_of(channel: Channel) -> int:
    return int(writer.quantize([channel.k], [channel.scale], channel.xi)[0])


@follows("abs_residual_le", "dither.quantize", inputs=channels(), examples=200)
def the_residual_is_at_most_half_a_step(channel: Channel) -> None:
    assert abs(code_of(channel) - Fraction(channel.xi) - channel.y) <= HALF


@follows("abs_code_le", "dither.quantize", inputs=channels(), examples=200)
def nothing_clips(channel: Channel) -> None:
    code = code_of(channel)
    assert abs(code) <= math.ceil(abs(channel.y) + HALF)
    assert abs(code - channel.y - Fraction(channel.xi)) <= HALF


@follows("abs_dequantize_sub_le", "dither.quantize", inputs=channels(127.5, 0), examples=200)
def plain_rounding_errs_by_half_a_step(channel: Channel) -> None:
    s = Fraction(channel.scale)
    assert abs(s * code_of(channel) - Fraction(channel.k)) <= s / 2


# a scale that is short by η = 2^-10 still leaves room for dither up to ½ - 126.5 η
short = channels(126.5 * (1 + 2.0**-10), int(writer.GRID * (1 - 253 * 2.0**-10)))


@follows("abs_code_le_of_rounded_scale", "dither.quantize", inputs=short, examples=200)
def a_slightly_short_scale_does_not_clip(channel: Channel) -> None:
    assert abs(channel.xi) <= 0.5 - 126.5 * 2.0**-10
    assert abs(code_of(channel)) <= 127
    assert abs(code_of(channel) - channel.y - Fraction(channel.xi)) <= HALF


@follows(
    "sum_residual_eq_progression",
    "dither.dither",
    inputs=st.tuples(
        st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.fractions(-100, 100, max_denominator=1000)
    ),
)
def the_residuals_lie_on_a_progression(case: tuple[int, int, Fraction]) -> None:
    seed, page, y = case
    drawn = [Fraction(xi) for xi in writer.dither(seed, 1, 2, page, 8)]
    for xi in drawn:
        assert (xi + HALF) * 2 * writer.GRID % 2 == 1 and abs(xi) < HALF  # one of the grid's values
    residuals = [residual(y, xi) for xi in drawn]
    for r in residuals:
        assert ((r - residuals[0]) * writer.GRID).denominator == 1
        assert abs(r - residuals[0]) <= 1 - Fraction(1, writer.GRID) and abs(r) <= HALF


@follows(
    "mgf_residual",
    "dither.quantize",
    inputs=st.tuples(dyadic(100, 10), st.sampled_from([1, 2, 4, 8, 16]), st.floats(-20, 20)),
)
def the_residual_is_sub_gaussian(case: tuple[float, int, float]) -> None:
    y, n, power = case
    total = mp.mpf(0)
    for i in range(n):
        xi = grid(n, i)
        total += mp.exp(power * golden.number(int(writer.quantize([y], [1.0], float(xi))[0]) - xi - Fraction(y)))
    assert total / n <= mp.exp(mp.mpf(power) ** 2 / 24 + abs(power) / (2 * mp.mpf(n)))


@dataclasses.dataclass(frozen=True)
class Dithered:
    """Tokens y (in steps of `steps`) under every dither vector of d channels with n values each."""

    n: int
    q: list[float]
    y: list[list[float]]
    steps: list[list[float]]
    scale: float
    delta: float

    @property
    def keys(self) -> list[list[Fraction]]:
        return [
            [Fraction(y) * Fraction(s) for y, s in zip(*row, strict=True)]
            for row in zip(self.y, self.steps, strict=True)
        ]

    def logits(self, keys: list[list[Fraction]]) -> list[Fraction]:
        return [Fraction(self.scale) * dot(self.q, key) for key in keys]

    def residuals(self) -> Iterator[list[list[Fraction]]]:
        """Of every token and channel, in key units, for each dither vector."""
        for draw in product(range(self.n), repeat=len(self.q)):
            yield [
                [Fraction(s) * residual(Fraction(y), grid(self.n, i)) for y, s, i in zip(ys, ss, draw, strict=True)]
                for ys, ss in zip(self.y, self.steps, strict=True)
            ]

    def errors(self) -> list[list[Fraction]]:
        """Logit errors: dither vector, token."""
        return [[Fraction(self.scale) * dot(self.q, r) for r in tokens] for tokens in self.residuals()]

    def proxy(self, t: int) -> Fraction:
        return (
            Fraction(self.scale) ** 2
            * sum((Fraction(a * s) ** 2 for a, s in zip(self.q, self.steps[t], strict=True)), Fraction(0))
            / 12
        )

    def bias(self, t: int) -> Fraction:
        return Fraction(self.scale) * dot([abs(a) for a in self.q], self.steps[t]) / (2 * self.n)

    def radii(self) -> list[Any]:
        """At 50 digits; the reference has to agree."""
        log_term = mp.log(2 * len(self.y) / golden.number(self.delta))
        exact = [
            mp.sqrt(2 * golden.number(self.proxy(t)) * log_term) + golden.number(self.bias(t))
            for t in range(len(self.y))
        ]
        all_agree(radius.radius(self.q, self.steps, self.scale, len(self.y), self.delta, self.n), exact)
        return exact


@st.composite
def dithered(draw: st.DrawFn, most: int = 3, sizes: tuple[int, ...] = (1, 2, 3, 4)) -> Dithered:
    d, tokens = draw(st.integers(1, 3)), draw(st.integers(1, most))
    steps = st.lists(dyadic(1, 3).map(abs), min_size=d, max_size=d)
    return Dithered(
        n=draw(st.sampled_from(sizes)),
        q=draw(vector(d)),
        y=draw(st.lists(vector(d, 2), min_size=tokens, max_size=tokens)),
        steps=draw(st.lists(steps, min_size=tokens, max_size=tokens)),
        scale=draw(st.sampled_from([0.5, 1.0, 2.0])),
        delta=draw(st.floats(0.05, 1)),
    )


@follows("mgf_logitError", "radius.radius", inputs=st.tuples(dithered(1), st.floats(-4, 4)))
def the_logit_error_is_sub_gaussian(case: tuple[Dithered, float]) -> None:
    cell, power = case
    cell.radii()
    errors = [e for (e,) in cell.errors()]
    mean = mp.fsum(mp.exp(power * golden.number(e)) for e in errors) / len(errors)
    exponent = mp.mpf(power) ** 2 * golden.number(cell.proxy(0)) / 2 + abs(power) * golden.number(cell.bias(0))
    assert mean <= mp.exp(exponent) * (1 + mp.mpf(10) ** -golden.DIGITS)


@follows("tierB_token", "radius.radius", inputs=dithered(1))
def one_token_exceeds_its_radius_rarely(cell: Dithered) -> None:
    (most,) = cell.radii()
    errors = [golden.number(abs(e)) for (e,) in cell.errors()]
    assert Fraction(sum(e > most for e in errors), len(errors)) <= Fraction(cell.delta)


@follows("tierB_all_tokens", "radius.radius", inputs=dithered())
def any_token_exceeds_its_radius_rarely(cell: Dithered) -> None:
    most = cell.radii()
    over = [any(golden.number(abs(e)) > u for e, u in zip(tokens, most, strict=True)) for tokens in cell.errors()]
    assert Fraction(sum(over), len(over)) <= Fraction(cell.delta)


@follows("tierB_certificate", "attention.certify_tier_b", inputs=dithered(3, (1, 2, 4)), examples=20)
def the_tier_b_certificate_fails_rarely(cell: Dithered) -> None:
    radii, x = cell.radii(), golden.softmax(cell.logits(cell.keys))
    failed = []
    for tokens in cell.residuals():
        stored = [
            [k + r for k, r in zip(key, error, strict=True)] for key, error in zip(cell.keys, tokens, strict=True)
        ]
        p = golden.softmax(cell.logits(stored))
        meter = golden.meter(p, radii)
        k_hat = np.array(stored, dtype=float)
        certificate = attention.certify_tier_b(cell.q, k_hat, cell.steps, cell.scale, cell.delta, cell.n)
        agrees(certificate.meter, meter)
        assert certificate.guarantee == "fixed_trajectory"
        failed.append(golden.total_variation(x, p) > meter)
    assert Fraction(sum(failed), len(failed)) <= Fraction(cell.delta)


@st.composite
def sketched(draw: st.DrawFn) -> tuple[Dithered, np.ndarray]:
    cell = draw(dithered(2, (1, 2, 4)))
    r, d = draw(st.integers(1, 2)), len(cell.q)
    return cell, np.reshape(draw(matrix(r, d, 1)), (r, d))


@follows("tierB_sketch_certificate", "attention.certify_tier_b", inputs=sketched(), examples=15)
def the_tier_b_certificate_with_a_sketch_fails_rarely(case: tuple[Dithered, np.ndarray]) -> None:
    cell, u = case
    a = [dot(direction, cell.q) for direction in u]
    outside = [Fraction(x) - dot(a, column) for x, column in zip(cell.q, u.T, strict=True)]
    units = [[dot(np.abs(direction), step) / 254 for direction in u] for step in cell.steps]
    left = dataclasses.replace(cell, q=[float(x) for x in outside])
    rest = [Fraction(cell.scale) * dot([abs(x) for x in a], unit) / 2 for unit in units]
    c = [most + golden.number(e) for most, e in zip(left.radii(), rest, strict=True)]
    x = cell.logits(cell.keys)
    failed = []
    for tokens in cell.residuals():
        stored = [
            [k + r for k, r in zip(key, error, strict=True)] for key, error in zip(cell.keys, tokens, strict=True)
        ]
        k_hat, error = np.array(stored, dtype=float), np.array(tokens, dtype=float)
        codes = sketch.encode(error, u, cell.steps)
        p = [[int(i) * unit for i, unit in zip(*row, strict=True)] for row in zip(codes, units, strict=True)]
        for coordinate, unit, residual in zip(p, units, tokens, strict=True):
            assume(all(abs(dot(v, residual) - s) <= h / 2 for v, s, h in zip(u, coordinate, unit, strict=True)))
        y = minus(cell.logits(stored), [Fraction(cell.scale) * dot(a, s) for s in p])
        attained = golden.softmax(y)
        meter = golden.meter(attained, c)
        agrees(
            attention.certify_tier_b(cell.q, k_hat, cell.steps, cell.scale, cell.delta, cell.n, u=u, codes=codes).meter,
            meter,
        )
        failed.append(golden.total_variation(golden.softmax(x), attained) > meter)
    assert Fraction(sum(failed), len(failed)) <= Fraction(cell.delta)


@dataclasses.dataclass(frozen=True)
class Request:
    """A budget over layers, heads and steps, and a failure event for each cell in a space of `space` outcomes."""

    delta: float
    counts: tuple[int, int, int]
    events: list[set[int]]
    space: int


def share(request: Request) -> Fraction:
    """δ_req/(L·H·T); the reference gives this quotient, correctly rounded."""
    exact = Fraction(request.delta) / math.prod(request.counts)
    assert radius.delta_local(request.delta, *request.counts) == float(exact)
    return exact


@st.composite
def requests(draw: st.DrawFn) -> Request:
    delta, counts, space = draw(st.floats(0.1, 1)), draw(st.tuples(*[st.integers(1, 3)] * 3)), 4**3
    cells = math.prod(counts)
    most = math.floor(Fraction(delta) / cells * space)
    outcomes = st.lists(st.integers(0, space - 1), max_size=most).map(set)
    return Request(delta, counts, draw(st.lists(outcomes, min_size=cells, max_size=cells)), space)


@follows("deltaLocal_budget", "radius.delta_local", inputs=requests())
def the_shares_add_up_to_the_budget(request: Request) -> None:
    assert math.prod(request.counts) * share(request) == Fraction(request.delta)


@follows("request_budget_frac", "radius.delta_local", inputs=requests())
@follows("request_budget", "radius.delta_local", inputs=requests())
def a_request_fails_within_its_budget(request: Request) -> None:
    assert all(Fraction(len(event), request.space) <= share(request) for event in request.events)
    assert Fraction(len(set().union(*request.events)), request.space) <= Fraction(request.delta)
