"""Softmax, total variation, tilt."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from witcert_ref import golden, tv

from .strategies import FLOAT, cells, examples, logits


@examples(100)
@given(cells())
def test_exact_attention_is_compressed_attention_without_its_error(cell: tuple[list[float], list[float]]) -> None:
    x, eps = np.array(cell[0]), np.array(cell[1])
    exact = tv.tilt(tv.softmax(x + eps), eps)
    np.testing.assert_allclose(exact, tv.softmax(x), rtol=FLOAT)
    assert exact.sum() == pytest.approx(1, abs=1e-14)


@examples(50)
@given(st.lists(st.tuples(logits, logits, logits), min_size=1, max_size=8))
def test_total_variation_is_a_distance_and_a_largest_excess(rows: list[tuple[float, float, float]]) -> None:
    p, q, r = (tv.softmax(x) for x in np.array(rows).T)
    assert tv.total_variation(p, p) == 0
    assert tv.total_variation(p, q) == tv.total_variation(q, p)
    assert tv.total_variation(p, r) <= tv.total_variation(p, q) + tv.total_variation(q, r) + 1e-15
    assert tv.total_variation(p, q) == pytest.approx(np.maximum(p - q, 0).sum(), abs=1e-15)
    assert tv.total_variation(p, q) == pytest.approx(float(golden.total_variation(p, q)), abs=1e-15)


def test_dropping_tokens_moves_their_mass() -> None:
    p = np.array([0.5, 0.3, 0.2])
    kept = np.array([0.5, 0.0, 0.2]) / 0.7
    assert tv.total_variation(p, kept) == pytest.approx(0.3, abs=1e-15)


def test_masked_logits_weigh_nothing_and_constants_do_not_matter() -> None:
    x = np.array([[0.0, 1.0, -np.inf], [5.0, -np.inf, 5.0]])
    np.testing.assert_allclose(tv.softmax(x)[:, [2, 1]], [[0, 1 / (1 + np.exp(-1))], [0.5, 0]])
    np.testing.assert_allclose(tv.softmax([1e4, 1e4 + 1]), tv.softmax([0, 1]))
    assert tv.logsumexp(np.zeros((2, 0))).tolist() == [-np.inf, -np.inf]
    assert tv.logsumexp(np.array([-np.inf, 800.0])) == 800


@pytest.mark.parametrize("bad", [[], [np.nan], [np.inf, 0], [-np.inf, -np.inf], 3.0])
def test_softmax_refuses(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"^x: got"):
        tv.softmax(bad)


def test_tilt_and_total_variation_refuse_shapes_and_signs() -> None:
    with pytest.raises(ValueError, match=r"^q: got"):
        tv.total_variation([0.5, 0.5], [1.0])
    with pytest.raises(ValueError, match=r"^eps: got"):
        tv.tilt([0.5, 0.5], [np.inf, 0])
    with pytest.raises(ValueError, match=r"^p_tilde: got"):
        tv.tilt([-0.5, 1.5], [0, 0])
    with pytest.raises(TypeError, match=r"^p: got"):
        tv.total_variation(np.array(["a"]), [1.0])
