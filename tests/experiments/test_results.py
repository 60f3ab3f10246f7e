"""Committed results: complete, reproducible, and what the page says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import adaptive, counterexample, documentation, intervals, loop, memory, synthetic, table5, table14
from experiments.__main__ import EXPERIMENTS, SYNTHETIC, app
from experiments.result import RESULTS, Row, load, number, versions
from experiments.synthetic import implied

REFUTED = {
    "dispersion form >= true total variation",
    "variance-averaged form >= true total variation",
    loop.DROP,
    adaptive.RADIUS_FAILS,
}


def ours(rows: list[Row]) -> dict[str, float]:
    return {row.quantity: row.ours for row in rows}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    for module in SYNTHETIC:
        run = CliRunner().invoke(app, [module.NAME, "--quick", "--out", str(folder)])
        assert run.exit_code == 0, run.output
        assert "0 violations in" in run.output
    return folder


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_full_run_is_committed(name: str) -> None:
    result, used = load(RESULTS / f"{name}.json")
    assert not result.quick and result.name == name and set(used) == set(versions())
    assert (RESULTS / f"{name}.svg").exists()
    assert {entry.claim for entry in result.violations if entry.count} == (
        REFUTED & {v.claim for v in result.violations}
    )
    assert all(entry.checks > 0 for entry in result.violations)


def test_the_page_is_generated_from_the_results() -> None:
    assert documentation.PAGE.read_text(encoding="utf-8") == documentation.render(list(EXPERIMENTS))


@pytest.mark.parametrize("name", [module.NAME for module in SYNTHETIC])
def test_a_quick_run_has_the_same_quantities(name: str, quick: Path) -> None:
    small, full = load(quick / f"{name}.json")[0], load(RESULTS / f"{name}.json")[0]
    assert small.quick and (quick / f"{name}.svg").exists()
    assert [(row.quantity, row.paper) for row in small.rows] == [(row.quantity, row.paper) for row in full.rows]
    assert [table.header for table in small.tables] == [table.header for table in full.tables]
    assert not {entry.claim for entry in small.violations if entry.count} - REFUTED


@pytest.mark.parametrize("module", [counterexample, memory])
def test_what_is_exact_is_reproduced(module: ModuleType) -> None:
    fresh = module.run()
    committed = load(RESULTS / f"{fresh.name}.json")[0]
    assert ours(committed.rows) == pytest.approx(ours(fresh.rows), rel=1e-12)


def test_the_same_seed_gives_the_same_numbers(quick: Path) -> None:
    assert ours(load(quick / "table5.json")[0].rows) == ours(table5.run(quick=True).rows)


def test_the_exact_numbers_are_the_papers() -> None:
    rows = ours(load(RESULTS / "counterexample.json")[0].rows)
    assert round(rows["true total variation"], 6) == 0.049834 and round(rows["dispersion form"], 6) == 0.006423
    assert {row.ours for row in load(RESULTS / "memory.json")[0].rows[:3]} == {4753408}


def test_only_leaving_the_amax_lowers_the_meter(quick: Path) -> None:
    rows = ours(load(quick / "table5.json")[0].rows)
    plain, bypassed, excluded = (rows[f"{name}: median e-form"] for name in table5.TREATMENTS)
    assert plain > bypassed > 0.9 * plain > 10 * excluded


def test_stochastic_rounding_costs_a_wider_radius(quick: Path) -> None:
    sweep = np.array([row[3:6:2] for row in load(quick / "table14.json")[0].tables[1].rows], float)
    assert (sweep[:, 1] <= sweep[:, 0]).all() and (sweep[:, 1] < sweep[:, 0]).any()


def test_scale_3_is_the_one_with_the_papers_errors() -> None:
    sweep = [row for row in load(RESULTS / "table14.json")[0].tables[1].rows if row[1] == "model"]
    for pairs, (_, *errors, _, _, _, _) in table14.PAPER.items():
        ours = np.array([(row[0], row[10], row[12]) for row in sweep if row[2] == pairs], float)
        assert (ours[np.abs(ours[:, 1:] / errors - 1).argmin(0), 0] == table14.INFERRED[0]).all()


def test_implied_inverts_the_eform() -> None:
    assert implied(0.5 * np.expm1(2 * 0.16)) == pytest.approx(0.16, rel=1e-12)


def test_intervals() -> None:
    share, (low, high) = intervals.coverage([True] * 19 + [False] * 5)
    assert (round(share, 3), round(low, 3), round(high, 3)) == (0.792, 0.578, 0.929)
    median, (low, high) = intervals.bootstrap(np.random.default_rng(0).standard_normal(1000))
    assert low < median < high < low + 0.3


def test_an_unknown_name_is_refused() -> None:
    run = CliRunner().invoke(app, ["table99"])
    assert run.exit_code == 2 and "table99" in run.output


@pytest.mark.parametrize(("value", "text"), [(None, "—"), (0.049834, "0.04983"), (4753408, "4,753,408"), ("a", "a")])
def test_numbers_as_text(value: float | str | None, text: str) -> None:
    assert number(value) == text


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, int]]:
    """Violations that `memory` counts over two blocks."""
    monkeypatch.setattr(memory, "TOKENS", 2 * synthetic.BLOCK)
    return lambda: {entry.claim: entry.count for entry in memory.run().violations}


def test_a_wrong_formula_of_bytes_is_counted(
    short: Callable[[], dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(short().values()) == {0}
    honest = memory.block_bytes
    monkeypatch.setattr(memory, "block_bytes", lambda *args: honest(*args) + 1)
    assert list(short().values()) == [1, 0]


@pytest.mark.parametrize("name", ["copied_bytes", "pack"])
def test_bytes_beyond_the_formula_are_counted(
    short: Callable[[], dict[str, int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    honest = getattr(memory, name)
    extra = {"copied_bytes": lambda *args: honest(*args) + 1, "pack": lambda *args: honest(*args) | {"x": np.zeros(1)}}
    monkeypatch.setattr(memory, name, extra[name])
    assert list(short().values()) == [1, 0]


def test_keys_beyond_half_a_step_are_counted(
    short: Callable[[], dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = memory.pack

    def planted(k: np.ndarray, xi: np.ndarray) -> dict[str, np.ndarray]:
        store = honest(k, xi)
        store["codes"][0, 3] += np.where(store["codes"][0, 3] < 127, 2, -2).astype(np.int8)  # a token, by two steps
        store["values"][1, 5, 0] += 1  # one exact value, which has no step to be off by
        return store

    monkeypatch.setattr(memory, "pack", planted)
    exact = 2 * memory.PAIRS
    assert list(short().values()) == [0, memory.HEAD_DIM - exact + 1]
