"""The three sources of c: half-step, witness, sketch. Soundness in exact rationals, or at 50 digits."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp

from witcert_ref import bounds, dither, golden, half_step, rope, sketch, tv, witness
from witcert_ref.rope import RopeLayout

from .strategies import FLOAT, dot, down, enumerated, examples, quarters, rationals

SM_SCALE = 0.125
# a sketch code is chosen in float64, which rounds the coordinate and the unit by far less than this share of its error
CODE_ROUNDING = 1 + Fraction(1, 2**40)

keys = st.lists(st.floats(-8, 8, width=32), min_size=8, max_size=8)
queries = st.lists(quarters(-8, 8), min_size=8, max_size=8)


@examples(150)
@given(keys, queries, st.sampled_from([2, 8]))
def test_half_step_bounds_the_error_of_any_query(k: list[float], q: list[float], group: int) -> None:
    scale = dither.scale_of([k], group)
    x_hat = dither.dequantize(dither.quantize([k], scale), scale)
    steps = dither.steps(scale, 8)
    error = SM_SCALE * dot(rationals(q), [a - b for a, b in zip(rationals(x_hat), rationals(k), strict=True)])
    exact = Fraction(SM_SCALE) * dot([abs(x) for x in rationals(q)], rationals(steps)) / 2
    assert abs(Fraction(error)) <= exact
    assert half_step.logit_bound(q, steps, SM_SCALE)[0] == pytest.approx(float(exact), rel=FLOAT)


def test_half_step_is_attained_and_a_token_scale_is_one_number() -> None:
    q, s = np.array([1.0, -2.0, 0.5]), 0.25
    residual = np.sign(q) * s / 2
    assert half_step.logit_bound(q, [[s]], 0.5)[0] == 0.5 * (q @ residual)
    np.testing.assert_array_equal(half_step.logit_bound(q, [[s], [np.inf]], 1.0), [q @ residual, np.inf])
    assert half_step.logit_bound(np.zeros(3), [[np.inf]], 1.0)[0] == np.inf  # 0 · Inf never decides


@examples(150)
@given(st.lists(st.floats(-1, 1), min_size=8, max_size=8), st.sampled_from([1, 2, 4]), st.booleans())
def test_a_stored_witness_is_never_below_the_norm(residual: list[float], count: int, in_bytes: bool) -> None:
    steps = np.full((1, 8), 2.0)
    stored = witness.witness([residual], count, "half", steps if in_bytes else None)
    for b, channels in enumerate(rope.bands(np.zeros(8), count, "half")):
        squared = sum((x * x for x in rationals(np.array(residual)[channels])), Fraction(0))
        unit_squared = Fraction(sum(steps[0, channels] ** 2)) / 508**2 if in_bytes else Fraction(1)
        value = Fraction(float(stored[0, b]))
        assert value**2 * unit_squared >= squared
        if value:  # and is the least that is
            below = Fraction(float(np.nextafter(stored[0, b], stored.dtype.type(0)))) if not in_bytes else value - 1
            assert below**2 * unit_squared < squared * CODE_ROUNDING


@examples(80)
@given(keys, keys, queries, st.sampled_from([1, 2, 4]), st.sampled_from(["half", "interleaved"]))
def test_the_witness_bounds_the_error_of_any_scheme(
    k: list[float], k_hat: list[float], q: list[float], count: int, layout: RopeLayout
) -> None:
    residual = np.array(k_hat) - np.array(k)
    w = witness.witness([residual], count, layout)
    with mp.workdps(60):
        error = abs(
            mp.fsum(
                golden.number(a) * (golden.number(x) - golden.number(y)) for a, x, y in zip(q, k_hat, k, strict=True)
            )
        )
        groups = rope.bands(np.zeros(8), count, layout)
        norms = [mp.sqrt(mp.fsum(golden.number(q[j]) ** 2 for j in group)) for group in groups]
        bound = mp.fsum(n * golden.number(float(x)) for n, x in zip(norms, w[0], strict=True))
    assert error <= bound
    assert witness.logit_bound(q, w, SM_SCALE, layout)[0] == pytest.approx(SM_SCALE * float(bound), rel=FLOAT)


def test_byte_witness_has_room_for_half_a_step_and_no_more() -> None:
    steps = np.array([[0.5], [np.inf]])
    edge = np.array([[0.25] * 8, [np.nan] * 8])
    codes = witness.witness(edge, 2, "half", steps)
    assert codes.dtype == np.uint8
    assert 254 <= codes[0, 0] <= 255 and codes[1].tolist() == [0, 0]
    unit = witness.byte_unit(steps, 8, 2, "half")
    np.testing.assert_allclose(unit[0], 0.5 * np.sqrt(4) / 508)
    norms = witness.decode(codes, unit)
    assert (norms[0] >= 0.5).all() and np.isinf(norms[1]).all()
    assert np.isinf(witness.logit_bound(np.zeros(8), norms, 1.0, "half")[1])
    with pytest.raises(ValueError, match=r"^residual: got a band norm"):
        witness.witness([[0.26] * 8], 2, "half", [[0.5]])


def test_float16_witness_overflows_to_infinity() -> None:
    residual = np.zeros((4, 4))
    residual[:, 0] = 1e6, np.nan, np.inf, 65504
    stored = witness.witness(residual, 2, "half")
    assert stored[:, 0].tolist() == [np.inf] * 4  # 65504 itself has no room to be rounded up
    assert stored[:, 1].tolist() == [0] * 4
    assert np.isinf(witness.logit_bound(np.ones(4), stored, 1.0, "half")).all()


vectors = st.lists(quarters(-1, 1), min_size=4, max_size=4)


@examples(150)
@given(
    st.lists(quarters(-2, 2), min_size=4, max_size=4),
    st.lists(vectors, min_size=1, max_size=3),
    st.lists(st.integers(-64, 64), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=4, max_size=4),
    st.data(),
)
def test_the_sketch_bounds_what_it_leaves(
    q: list[float], u: list[list[float]], fractions: list[int], steps: list[float], data: st.DataObject
) -> None:
    residual = np.array(fractions) / 128 * steps
    a = data.draw(st.none() | st.lists(quarters(-2, 2), min_size=len(u), max_size=len(u)))
    codes = sketch.encode([residual], u, [steps])
    w, coefficients = sketch.outside(q, u, a)
    read = dot(rationals(q), rationals(residual)) - Fraction(sketch.correction(coefficients, codes, u, [steps])[0])
    units = rationals(sketch.unit(u, [steps]))
    half = dot([abs(x) for x in rationals(w)], rationals(steps)) / 2
    rounding = dot([abs(x) for x in rationals(coefficients)], units) / 2
    assert abs(read) <= half + rounding * CODE_ROUNDING + Fraction(1, 2**48)
    assert sketch.logit_bound(q, u, [steps], 0.5, a)[0] == pytest.approx(float(half + rounding) / 2, rel=FLOAT)


def test_sketch_directions_are_principal_and_leave_the_bypass_alone() -> None:
    rng = np.random.default_rng(0)
    strong = np.zeros(8)
    strong[[1, 5]] = 3, -4
    z = rng.normal(size=(500, 1)) * strong + 0.1 * rng.normal(size=(500, 8))
    f = rng.uniform(0.5, 2, 8)
    exclude = np.arange(8) == 3
    u = sketch.fit(z / f, 3, f, exclude)
    np.testing.assert_allclose(u @ u.T, np.eye(3), atol=1e-12)
    assert abs(u[0] @ strong) / 5 > 0.999 and u[0, 5] > 0
    assert (u[:, 3] == 0).all()
    left = [np.linalg.norm(z - z @ sketch.fit(z, r).T @ sketch.fit(z, r)) for r in range(9)]
    assert (np.diff(left) < 0).all() and left[8] < 1e-10


def test_a_sketch_without_directions_is_the_half_step() -> None:
    q, steps, none = np.arange(4.0), [[0.5], [0.25]], np.zeros((0, 4))
    np.testing.assert_array_equal(sketch.logit_bound(q, none, steps, 0.5), half_step.logit_bound(q, steps, 0.5))
    assert sketch.encode(np.zeros((2, 4)), none, steps).shape == (2, 0)
    assert sketch.correction([], np.zeros((2, 0)), none, steps).tolist() == [0, 0]


def test_a_black_box_scheme_stores_its_own_unit() -> None:
    rng = np.random.default_rng(0)
    u = sketch.fit(rng.normal(size=(50, 8)), 4)
    residual = rng.normal(size=(20, 8)) * rng.choice([1e-6, 1, 100], (20, 1))
    unit = sketch.own_unit(residual, u)
    assert (unit == unit.astype(np.float16)).all()
    codes = sketch.encode(residual, u, unit_size=unit)
    a = rng.normal(size=4)
    left = residual @ (a @ u) - sketch.correction(a, codes, u, unit_size=unit)
    assert (np.abs(left) <= sketch.code_error(a, unit, 1.0) * (1 + 1e-9)).all()
    broken = np.full((2, 8), [[np.nan], [1e9]])
    unit = sketch.own_unit(broken, u)
    assert np.isinf(unit).all()
    assert (sketch.encode(broken, u, unit_size=unit) == 0).all()
    assert np.isinf(sketch.code_error(a, unit, 1.0)).all()


def test_codes_that_would_clamp_are_refused() -> None:
    u = np.eye(2)[:1]
    assert sketch.encode([[0.5, 0]], u, [[1.0]]).tolist() == [[127]]
    with pytest.raises(ValueError, match=r"^residual: got a coordinate"):
        sketch.encode([[0.51, 0]], u, [[1.0]])
    assert sketch.encode([[np.nan, 0]], u, [[np.inf]]).tolist() == [[0]]
    assert np.isinf(sketch.logit_bound([1.0, 1.0], u, [[np.inf]], 1.0)).all()


@examples(60)
@given(st.lists(st.tuples(quarters(-4, 4), quarters(-1, 1), st.sampled_from([0.0, 0.1, 1.0])), min_size=1, max_size=4))
def test_the_two_part_meter_covers_the_worst_case(rows: list[tuple[float, float, float]]) -> None:
    y, r, c = map(list, zip(*rows, strict=True))
    p_w, p_y = golden.softmax([a - b for a, b in zip(y, r, strict=True)]), golden.softmax(y)
    bound = golden.two_part_meter(y, r, c)
    assert bound >= enumerated(p_w, c, p_y)
    known = golden.two_part_meter(y, r, [0] * len(y))
    assert known >= down(golden.total_variation(p_w, p_y))
    assert sketch.two_part_meter(y, r, c) == pytest.approx(min(1, float(bound)), rel=FLOAT)


def test_the_two_part_meter_without_a_known_part_and_at_its_ends() -> None:
    y, c = np.array([0.3, -0.2, 1.0]), np.array([0.1, 0.2, 0.0])
    assert sketch.two_part_meter(y, np.full(3, 7.0), c) == pytest.approx(bounds.meter(tv.softmax(y), c), rel=1e-9)
    assert sketch.two_part_meter(y, [0, 0, 2000.0], c) == 1
    assert sketch.two_part_meter(y, [0, 0, -2000.0], c) == pytest.approx(1, abs=0.6)
    assert sketch.two_part_meter(y, np.zeros(3), [np.inf, 0, 0]) == 1
    many = np.stack([y, y + 1]), np.zeros((2, 3)), np.stack([c, c])
    assert sketch.two_part_meter(*many).shape == (2,)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: half_step.logit_bound([1.0], [[-1.0]], 1.0), "steps"),
        (lambda: half_step.logit_bound([1.0, 1.0], [[1.0, 1.0, 1.0]], 1.0), "steps"),
        (lambda: half_step.logit_bound([np.nan], [[1.0]], 1.0), "q"),
        (lambda: half_step.logit_bound([1.0], [[1.0]], -1.0), "sm_scale"),
        (lambda: witness.logit_bound([1.0, 1.0], [[-1.0]], 1.0, "half"), "w"),
        (lambda: witness.witness([1.0, 1.0], 1, "half"), "residual"),
        (lambda: sketch.fit(np.zeros((0, 4)), 1), "queries"),
        (lambda: sketch.fit(np.zeros((2, 4)), 5), "r"),
        (lambda: sketch.encode(np.zeros((2, 4)), np.zeros((1, 3)), [[1.0]]), "residual"),
        (lambda: sketch.encode(np.zeros((2, 4)), np.zeros((1, 4))), "steps"),
        (lambda: sketch.outside(np.zeros(4), np.zeros((1, 4)), np.zeros(2)), "a"),
        (lambda: sketch.correction([1.0], [[1, 2]], np.zeros((1, 4)), [[1.0]]), "codes"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got"):
        call()
