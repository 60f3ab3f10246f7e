"""The equaliser."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from witcert_ref import equalizer, rope, tv
from witcert_ref.rope import RopeLayout

from .strategies import examples


def test_mid_range_and_half_range_of_each_pair() -> None:
    keys = np.array([[0.0, -1.0, 5.0, 2.0], [4.0, 3.0, 5.0, 8.0]])
    mu, f = equalizer.fit(keys, "half")
    assert mu.tolist() == [2, 1, 5, 5]
    assert f.tolist() == [2, 3, 2, 3]
    assert equalizer.fit(keys, "interleaved")[1].tolist() == [2, 2, 3, 3]
    assert equalizer.fit(keys, "half", rotary_dim=2)[1].tolist() == [2, 2, 3 / 4096, 3]


@examples(60)
@given(st.sampled_from(["half", "interleaved"]), st.integers(0, 999))
def test_calibration_keys_lie_within_one(layout: RopeLayout, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(30, 2, 8)) * rng.exponential(size=8) + rng.normal(size=8)
    mu, f = equalizer.fit(keys, layout)
    assert mu.shape == f.shape == (2, 8)
    pairs = rope.pairs(8, layout)
    assert (f[..., pairs[:, 0]] == f[..., pairs[:, 1]]).all() and (f > 0).all()
    x = equalizer.apply(keys, mu, f)
    assert np.abs(x).max() <= 1 + 1e-9
    np.testing.assert_allclose(equalizer.invert(x, mu, f), keys, atol=1e-12)


def test_a_constant_channel_gets_a_small_positive_scale() -> None:
    keys = np.tile([1.0, -3.0, 7.0, 0.0], (5, 1))
    keys[:, 0] += np.arange(5)
    mu, f = equalizer.fit(keys, "interleaved")
    assert f.tolist() == [2, 2, 2 / 4096, 2 / 4096]
    assert np.isfinite(equalizer.apply(keys + 1, mu, f)).all()
    assert equalizer.fit(np.ones((3, 4)))[1].tolist() == [1, 1, 1, 1]


def test_bypass_channels_are_left_as_they_are() -> None:
    keys = np.random.default_rng(0).normal(size=(9, 3, 4)) * [1, 100, 1, 100]
    exclude = np.array([False, True, False, True])
    mu, f = equalizer.fit(keys, "half", exclude)
    assert (mu[:, exclude] == 0).all() and (f[:, exclude] == 1).all()
    np.testing.assert_array_equal(equalizer.apply(keys, mu, f)[..., exclude], keys[..., exclude])


def test_the_query_takes_the_scale_and_the_shift_does_not_move_attention() -> None:
    rng = np.random.default_rng(0)
    keys, q = rng.normal(size=(20, 8)) + 3, rng.normal(size=8)
    mu, f = equalizer.fit(keys)
    centred = equalizer.apply(keys, mu, f) @ equalizer.fold(q, f)
    np.testing.assert_allclose(centred + q @ mu, keys @ q, rtol=1e-12)
    np.testing.assert_allclose(tv.softmax(centred), tv.softmax(keys @ q), rtol=1e-10)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: equalizer.fit(np.zeros((0, 4))), "keys"),
        (lambda: equalizer.fit([[np.inf, 0]]), "keys"),
        (lambda: equalizer.apply([1.0], [0.0], [0.0]), "f"),
        (lambda: equalizer.invert([1.0], [np.nan], [1.0]), "mu"),
        (lambda: equalizer.fold([1.0], [1.0, 1.0]), "q"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got"):
        call()
