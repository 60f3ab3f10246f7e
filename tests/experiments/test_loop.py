"""Paging in blocks until the e-form is within τ."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import loop, synthetic
from experiments.result import RESULTS, load


def test_the_share_of_a_block_is_not_what_a_falls_by() -> None:
    tokens, d = 4 * synthetic.BLOCK, 32
    k = synthetic.gaussian(np.random.default_rng(3), tokens, d)
    xi = synthetic.token_dither(3, tokens, d)
    store = synthetic.block_store(k, levels=synthetic.DITHER_LEVELS, xi=xi)
    q = 6 * np.random.default_rng(4).standard_normal(d)
    c = store.radius(q[None], 1e-9)[0]
    repair = loop.page_in(q, k, store, c)
    assert repair.needed >= 1 and repair.eform <= synthetic.TAU and repair.tv <= repair.eform
    assert not np.allclose(repair.recomputed, repair.predicted, rtol=1e-6)
    np.testing.assert_allclose(repair.recomputed, repair.predicted, rtol=0.2)


def test_a_radius_that_is_too_small_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = synthetic.Store.radius
    monkeypatch.setattr(loop, "SCALES", (9.0,))
    monkeypatch.setattr(loop, "SCALE", 9.0)
    monkeypatch.setattr(synthetic.Store, "radius", lambda *args: honest(*args) / 3)
    counts = {entry.claim: entry.count for entry in loop.run(quick=True).violations}
    assert counts["all logit errors within the radius"] > 0


def test_one_block_is_enough_for_half_of_the_queries() -> None:
    result, _ = load(RESULTS / "loop.json")
    rows = {row.quantity: row for row in result.rows}
    assert rows["blocks paged in, median"].ours == rows["blocks paged in, median"].paper == 1
    assert rows["the same, whole head paged in"].ours == 0
