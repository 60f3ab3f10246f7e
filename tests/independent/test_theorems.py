"""The conclusions of the Lean theorems, on drawn cases and by enumeration of the dither vectors."""

from __future__ import annotations

from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import implementation as ours
from .cases import (
    SLACK,
    Dithered,
    Keys,
    Tilted,
    at_most,
    bound,
    check,
    check_few,
    difference,
    dithered,
    dyadic,
    head,
    keys,
    matrix,
    prob,
    same,
    tilted,
    vector,
)
from .implementation import CTX


def subsets(size: int) -> list[tuple[int, ...]]:
    """All sets of tokens."""
    return list(chain.from_iterable(combinations(range(size), k) for k in range(size + 1)))


# Basic


@check
@given(tilted())
def test_tilt_and_softmax_are_probability_vectors(case: Tilted) -> None:
    assert ours.is_prob(case.p)
    assert ours.is_prob(ours.tilt(case.p, case.eps), SLACK)
    assert ours.is_prob(ours.softmax(case.eps), SLACK)
    assert ours.tilt_z(case.p, case.eps) > 0


@check
@given(st.integers(1, 6).flatmap(lambda k: st.tuples(vector(k, -20, 20), vector(k, -4, 4))))
def test_exact_attention_is_tilted_compressed_attention(case: tuple[list[float], list[float]]) -> None:
    x, eps = case
    compressed = ours.softmax([a + b for a, b in zip(x, eps, strict=True)])
    for a, b in zip(ours.softmax(x), ours.tilt(compressed, eps), strict=True):
        assert same(a, b)


@check
@given(tilted())
def test_accumulators(case: Tilted) -> None:
    assert at_most(1, ours.exp_mean(case.p, case.c))
    assert ours.exp_var(case.p, case.c) >= 0
    assert same(ours.exp_var(case.p, case.c), ours.exp_var_eq(case.p, case.c))


@check
@given(st.integers(1, 5).flatmap(lambda k: st.tuples(prob(k), prob(k))))
def test_tv_is_the_largest_excess(case: tuple[list[float], list[float]]) -> None:
    p, q = case
    excess = difference(q, p)
    largest = max(ours.total(excess[t] for t in members) for members in subsets(len(p)))
    assert same(ours.tv(q, p), ours.tv_eq_sum_pos(p, q))
    assert same(ours.tv(q, p), largest)


# Certificate


@check
@given(tilted())
def test_every_certificate_bounds_tv(case: Tilted) -> None:
    p, c, c_max = case.p, case.c, max(case.c)
    a, sigma = ours.exp_mean(p, c), ours.exp_sd(p, c)
    tv = ours.tv(ours.tilt(p, case.eps), p)
    certificates = {
        "eform": ours.eform(a),
        "twosided": ours.twosided(p, c),
        "sharp_mad": ours.sharp_mad(p, c),
        "sharp": ours.sharp(a, sigma),
        "phi": ours.phi(a),
        "tanh": ours.tanh(c_max),
        "rc_tanh": ours.rc_tanh(c_max),
        "meter": ours.meter(a, sigma, c_max),
    }
    assert [name for name, value in certificates.items() if not at_most(tv, value)] == []


@check_few
@given(st.integers(1, 4).flatmap(lambda k: st.tuples(prob(k), bound(k))))
def test_every_certificate_bounds_the_extreme_errors(case: tuple[list[float], list[float]]) -> None:
    p, c = case
    worst = max(ours.tv(ours.tilt(p, [x if t in plus else -x for t, x in enumerate(c)]), p) for plus in subsets(len(p)))
    assert at_most(worst, ours.tv_tilt_le_meter(p, c, max(c)))
    assert at_most(worst, ours.sharp_mad(p, c))
    assert at_most(worst, ours.twosided(p, c))


@check
@given(tilted())
def test_mass_of_every_set(case: Tilted) -> None:
    tilt = ours.tilt(case.p, case.eps)
    for members in subsets(len(case.p)):
        assert at_most(ours.total(tilt[t] for t in members), ours.mass_tilt_le(case.p, case.c, members))


@check
@given(tilted())
def test_order_of_the_certificates(case: Tilted) -> None:
    a, sigma = ours.exp_mean(case.p, case.c), ours.exp_sd(case.p, case.c)
    meter = ours.meter(a, sigma, max(case.c))
    assert meter < 1
    assert at_most(meter, ours.eform(a))
    assert at_most(ours.sharp_mad(case.p, case.c), ours.sharp(a, sigma))


@check
@given(dyadic(0, 20))
def test_sharp_is_attained(c_max: float) -> None:
    p, eps = ours.sharp_attained(c_max)
    c = [c_max] * 2
    assert ours.is_prob(p, SLACK)
    assert same(ours.tv(ours.tilt(p, eps), p), ours.tanh(c_max))
    assert same(ours.sharp(ours.exp_mean(p, c), ours.exp_sd(p, c)), ours.tanh(c_max))


@check
@given(dyadic(1, 8), dyadic(0, 4), dyadic(0, 8), dyadic(0, 4))
def test_upper_bounds_of_the_accumulators_are_sound(a: float, more_a: float, sigma: float, more_sigma: float) -> None:
    assert at_most(ours.phi(a), ours.phi(a + more_a))
    assert at_most(min(1, ours.sharp(a, sigma)), min(1, ours.sharp(a + more_a, sigma + more_sigma)))


def test_branches_of_phi_meet() -> None:
    assert ours.phi(2) == CTX.mpf(1) / 2
    assert same(ours.phi(2 + CTX.mpf(10) ** -55), CTX.mpf(1) / 2)


# Counterexample


def test_dispersion_is_unsound() -> None:
    tenth = CTX.mpf(1) / 10
    p, eps, c = [0.5, 0.5], [tenth, -tenth], [tenth, tenth]
    assert ours.dispersion_bound(p, c, tenth) < ours.tv(ours.tilt(p, eps), p)


def test_variance_averaging_is_unsound() -> None:
    small = CTX.exp(-20)
    p, eps, c = [1 - small, small], [0, -20], [0, 20]
    assert ours.variance_averaged(p, c) < ours.tv(ours.tilt(p, eps), p)


def test_page_drop_is_not_exact() -> None:
    p, c = [0.5, 0.5], [1, 1]
    after = ours.tilt(p, [1, 0])
    assert ours.page_drop(p, c, 0) < ours.exp_mean(after, [0, 1])


# Rope and TierA


@check
@given(st.lists(st.integers(0, 2), min_size=3, max_size=3), vector(3, -3, 3), dyadic(-500, 500), head(3), head(3))
def test_rope(
    band: list[int], theta: list[float], n: float, x: list[tuple[float, float]], y: list[tuple[float, float]]
) -> None:
    for b in range(3):
        assert same(ours.band_norm(band, ours.rope(theta, n, x), b), ours.band_norm(band, x, b))
    left = ours.dot(ours.rope(theta, 7, x), ours.rope(theta, n, y))
    assert same(left, ours.dot(ours.rope(theta, 7 - n, x), y))
    turned = ours.sub(ours.rope(theta, n, x), ours.rope(theta, n, y))
    for (a, b2), (c, d) in zip(turned, ours.rope(theta, n, ours.sub(x, y)), strict=True):
        assert same(a, c)
        assert same(b2, d)


@check
@given(keys())
def test_tier_a(case: Keys) -> None:
    bands = len(case.slack[0])
    moved = [ours.sub(k, e) for k, e in zip(case.stored, case.exact, strict=True)]
    witness = [
        [ours.band_norm(case.band, m, b) + s for b, s in zip(range(bands), slack, strict=True)]
        for m, slack in zip(moved, case.slack, strict=True)
    ]
    exact = ours.logits(case.scale, case.q, case.exact)
    stored = ours.logits(case.scale, case.q, case.stored)
    for x, y, w in zip(exact, stored, witness, strict=True):
        assert at_most(abs(y - x), ours.logit_bound(case.band, case.scale, case.q, w))
    tv = ours.tv(ours.softmax(exact), ours.softmax(stored))
    assert at_most(tv, ours.tier_a_certificate(case.band, case.scale, case.q, case.stored, witness))


# Dither


@check
@given(st.integers(1, 64))
def test_grid_is_centred_and_inside(n: int) -> None:
    values = [ours.grid(n, i) for i in range(n)]
    assert all(abs(x) < 0.5 for x in values)
    assert all(same(x, -y) for x, y in zip(values, reversed(values), strict=True))


@check
@given(st.integers(1, 16), dyadic(-7, 7))
def test_residuals_are_equally_spaced(n: int, y: float) -> None:
    residuals = sorted(ours.residual(y, ours.grid(n, i)) for i in range(n))
    assert at_most(-0.5, residuals[0])
    assert at_most(residuals[-1], 0.5)
    for a, b in pairwise(residuals):
        assert same(b - a, CTX.mpf(1) / n)


@check
@given(st.integers(1, 16), st.integers(1, 8), dyadic(-1, 1), dyadic(0, 1))
def test_codes_do_not_clip(n: int, q_max: int, share: float, part: float) -> None:
    y = share * (q_max - 0.5)
    assert all(abs(ours.code(y, ours.grid(n, i))) <= q_max for i in range(n))
    eta = CTX.mpf(part) / (2 * n) / (q_max - 0.5)
    stretched = y * (1 + eta)
    inside = [ours.grid(n, i) for i in range(n) if abs(ours.grid(n, i)) <= 0.5 - (q_max - 0.5) * eta]
    assert all(abs(ours.code(stretched, xi)) <= q_max for xi in inside)


@check
@given(st.integers(1, 12), dyadic(-3, 3), dyadic(-1, 1), dyadic(-12, 12))
def test_dither_moments(n: int, y: float, start: float, slope: float) -> None:
    assert at_most(*ours.mgf_residual(n, y, slope))
    assert at_most(*ours.mgf_progression(n, start, slope))
    assert at_most(*ours.sinh_le_mul_exp(abs(slope)))
    assert at_most(*ours.sinh_nat_mul_le(n, abs(slope)))
    assert at_most(*ours.mul_cosh_sub_sinh_le(abs(slope)))


# TierB


@check_few
@given(dithered(), dyadic(-2, 2))
def test_logit_error_moments(case: Dithered, slope: float) -> None:
    assert at_most(*ours.mgf_logit_error(case.scale, case.n, case.q, case.s[0], case.y[0], slope))


@check_few
@given(dithered(), st.integers(1, 40))
def test_tier_b_one_token(case: Dithered, level: int) -> None:
    """By enumeration: the radius is exceeded on at most a fraction `2 e^{-L}`."""
    s, y, depth = case.s[0], case.y[0], CTX.mpf(level) / 8
    r = ours.radius(case.scale, case.n, case.q, s, depth)
    failures = ours.frac(
        len(case.q), case.n, lambda w: r < abs(ours.logit_error(case.scale, case.n, case.q, s, y, w)) - SLACK
    )
    assert failures <= ours.tier_b_token(depth)


@check_few
@given(dithered())
def test_tier_b(case: Dithered) -> None:
    """By enumeration: radii, hence meter, fail on at most a fraction `δ` of the dither vectors."""
    level = ours.tier_b_level(len(case.s), case.delta)
    radii = [ours.radius(case.scale, case.n, case.q, s, level) for s in case.s]
    exact = ours.tier_b_logits(case.scale, case.q, case.s, case.y)
    target = ours.softmax(exact)

    def errors(w: ours.Dither) -> list[ours.Real]:
        return [ours.logit_error(case.scale, case.n, case.q, s, y, w) for s, y in zip(case.s, case.y, strict=True)]

    def outside(w: ours.Dither) -> bool:
        return any(r < abs(e) - SLACK for r, e in zip(radii, errors(w), strict=True))

    def uncertified(w: ours.Dither) -> bool:
        stored = ours.softmax([x + e for x, e in zip(exact, errors(w), strict=True)])
        return bool(ours.tv_tilt_le_meter(stored, radii, max(radii)) < ours.tv(target, stored) - SLACK)

    radius_failures = ours.frac(len(case.q), case.n, outside)
    meter_failures = ours.frac(len(case.q), case.n, uncertified)
    assert meter_failures <= radius_failures <= case.delta


@pytest.mark.parametrize(("d", "n"), [(1, 64), (2, 8), (3, 4), (6, 2)])
def test_tier_b_is_within_its_own_tail(d: int, n: int) -> None:
    """Every channel alike: the largest error of all, against every level."""
    q, s, y = [1.0] * d, [1.0] * d, [0.25] * d
    magnitudes = [abs(ours.logit_error(1, n, q, s, y, w)) for w in ours.dithers(d, n)]
    for level in range(1, 33):
        r = ours.radius(1, n, q, s, CTX.mpf(level) / 8)
        assert sum(m > r + SLACK for m in magnitudes) <= len(magnitudes) * ours.tier_b_token(CTX.mpf(level) / 8)


@check
@given(vector(3, -4, 4), vector(3, 0, 2), dyadic(0, 2), st.integers(1, 300))
def test_radius_parts_are_nonnegative(q: list[float], s: list[float], scale: float, n: int) -> None:
    assert ours.proxy(scale, q, s) >= 0
    assert ours.bias(scale, n, q, s) >= 0
    if ours.proxy(scale, q, s) == 0:
        assert ours.logit_error(scale, n, q, s, [0.375] * 3, (0, n // 2, n - 1)) == 0


# Budget


@check
@given(dyadic(0, 1), st.integers(1, 100), st.integers(1, 100), st.integers(1, 100_000))
def test_budget_adds_up(delta: float, layers: int, heads: int, steps: int) -> None:
    assert same(layers * heads * steps * ours.delta_local(delta, layers, heads, steps), delta)


@check
@given(st.lists(tilted(), min_size=1, max_size=4), dyadic(0, 1))
def test_no_head_over_the_threshold_means_all_are_certified(group: list[Tilted], threshold: float) -> None:
    meters = [ours.tv_tilt_le_meter(g.p, g.c, max(g.c)) for g in group]
    tvs = [ours.tv(ours.tilt(g.p, g.eps), g.p) for g in group]
    assert ours.any_of_group(meters, threshold) or at_most(max(tvs), threshold)


# Output and Merge


@check
@given(
    st.integers(1, 5).flatmap(
        lambda k: st.tuples(prob(k), prob(k), matrix(k, 3, -4, 4), matrix(k, 3, -1, 1), vector(3, -4, 4))
    )
)
def test_output_bound(
    case: tuple[list[float], list[float], list[list[float]], list[list[float]], list[float]],
) -> None:
    p, q, v, shift, centre = case
    stored = [[a + b for a, b in zip(x, e, strict=True)] for x, e in zip(v, shift, strict=True)]
    exact, approximate = ours.weighted(p, v), ours.weighted(q, stored)
    r = max(ours.norm(difference(x, centre)) for x in v)
    error = ours.norm([a - b for a, b in zip(exact, approximate, strict=True)])
    assert at_most(error, ours.output_bound(p, q, r, [ours.norm(e) for e in shift]))


@check
@given(
    st.integers(1, 6).flatmap(
        lambda k: st.tuples(
            st.lists(st.integers(0, 2), min_size=k, max_size=k), vector(k, -8, 8), vector(k, -4, 4), vector(3, 0, 4)
        )
    )
)
def test_merge_and_blocks(case: tuple[list[int], list[float], list[float], list[float]]) -> None:
    split, x, f, g = case
    weights = [CTX.exp(t) for t in x]
    assert same(ours.merge_splits(split, weights, f), ours.average(weights, f))
    per_token = ours.total(w * g[b] for w, b in zip(weights, split, strict=True))
    assert same(ours.sum_blockwise(split, weights, g), per_token)


@check
@given(tilted(), st.sets(st.integers(0, 5)))
def test_repairs(case: Tilted, chosen: set[int]) -> None:
    eps = [0 if t in chosen else e for t, e in enumerate(case.eps)]
    c = ours.repaired(case.c, chosen)
    tv = ours.tv(ours.tilt(case.p, eps), case.p)
    assert at_most(tv, ours.tv_tilt_le_meter(case.p, c, max(c)))
    if chosen.issuperset(range(len(case.p))):
        assert tv == 0


@check
@given(st.integers(1, 6).flatmap(lambda k: st.tuples(prob(k), st.sets(st.integers(0, k - 1)))))
def test_eviction_is_the_dropped_mass(case: tuple[list[float], set[int]]) -> None:
    p, chosen = case
    kept = chosen if any(p[t] > 0 for t in chosen) else set(range(len(p)))
    assert same(ours.tv(p, ours.evict(p, kept)), ours.evicted_mass(p, kept))


# Rounding


@check
@given(tilted(), tilted())
def test_rounding_of_logits_is_absorbed(case: Tilted, rounding: Tilted) -> None:
    pairs = zip(case.eps, rounding.eps, case.c, rounding.c, strict=False)
    assert all(abs(e + r) <= c + z for e, r, c, z in pairs)


@check
@given(dyadic(0, 8), st.integers(0, 1023), dyadic(-1, 1))
def test_relative_error_of_a_weight(x: float, part: int, share: float) -> None:
    w, eta = CTX.exp(x), part / 1024
    moved = w * (1 + eta * share)
    assert at_most(abs(CTX.log(moved) - CTX.log(w)), ours.logit_error_of_relative(eta))


@check
@given(st.integers(0, 8).flatmap(lambda k: st.tuples(vector(k, 0, 8), vector(k, -1, 1))), st.integers(0, 1023))
def test_floating_point_sums(case: tuple[list[float], list[float]], part: int) -> None:
    terms, shares = case
    unit = part / 1024
    value = ours.fl_sum(terms, [unit * x for x in shares])
    assert at_most(ours.total(terms), ours.sum_le_fl_sum_div(value, unit, len(terms)))
    assert at_most(ours.fl_sum_div_le_sum(value, unit, len(terms)), ours.total(terms))


# Rigidity

ANGLES = st.lists(st.integers(1, 3 * 64 - 1), min_size=3, max_size=3, unique=True).map(lambda x: [k / 64 for k in x])


@check_few
@given(ANGLES, st.integers(0, 2), st.booleans(), st.integers(-9, 9), matrix(3, 2, -4, 4))
def test_frequency_selection_is_equivariant(
    theta: list[float], j: int, conjugate: bool, n: int, z: list[list[float]]
) -> None:
    row = [CTX.mpc(2, 1) if k == j else CTX.mpc(0) for k in range(3)]
    none = [CTX.mpc(0)] * 3
    m, m_conj = ([none], [row]) if conjugate else ([row], [none])
    signal = [CTX.mpc(*x) for x in z]
    turned = ours.sketch(m, m_conj, ours.rope_c(theta, n, signal))
    expected = ours.rope_c([-theta[j] if conjugate else theta[j]], n, ours.sketch(m, m_conj, signal))
    assert at_most(abs(turned[0] - expected[0]), 0)


@check_few
@given(
    ANGLES,
    st.lists(st.integers(1, 4), min_size=6, max_size=6),
    st.sets(st.integers(0, 5), min_size=2),
    dyadic(-3, 3),
)
def test_nothing_else_is_equivariant(theta: list[float], values: list[int], support: set[int], phase: float) -> None:
    row = [CTX.mpc(v) if k in support else CTX.mpc(0) for k, v in enumerate(values)]
    m, m_conj = [row[:3]], [row[3:]]
    signals = [[CTX.mpc(w if k == j else 0) for k in range(3)] for j in range(3) for w in (1, CTX.j)]

    def violation(phi: float) -> ours.Real:
        return max(
            abs(ours.sketch(m, m_conj, ours.rope_c(theta, 1, z))[0] - CTX.expj(phi) * ours.sketch(m, m_conj, z)[0])
            for z in signals
        )

    candidates = [phase, *theta, *(-t for t in theta)]
    assert all(violation(phi) > CTX.mpf(10) ** -6 for phi in candidates)
