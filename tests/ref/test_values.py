"""The value side."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from witcert_ref import tv, values

from .strategies import examples


@examples(80)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.0, 2.0**-11]))
def test_the_output_moves_by_at_most_its_bound(seed: int, centred: bool, weight_error: float) -> None:
    rng = np.random.default_rng(seed)
    p, p_tilde = rng.dirichlet(np.ones(5), 2)
    v = rng.normal(size=(5, 3)) + rng.normal(size=3)
    v_hat = v + rng.normal(size=v.shape) * rng.exponential(0.1)
    weights = p_tilde * (1 + weight_error * rng.choice([-1, 1], 5))
    bound = values.output_bound(
        p_tilde, float(tv.total_variation(p, p_tilde)), v, v_hat, v.mean(0) if centred else None, weight_error
    )
    assert np.linalg.norm(p @ v - weights @ v_hat) <= bound * (1 + 1e-12)


def test_known_numbers_and_the_gain_of_a_centre() -> None:
    v, v_hat = np.array([[3.0, 4.0], [3.0, 3.0]]), np.array([[3.0, 5.0], [3.0, 3.0]])
    assert values.output_bound([0.25, 0.75], 0.1, v, v_hat) == pytest.approx(2 * 0.1 * 5 + 0.25)
    assert values.output_bound([0.25, 0.75], 0.1, v, v_hat, [3.0, 3.5]) == pytest.approx(2 * 0.1 * 0.5 + 0.25)
    assert values.output_bound([], 0.1, np.zeros((0, 2)), np.zeros((0, 2))) == 0


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: values.output_bound([1.0], -0.1, [[1.0]], [[1.0]]), "tv_bound"),
        (lambda: values.output_bound([1.0], 0.1, [[1.0]], [[1.0, 2.0]]), "v_hat"),
        (lambda: values.output_bound([1.0, 0.0], 0.1, [[1.0]], [[1.0]]), "p_tilde"),
        (lambda: values.output_bound([1.0], 0.1, [[1.0]], [[1.0]], [1.0, 2.0]), "center"),
        (lambda: values.output_bound([1.0], 0.1, [[1.0]], [[1.0]], None, -1.0), "weight_error"),
        (lambda: values.output_bound([1.0], 0.1, [[np.nan]], [[1.0]]), "v"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got"):
        call()
