"""RoPE, its pairs and its bands."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from witcert_ref import rope
from witcert_ref.rope import RopeLayout

from .strategies import FLOAT, examples

LAYOUTS: st.SearchStrategy[RopeLayout] = st.sampled_from(["half", "interleaved"])


def head(seed: int, *shape: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=shape)


@examples(60)
@given(LAYOUTS, st.integers(0, 6), st.integers(0, 2), st.sampled_from([1, 2, 4]), st.integers(0, 99))
def test_band_norms_do_not_see_the_position(layout: RopeLayout, turned: int, rest: int, count: int, seed: int) -> None:
    d, rotary = 8 * (turned + rest + 1), 8 * turned
    rng = np.random.default_rng(seed)
    x, theta, position = rng.normal(size=(3, d)), rng.random(rotary // 2), rng.integers(0, 10**5, 3)
    before = rope.band_norms(x, count, layout, rotary)
    after = rope.band_norms(rope.rotate(x, position, theta, layout), count, layout, rotary)
    np.testing.assert_allclose(after, before, rtol=FLOAT)


@examples(40)
@given(LAYOUTS, st.integers(-500, 500), st.integers(-500, 500), st.integers(0, 99))
def test_logits_depend_on_the_relative_position(layout: RopeLayout, m: int, n: int, seed: int) -> None:
    q, k, theta = head(seed, 10), head(seed + 1, 10), np.abs(head(seed + 2, 4))
    both = rope.rotate(q, m, theta, layout) @ rope.rotate(k, n, theta, layout)
    assert both == pytest.approx(rope.rotate(q, m - n, theta, layout) @ k, abs=1e-10)
    residual = rope.rotate(q, m, theta, layout) - rope.rotate(k, m, theta, layout)
    np.testing.assert_allclose(residual, rope.rotate(q - k, m, theta, layout), atol=1e-12)


def test_pairs_of_the_two_layouts() -> None:
    assert rope.pairs(6, "half").tolist() == [[0, 3], [1, 4], [2, 5]]
    assert rope.pairs(6, "interleaved").tolist() == [[0, 1], [2, 3], [4, 5]]
    assert rope.pairs(6, "half", 4).tolist() == [[0, 2], [1, 3]]
    x, theta = np.arange(6.0), [np.pi / 2, 0, 0]
    np.testing.assert_allclose(rope.rotate(x, 1, theta, "half"), [-3, 1, 2, 0, 4, 5], atol=1e-15)
    np.testing.assert_allclose(rope.rotate(x, 1, theta, "interleaved"), [-1, 0, 2, 3, 4, 5], atol=1e-15)
    np.testing.assert_allclose(rope.rotate(x, 1, theta[:1], "interleaved"), [-1, 0, 2, 3, 4, 5], atol=1e-15)


def test_bands_partition_the_channels_and_keep_pairs_together() -> None:
    assert [b.tolist() for b in rope.bands(np.zeros(8), 2, "half")] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [b.tolist() for b in rope.bands(np.zeros(8), 2, "interleaved")] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [b.tolist() for b in rope.bands(np.zeros((5, 8)), 2, "half", 4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    layouts: tuple[RopeLayout, ...] = ("half", "interleaved")
    for layout in layouts:
        for rotary in (64, 128, 192):
            groups = rope.bands(np.zeros(192), 16, layout, rotary)
            assert sorted(np.concatenate(groups)) == list(range(192))
            owner = {channel: b for b, group in enumerate(groups) for channel in group}
            assert all(owner[a] == owner[b] for a, b in rope.pairs(192, layout, rotary))


def test_positions_broadcast_and_what_is_not_finite_is_infinite() -> None:
    x, theta = head(0, 4, 6), head(1, 3)
    every = rope.rotate(x, np.arange(5)[:, None], theta, "half")
    assert every.shape == (5, 4, 6)
    np.testing.assert_array_equal(every[3, 2], rope.rotate(x[2], 3, theta, "half"))
    x[0, 0] = np.nan
    assert np.isinf(rope.band_norms(x, 3, "half")).tolist() == [[True, False, False]] + [[False] * 3] * 3


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: rope.pairs(6, "neox"), "layout"),  # type: ignore[arg-type]
        (lambda: rope.pairs(6, "half", 5), "rotary_dim"),
        (lambda: rope.pairs(6, "half", 8), "rotary_dim"),
        (lambda: rope.bands(np.zeros(7), 1, "half"), "x"),
        (lambda: rope.bands(np.zeros(8), 3, "half"), "n_bands"),
        (lambda: rope.bands(np.zeros(8), 0, "half"), "n_bands"),
        (lambda: rope.rotate(np.zeros(4), 0, np.zeros(3), "half"), "theta"),
    ],
)
def test_bad_shapes_are_refused(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got"):
        call()
