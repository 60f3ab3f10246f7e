"""Attention, certificates and the merge of splits."""

import dataclasses
import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from witcert_ref import attention, bounds, golden, radius, sketch, tv, witness

from .strategies import FLOAT, cells, down, examples

D, D_V = 8, 6
SM_SCALE = D**-0.5


def draw(seed: int, tokens: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "y": rng.normal(0, 3, tokens),
        "c": rng.exponential(0.3, tokens),
        "v_hat": rng.normal(size=(tokens, D_V)),
        "rho": rng.exponential(0.01, tokens),
        "zeta": rng.exponential(1e-4, tokens),
        "known": rng.normal(0, 0.2, tokens),
        "c_known": rng.exponential(0.2, tokens),
    }


def pick(row: dict[str, Any], tokens: Any) -> dict[str, Any]:
    return {name: value[tokens] for name, value in row.items()}


def close(got: attention.Part, want: attention.Part) -> None:
    for field in dataclasses.fields(attention.Part):
        left, right = getattr(got, field.name), getattr(want, field.name)
        if isinstance(left, attention.TwoPart):
            np.testing.assert_allclose(dataclasses.astuple(left), dataclasses.astuple(right), rtol=1e-10)
        elif field.name in ("guarantee", "two_part"):
            assert left == right
        else:
            np.testing.assert_allclose(left, right, rtol=1e-10, err_msg=field.name)


def test_exact_attention() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=D), rng.normal(size=(5, D)), rng.normal(size=(5, D_V))
    out, lse = attention.exact(q, k, v, SM_SCALE)
    weights = np.exp(k @ q * SM_SCALE)
    np.testing.assert_allclose(out, weights @ v / weights.sum())
    assert lse == pytest.approx(np.log(weights.sum()))
    sunk, sunk_lse = attention.exact(q, k, v, SM_SCALE, sink=1.0)
    np.testing.assert_allclose(sunk, weights @ v / (weights.sum() + np.e))
    assert sunk_lse == pytest.approx(np.log(weights.sum() + np.e))
    capped = attention.logits(q, k, SM_SCALE, bias=np.arange(5.0), logits_soft_cap=2.0)
    np.testing.assert_allclose(capped, 2 * np.tanh((k @ q * SM_SCALE + np.arange(5)) / 2))
    np.testing.assert_array_equal(attention.compressed(q, k, v, SM_SCALE, sink=1.0)[0], sunk)


def test_no_tokens() -> None:
    none = np.zeros((0, D)), np.zeros((0, D_V))
    out, lse = attention.exact(np.ones(D), *none, SM_SCALE)
    assert out.tolist() == [0] * D_V and lse == -np.inf
    assert attention.exact(np.ones(D), *none, SM_SCALE, sink=2.0)[1] == 2
    certificate = attention.certify([], [])
    assert (certificate.meter, certificate.eform, certificate.risk) == (0, 0, 0)
    empty = attention.merge([attention.part([], [], none[1])] * 2)
    assert empty.out.tolist() == [0] * D_V and empty.lse == -np.inf and empty.meter == empty.risk == 0
    assert attention.certify_tier_b(np.ones(D), none[0], np.zeros((0, 1)), 1.0, 0.1).meter == 0


@examples(80)
@given(cells(), st.floats(0, 3), st.sampled_from([0.0, 1.0, 50.0]))
def test_the_soft_cap_does_not_enlarge_a_difference(
    cell: tuple[list[float], list[float]], gap: float, cap: float
) -> None:
    y = np.array(cell[0])
    moved = np.abs(attention.soft_cap(y + gap, cap) - attention.soft_cap(y, cap))
    assert (moved <= gap + 1e-14 * (np.abs(y) + gap)).all()


@examples(60)
@given(cells(6), st.data())
def test_the_certificate_covers_any_error_within_c(cell: tuple[list[float], list[float]], data: st.DataObject) -> None:
    y, c = cell
    signs = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=len(y), max_size=len(y)))
    certificate = attention.certify(y, c)
    x = [Fraction(a) - Fraction(s * e) for a, s, e in zip(y, signs, c, strict=True)]
    truth = down(golden.total_variation(golden.softmax(x), golden.softmax(y)))
    assert golden.meter(golden.softmax(y), c) >= truth
    assert certificate.meter == pytest.approx(float(golden.meter(golden.softmax(y), c)), rel=FLOAT)
    assert certificate.risk == pytest.approx(float(golden.moments(golden.softmax(y), c)[3]), rel=FLOAT)
    assert certificate.guarantee == "any_query"


def test_exact_tokens_have_no_error_and_rounding_is_added() -> None:
    y = np.array([1.0, 0.0, 2.0])
    assert attention.certify(y, np.zeros(3)).meter == 0
    repaired = attention.certify(y, [0.0, 0.5, 0.0])
    assert repaired.meter == bounds.meter(tv.softmax(y), [0, 0.5, 0]) < attention.certify(y, [0.5] * 3).meter
    rounded = attention.certify(y, [0.0, 0.5, 0.0], zeta=[1e-3, 0, 2e-3])
    want = bounds.meter(tv.softmax(y), [1e-3, 0.5, 2e-3]) + np.tanh(1e-3)
    assert rounded.meter == pytest.approx(want, rel=1e-14)


def test_rounded_logits_are_covered_on_either_side() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        y, c, zeta = rng.normal(0, 2, 6), rng.exponential(0.1, 6), rng.exponential(0.02, 6)
        z = y + zeta * rng.choice([-1, 1], 6)
        x = y - c * rng.choice([-1, 1], 6)
        meter = attention.certify(z, c, zeta=zeta).meter
        for used in (y, z):
            assert tv.total_variation(tv.softmax(x), tv.softmax(used)) <= meter


def test_the_known_part_helps_only_where_it_is_tighter() -> None:
    row = draw(0, 9)
    y, c, known, c_known = row["y"], row["c"], row["known"], row["c_known"]
    one, two = bounds.meter(tv.softmax(y), c), sketch.two_part_meter(y, known, c_known)
    assert attention.certify(y, c, known=known, c_known=c_known).meter == min(one, two)
    assert attention.certify(y, c, known=known, c_known=np.full(9, np.inf)).meter == one
    assert attention.certify(y, np.full(9, np.inf), known=known, c_known=np.zeros(9)).meter < 1


def test_an_unknown_token_makes_the_meter_one() -> None:
    y = np.array([0.0, -2000.0, 1.0])
    certificate = attention.certify(y, [0.0, np.inf, 0.0])
    assert (certificate.meter, certificate.eform, certificate.risk) == (1, np.inf, np.inf)
    merged = attention.merge(
        [attention.part(y[1:2], [np.inf], np.zeros((1, 2))), attention.part(y[::2], [0, 0], np.zeros((2, 2)))]
    )
    assert (merged.meter, merged.eform, merged.risk) == (1, np.inf, np.inf)
    assert np.isfinite(merged.a1) and np.isfinite(merged.out).all() and merged.value_error() == 0


@examples(80)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_any_split_merges_to_the_whole(seed: int, sizes: list[int], with_sink: bool, with_known: bool) -> None:
    row = draw(seed, sum(sizes))
    if not with_known:
        del row["known"], row["c_known"]
    sink = 0.5 if with_sink else None
    edges = np.cumsum([0, *sizes])
    parts = [attention.part(**pick(row, slice(a, b))) for a, b in itertools.pairwise(edges)]
    whole = attention.merge([attention.part(**row)], sink)
    merged = attention.merge(parts, sink)
    close(merged, whole)
    close(attention.merge(parts[::-1], sink), whole)
    if len(parts) > 1:
        close(attention.merge([parts[0], attention.merge(parts[1:])], sink), whole)
    certificate = attention.certify(**{k: v for k, v in row.items() if k not in ("v_hat", "rho")}, sink=sink)
    assert merged.meter == pytest.approx(certificate.meter, rel=1e-7)
    assert merged.eform == pytest.approx(certificate.eform, rel=1e-10)
    assert merged.risk == pytest.approx(certificate.risk, rel=1e-10, abs=1e-15)
    values = row["v_hat"]
    np.testing.assert_allclose(merged.out, certificate.p_tilde[: len(values)] @ values, rtol=1e-10, atol=1e-14)


def test_a_sink_enters_once_and_dilutes() -> None:
    row = draw(1, 8)
    parts = [attention.part(**pick(row, slice(0, 3))), attention.part(**pick(row, slice(3, 8)))]
    without, once = attention.merge(parts), attention.merge(parts, 1.0)
    assert once.lse == pytest.approx(np.logaddexp(without.lse, 1.0))
    assert once.a1 == pytest.approx(without.a1 * np.exp(without.lse - once.lse))
    assert once.c_max == without.c_max


def test_overflow_and_the_weakest_guarantee_survive_merging() -> None:
    loud = attention.part([0.0], [800.0], np.ones((1, 2)), guarantee="fixed_trajectory")
    quiet = attention.part([1.0, 2.0], [0.1, 0.1], np.ones((2, 2)))
    merged = attention.merge([quiet, loud])
    assert merged.guarantee == "fixed_trajectory" and merged.meter == 1 and merged.eform == np.inf
    assert 790 < merged.risk < 800
    absent = dataclasses.replace(loud, lse=-5000.0)
    assert attention.merge([quiet, absent]).a1 == quiet.a1
    wild = attention.part([0.0, 0.0], [0.1, 0.1], np.ones((2, 1)), known=[900.0, 0.0], c_known=[0.1, 0.1])
    assert wild.meter == pytest.approx(bounds.meter([0.5, 0.5], [0.1, 0.1]))


def test_the_output_bound_holds() -> None:
    rng = np.random.default_rng(0)
    for seed in range(40):
        row = draw(seed, 7)
        x = row["y"] - row["c"] * rng.choice([-1, 1], 7)
        v = row["v_hat"] + row["rho"][:, None] * rng.normal(size=(7, D_V)) / np.sqrt(D_V) / 3
        row["rho"] = np.linalg.norm(v - row["v_hat"], axis=-1)
        merged = attention.merge([attention.part(**pick(row, slice(0, 4))), attention.part(**pick(row, slice(4, 7)))])
        assert np.linalg.norm(tv.softmax(x) @ v - merged.out) <= merged.value_error()
        assert merged.value_error(0.1) > merged.value_error()


def test_tier_a_and_tier_b_are_their_sources() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=D), rng.normal(size=(6, D))
    k_hat = k + 0.05 * rng.normal(size=k.shape)
    w = witness.witness(k_hat - k, 2, "half")
    a = attention.certify_tier_a(q, k_hat, w, SM_SCALE, "half")
    y = k_hat @ q * SM_SCALE
    assert a.meter == bounds.meter(tv.softmax(y), witness.logit_bound(q, w, SM_SCALE, "half"))
    assert tv.total_variation(tv.softmax(k @ q * SM_SCALE), a.p_tilde) <= a.meter < 1
    assert a.guarantee == "any_query"
    steps = np.full((6, 1), 0.02)
    b = attention.certify_tier_b(q, k_hat, steps, SM_SCALE, 1e-4)
    assert b.meter == bounds.meter(tv.softmax(y), radius.radius(q, steps, SM_SCALE, 6, 1e-4))
    assert b.guarantee == "fixed_trajectory"


def test_tier_b_takes_off_what_its_sketch_stores() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=D), rng.normal(size=(6, D))
    steps = np.full((6, 1), 0.5)
    k_hat = k + rng.uniform(-0.25, 0.25, k.shape)
    u = (q / np.linalg.norm(q))[None]
    exact = tv.softmax(k @ q * SM_SCALE)
    plain = attention.certify_tier_b(q, k_hat, steps, SM_SCALE, 0.01)
    sketched = attention.certify_tier_b(q, k_hat, steps, SM_SCALE, 0.01, u=u, codes=sketch.encode(k_hat - k, u, steps))
    assert tv.total_variation(exact, sketched.p_tilde) < 0.1 * tv.total_variation(exact, plain.p_tilde)
    assert tv.total_variation(exact, sketched.p_tilde) <= sketched.meter < 0.1 * plain.meter


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: attention.exact([1.0], [[1.0, 2.0]], [[1.0]], 1.0), "k"),
        (lambda: attention.exact([1.0], [[1.0]], [[1.0], [2.0]], 1.0), "v"),
        (lambda: attention.exact([np.nan], [[1.0]], [[1.0]], 1.0), "q"),
        (lambda: attention.exact([1.0], [[1.0]], [[1.0]], 1.0, sink=np.inf), "sink"),
        (lambda: attention.soft_cap([1.0], -1.0), "cap"),
        (lambda: attention.certify([1.0], [-1.0]), "c"),
        (lambda: attention.certify([1.0], [np.nan]), "c"),
        (lambda: attention.certify([1.0], [1.0, 2.0]), "c"),
        (lambda: attention.certify([1.0], [1.0], known=[0.0]), "c_known"),
        (lambda: attention.certify_tier_b([1.0], [[1.0]], [[1.0]], 1.0, 0.1, u=[[1.0]]), "codes"),
        (lambda: attention.part([1.0], [1.0], [[1.0]], c_known=[0.0]), "c_known"),
        (lambda: attention.part([1.0], [1.0], [1.0]), "v_hat"),
        (lambda: attention.merge([]), "parts"),
        (lambda: attention.merge([attention.part([1.0], [0.0], np.ones((1, n))) for n in (1, 2)]), "parts"),
        (
            lambda: attention.merge(
                [
                    attention.part([1.0], [0.0], [[1.0]]),
                    attention.part([1.0], [0.0], [[1.0]], known=[0.0], c_known=[0.0]),
                ]
            ),
            "parts",
        ),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got"):
        call()


def test_a_weight_that_underflows_still_counts() -> None:
    """p̃ = e^-2189 is 0 in float64, and e^3345 p̃ is not; with c = 1000 the token does not matter."""
    assert attention.certify([0.0, -2189.0], [0.04, 3345.0]).meter == 1.0
    small = attention.certify([0.0, -2189.0], [0.04, 1000.0])
    assert small.meter == pytest.approx(float(bounds.meter([1.0], [0.04])), rel=1e-9)
    v = np.ones((2, 1))
    assert attention.merge([attention.part([0.0, -2189.0], [0.04, 3345.0], v)]).meter == 1.0
    assert attention.certify([0.0, -800.0], [0.0, 805.0]).risk == pytest.approx(np.log1p(np.exp(5.0)), rel=1e-12)
