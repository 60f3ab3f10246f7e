"""Philox, the dither, scales and codes."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from witcert_ref import dither, philox

from .strategies import examples, rationals

ONES = 0xFFFFFFFF
xis = st.integers(0, 2**15 - 1).map(lambda i: (2 * i + 1) / 2**16 - 0.5)
values = st.floats(-1e3, 1e3, width=32) | st.floats(-(2**-20), 2**-20, width=32) | st.sampled_from([0.0, 6e4, 1.0])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([ONES] * 4, [ONES] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], words: str) -> None:
    assert " ".join(f"{word:08x}" for word in philox.philox4x32(counter, key)) == words


def test_philox_is_elementwise_and_without_rounds_the_identity() -> None:
    counters = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)
    every = philox.philox4x32(counters, [1, 2])
    assert every.dtype == np.uint32
    np.testing.assert_array_equal(every[1, 2], philox.philox4x32(counters[1, 2], [1, 2]))
    np.testing.assert_array_equal(philox.philox4x32(counters, [1, 2], rounds=0), counters)


def test_the_dither_is_a_function_of_its_counter() -> None:
    seed = 0x0123456789ABCDEF
    word = philox.philox4x32([5, 7, 2, 11], [0x89ABCDEF, 0x01234567])[0]
    whole = dither.dither(seed, 11, 2, 7, 64)
    assert whole[5] == (2 * (int(word) >> 17) + 1) / 2**16 - 0.5
    np.testing.assert_array_equal(dither.dither(seed, 11, 2, 7, np.array([9, 3])), whole[[9, 3]])
    pages = dither.dither(seed, 11, 2, np.arange(10)[:, None], 64)
    np.testing.assert_array_equal(pages[7], whole)
    others = [(seed + 1, 11, 2, 7), (seed, 12, 2, 7), (seed, 11, 3, 7), (seed, 11, 2, 8), (seed ^ 1 << 40, 11, 2, 7)]
    assert all((dither.dither(*other, 64) != whole).mean() > 0.9 for other in others)


def test_the_dither_lies_on_its_grid_and_looks_uniform() -> None:
    xi = dither.dither(3, 0, 0, np.arange(500)[:, None], 128)
    index = (xi + 0.5) * 2**15 - 0.5
    assert (index == np.rint(index)).all() and index.min() >= 0 and index.max() < dither.GRID
    assert abs(xi.mean()) < 5 / np.sqrt(12 * xi.size)
    assert xi.var() == pytest.approx(1 / 12, rel=0.02)


def test_code_minus_dither_is_exact_in_float32() -> None:
    xi, code = dither.dither(3, 0, 0, 1, 256), np.arange(-127, 128)
    exact = code[:, None] - xi
    assert (exact.astype(np.float32) == exact).all()


@examples(200)
@given(st.lists(values, min_size=4, max_size=4), st.sampled_from([1, 2, 4]), st.sampled_from([127.0, 126.5]))
def test_the_scale_is_the_least_that_covers(k: list[float], group: int, levels: float) -> None:
    scale = dither.scale_of(k, group, levels=levels)
    assert scale.dtype == np.float16 and scale.shape == (4 // group,)
    for s, part in zip(scale, np.abs(k).reshape(-1, group), strict=True):
        amax = Fraction(float(part.max()))
        assert s > 0 and Fraction(float(s)) * Fraction(levels) >= amax
        below = np.nextafter(s, np.float16(0))
        assert below == 0 or Fraction(float(below)) * Fraction(levels) < amax


@examples(200)
@given(st.lists(st.tuples(values, xis), min_size=4, max_size=4), st.sampled_from([2, 4]), st.booleans())
def test_no_channel_moves_by_more_than_half_a_step(rows: list[tuple[float, float]], group: int, plain: bool) -> None:
    k, xi = np.array([row[0] for row in rows]), np.array([0.0 if plain else row[1] for row in rows])
    scale = dither.scale_of(k, group, levels=127.0 if plain else 126.5)
    codes = dither.quantize(k, scale, xi)
    steps = rationals(dither.steps(scale, 4))
    assert codes.dtype == np.int8 and np.abs(codes).max() <= 127
    stored = [s * (int(code) - x) for s, code, x in zip(steps, codes, rationals(xi), strict=True)]
    for x_hat, x, s in zip(stored, rationals(k), steps, strict=True):
        assert abs(x_hat - x) <= s / 2
    np.testing.assert_allclose(dither.dequantize(codes, scale, xi), [float(x) for x in stored], rtol=1e-15)


def test_a_scale_that_just_covers_is_not_raised() -> None:
    assert dither.scale_of([127.0, 254.0], 1).tolist() == [1, 2]
    assert dither.scale_of([126.5], 1, levels=126.5).tolist() == [1]


def test_ties_go_to_even_and_the_stored_scale_counts() -> None:
    assert dither.quantize([0.5, 1.5, 2.5, -0.5], [1.0]).tolist() == [0, 2, 2, 0]
    k = np.array([1.0001, 0.3])
    scale = dither.scale_of(k, 2)
    assert scale[0] != 1.0001 / 127
    np.testing.assert_array_equal(dither.quantize(k, scale), np.rint(k / np.float64(scale[0])))


def test_zero_tiny_huge_and_broken_groups() -> None:
    tiny = 2.0**-24
    k = np.array([[0.0, 0.0], [1e-12, 0.0], [9e6, 0.0], [np.nan, 0.0], [np.inf, 1.0], [-8e6, 1.0]])
    scale = dither.scale_of(k, 2)[:, 0]
    assert scale[:2].tolist() == [tiny, tiny]
    assert np.isinf(scale[2:5]).all() and np.isfinite(scale[5])
    codes = dither.quantize(k, scale[:, None], 0.25)
    assert codes[:2].tolist() == [[0, 0], [0, 0]]
    assert (codes[2:5] == 0).all() and (dither.dequantize(codes, scale[:, None], 0.25)[2:5] == 0).all()


def test_the_bypass_stays_out_of_amax_and_codes() -> None:
    k, exclude = np.array([[1.0, 1000.0, -2.0, 7.0]]), np.array([False, True, False, False])
    assert dither.scale_of(k, 2, exclude)[0, 0] == dither.scale_of([[1.0]], 1)[0, 0]
    codes = dither.quantize(k, dither.scale_of(k, 4, exclude), exclude=exclude)
    assert codes[0, 1] == 0 and codes[0, 3] == 127
    assert np.isfinite(dither.scale_of([[np.nan, 1.0]], 2, [True, False])).all()


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda: philox.philox4x32([0, 0, 0], [0, 0]), ValueError, "counter"),
        (lambda: philox.philox4x32([0, 0, 0, 2**32], [0, 0]), ValueError, "counter"),
        (lambda: philox.philox4x32([0, 0, 0, 0], [0.0, 0.0]), TypeError, "key"),
        (lambda: dither.dither(-1, 0, 0, 0, 4), ValueError, "seed"),
        (lambda: dither.dither(0, 0, 0, -1, 4), ValueError, "page"),
        (lambda: dither.dither(0, 0, 0, 0, 0), ValueError, "channels"),
        (lambda: dither.dither(0.5, 0, 0, 0, 4), TypeError, "seed"),  # type: ignore[arg-type]
        (lambda: dither.scale_of([1.0, 2.0, 3.0], 2), ValueError, "group"),
        (lambda: dither.scale_of([1.0], 1, levels=0.5), ValueError, "levels"),
        (lambda: dither.quantize([1.0], [0.0]), ValueError, "scale"),
        (lambda: dither.quantize([1.0, 2.0, 3.0], [1.0, 1.0]), ValueError, "scale"),
        (lambda: dither.quantize([1.0], [1.0], 0.5), ValueError, "xi"),
        (lambda: dither.quantize([np.nan], [1.0]), ValueError, "k"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=f"^{name}: got"):
        call()
