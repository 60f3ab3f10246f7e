"""The synthetic keys' stores, and the bounds that are put beside the paper's."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import synthetic
from experiments.beside import every_bound
from experiments.intervals import share_of, spread
from experiments.synthetic import BLOCK, DITHER_LEVELS, NEAREST_LEVELS, attend, block_store, gaussian, token_dither
from witcert_ref import bounds
from witcert_ref.store import bypass_channels, select_bypass

TOKENS, DIM = 2 * BLOCK, 32


@pytest.fixture
def k() -> np.ndarray:
    return gaussian(np.random.default_rng(1), TOKENS, DIM)


@pytest.fixture
def xi() -> np.ndarray:
    return token_dither(1, TOKENS, DIM)


def step(store: synthetic.Store) -> np.ndarray:
    return np.repeat(store.steps, BLOCK, axis=0)


def test_keys_have_float16_precision(k: np.ndarray) -> None:
    assert (k == k.astype(np.float16)).all()


@pytest.mark.parametrize("levels", [7.0, NEAREST_LEVELS])
def test_rounding_to_nearest_errs_by_half_a_step(k: np.ndarray, levels: float) -> None:
    store = block_store(k, levels=levels)
    assert (np.abs(store.k_hat - k) <= step(store) / 2).all()
    assert (np.abs(k).reshape(-1, BLOCK, DIM).max(1) <= levels * store.steps).all()


def test_dither_errs_by_half_a_step_and_stochastic_rounding_by_one(k: np.ndarray, xi: np.ndarray) -> None:
    dithered, stochastic = (block_store(k, levels=DITHER_LEVELS, xi=xi, subtract=s) for s in (True, False))
    assert (np.abs(dithered.k_hat - k) <= step(dithered) / 2).all()
    error = np.abs(stochastic.k_hat - k)
    assert (error < step(stochastic)).all() and (error > step(stochastic) / 2).any()
    ratio = np.square(stochastic.k_hat - k).mean() / np.square(dithered.k_hat - k).mean()
    assert ratio == pytest.approx(2, rel=0.05)  # s²/6 over s²/12


def test_a_bypass_is_exact_and_has_no_step(k: np.ndarray, xi: np.ndarray) -> None:
    store = block_store(k, bypass=3, levels=DITHER_LEVELS, xi=xi)
    exact = np.repeat(store.steps == 0, BLOCK, axis=0)
    assert (exact.sum(-1) == 6).all() and (store.k_hat == k)[exact].all()
    top = np.abs(k).reshape(-1, BLOCK, DIM).max(1)
    assert (exact[::BLOCK] == bypass_channels(select_bypass(top, 3, "half"), DIM, "half")).all()


def test_a_token_s_dither_does_not_depend_on_how_many_are_drawn() -> None:
    assert (token_dither(3, 5000, 2)[:100] == token_dither(3, 100, 2)).all()


def test_the_proxy_scales_the_radius(k: np.ndarray) -> None:
    store, q = block_store(k, levels=DITHER_LEVELS), np.ones((1, DIM))
    np.testing.assert_allclose(store.radius(q, 1e-3, 3.0), np.sqrt(3) * store.radius(q, 1e-3), rtol=1e-12)


def test_cells_measure_what_moved(k: np.ndarray, xi: np.ndarray) -> None:
    store, q = block_store(k, levels=DITHER_LEVELS, xi=xi), np.random.default_rng(2).standard_normal((4, DIM))
    cells = attend(q, k, store, store.half_step(q))
    assert not cells.outside().any() and (cells.tv > 0).all()
    assert (attend(q, k, synthetic.Store(k, store.steps), store.half_step(q)).output_error == 0).all()
    tight = synthetic.Cells(cells.p_tilde, 0 * cells.c, cells.eps, cells.tv, cells.output_error)
    assert tight.outside().all()


def test_an_unsound_bound_is_counted() -> None:
    p, c = np.full((1, 2), 0.5), np.full((1, 2), 0.1)
    tv = np.array([0.049834])
    values = {name: bound(p, c) for name, bound in synthetic.BOUNDS.items()}
    assert synthetic.unsound(values, tv) == (0, 2 * (len(values) - 1))
    assert synthetic.unsound({"dispersion": bounds.dispersion_unsound(p, c)}, tv) == (1, 1)


def test_every_bound_has_its_interval_and_none_is_below_what_is_attained() -> None:
    rng = np.random.default_rng(0)
    p, c = rng.dirichlet(np.ones(20), 60), rng.exponential(0.2, (60, 20))
    values = {name: bound(p, c) for name, bound in synthetic.BOUNDS.items()}
    prompts = {name: value.reshape(6, 10) for name, value in values.items()}
    within, over = every_bound(("store", "bits"), {("a", 8): values, ("b", 4): prompts})
    assert within.header == ("store", "bits", *synthetic.BOUNDS) and over.header == within.header[:-1]
    for i, name in enumerate(within.header[2:], 2):
        passed = values[name] <= synthetic.TAU
        for row, (share, interval) in zip(
            within.rows, (share_of(passed), spread(passed.reshape(6, 10).astype(float))), strict=True
        ):
            assert row[i] == f"{share:.4g} ({interval})" and share is not None
    for row in over.rows:
        ratios = [float(str(cell).split()[0]) for cell in row[2:]]
        assert min(ratios) == ratios[-1] >= 1, "the meter"
    assert every_bound((), {(): {name: np.zeros(3) for name in values}})[1].rows == [("1 (1 – 1)",) * (len(values) - 1)]
    assert spread(np.array([0.5]), np.median) == (0.5, "—") and spread([np.ones(2), np.ones(0)]) == (None, "—")
