"""The experiments that decode with the model in the loop, run on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from experiments import (
    activations,
    adaptive,
    decoding,
    gate_traffic,
    long_text,
    model,
    needles,
    rescue,
    synthetic,
)
from experiments.__main__ import DECODING, app
from experiments.activations import Text
from experiments.pollution import Polluted
from experiments.result import RESULTS, Result, load
from tests.experiments import tiny
from witcert import WitCertCache
from witcert.demo import CELL, Run
from witcert.report import StepRecord

MODULES = {module.NAME: module for module in DECODING}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model, chosen, with a cache of its own."""
    folder = tiny.save(tmp_path_factory.mktemp("model") / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "CACHE", tmp_path_factory.mktemp("activations"))
        model.choose(folder)
        yield folder
        model.choose(None)


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return [Text("prose", "story", 70), Text("code", "queue", 70)]


@pytest.mark.parametrize("name", MODULES)
def test_an_experiment_runs_on_any_model(name: str, chosen: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(app, [name, "--quick", "--out", str(tmp_path), "--model", str(chosen)])
    assert run.exit_code == 0, run.output
    assert (tmp_path / f"{name}.svg").exists()
    small, full = load(tmp_path / f"{name}.json")[0], load(RESULTS / f"{name}.json")[0]
    assert small.quick and small.settings["model"] == chosen.name and full.settings["model"] == model.SMOLLM2
    assert [(row.quantity, row.paper) for row in small.rows] == [(row.quantity, row.paper) for row in full.rows]
    assert [table.header for table in small.tables] == [table.header for table in full.tables]
    assert not {entry.claim for entry in small.violations if entry.count} - {adaptive.RADIUS_FAILS}
    assert all(entry.checks for entry in small.violations)


def committed(module: ModuleType) -> Result:
    return load(RESULTS / f"{module.NAME}.json")[0]


def count(result: Result, claim: str) -> int:
    return next(entry.count for entry in result.violations if entry.claim == claim)


def ours(result: Result, quantity: str) -> float:
    return float(next(row.ours for row in result.rows if row.quantity == quantity) or 0)


def test_a_query_that_sees_the_dither_breaks_the_radius_and_nothing_else() -> None:
    result = committed(adaptive)
    assert count(result, adaptive.RADIUS_FAILS) > 0 and ours(result, "free query: largest strain") > 1
    for claim in (adaptive.RADIUS_HOLDS, adaptive.HALF_STEP, adaptive.WITNESS, adaptive.METER, adaptive.SHIPPED):
        assert count(result, claim) == 0
    for claim in (adaptive.HALF_STEP_IN_MODEL, adaptive.WITNESS_IN_MODEL):
        assert count(result, claim) == 0


def test_a_trajectory_repeats_and_its_witness_is_the_stored_residuals(chosen: Path, texts: list[Text]) -> None:
    ids = activations.ids(texts[0], model.load()[1])
    (first, taken), (again, same) = (adaptive.trajectory(ids, 3, True, 5) for _ in range(2))
    assert taken == same
    for name in ("strain", "half-step", "witness"):
        np.testing.assert_array_equal(first.all(name), again.all(name))
        assert 0.1 < first.all(name).max() <= 1
    other, _ = adaptive.trajectory(ids, 3, True, 6)
    assert (first.all("strain") != other.all("strain")).any()


def test_the_heaviest_pairs_are_exact_and_out_of_the_scale() -> None:
    k = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(0)) / 8
    heavy = [3, 5, 6, 7, 8, 11, 12, 15]
    channels = heavy + [pair + 16 for pair in heavy]
    k[..., channels] += 1e4
    out = rescue.heaviest_exact(k)
    assert torch.equal(out[..., channels], k[..., channels])
    rest = [c for c in range(32) if c not in channels]
    assert 0 < (out - k)[..., rest].abs().max() < 0.05


def test_each_repair_of_fp8_keys_covers_more() -> None:
    result = committed(rescue)
    raw, scaled, bypass = (ours(result, f"{name}: coverage by the meter") for name in rescue.REPAIR[:3])
    assert raw < scaled < bypass


def test_a_gate_pages_in_no_more_at_a_larger_threshold() -> None:
    rows = committed(gate_traffic).tables[0].rows
    for scheme in gate_traffic.SCHEMES:
        pages = [row[2] for row in rows if row[0] == scheme and float(row[1] or 0) < 1]
        assert pages == sorted(pages, key=lambda count: -float(count or 0))


def test_a_certified_gate_covers_every_cell() -> None:
    gated = [row for row in committed(rescue).tables[0].rows if row[1] == f"τ = {synthetic.TAU}"]
    assert gated and all(row[4] in (None, 1.0) for row in gated)


def test_a_bound_below_the_truth_is_counted(chosen: Path, texts: list[Text]) -> None:
    network, _ = model.load()
    read = decoding.reference(texts, 2)

    def planted(record: StepRecord) -> dict[str, torch.Tensor]:
        return {"true": record.certificate.meter.double() + (record.layer == 1) * 1e-9}

    cache = WitCertCache(network.config, "int8", backing=True)
    watch = decoding.forced(read, cache, planted).watch
    _, cells = watch.violations()
    assert watch.violations() == (cells // 2, 2 * 2 * 2 * 4), "texts, steps, layers, heads"


def test_a_forced_text_is_the_models_own(chosen: Path, texts: list[Text]) -> None:
    network, tokenizer = model.load()
    read = decoding.reference(texts, 3)
    with torch.inference_mode():
        logits = network(activations.ids(texts[1], tokenizer)[None]).logits[0]
    torch.testing.assert_close(read.log_p[1].float(), logits[-4:-1].log_softmax(-1), rtol=1e-4, atol=1e-4)
    exact = decoding.forced(read, WitCertCache(network.config, "int8", 1e-30, backing=True))
    assert exact.kl.max() < 1e-6 and exact.top1.min() == exact.top5.min() == 1 and np.abs(exact.lost).max() < 1e-3
    coarse = decoding.forced(read, WitCertCache(network.config, "rtn2", backing=True))
    assert coarse.kl.mean() > 0.01 and coarse.kl.min() >= 0
    nll = -read.log_p[0, :, :].gather(-1, read.ids[0, -3:, None])[:, 0]
    worse = -coarse.log_p[0, :, :].gather(-1, read.ids[0, -3:, None])[:, 0]
    np.testing.assert_allclose(coarse.lost[0], (worse - nll).numpy())


def test_only_polluted_layers_are(chosen: Path, texts: list[Text]) -> None:
    network, _ = model.load()
    read = decoding.reference(texts, 2)
    watch = decoding.forced(read, Polluted(network.config, "rtn2", [1], None)).watch
    for true, layer in zip(watch.of("true"), watch.of("layer"), strict=True):
        assert true[layer == 0].max() < 1e-2 < true[layer == 1].min()


def test_answers_count_violations_and_cells_above_the_gate() -> None:
    cells = np.array([(0, 0, 0, 0.1, 0.1, 0.2), (0, 0, 0, 0.3, 0.4, 0.1)], CELL)
    answers = needles.Answers()
    for tau in (None, 0.2, 5.0):
        run = Run("p", 9, "int8", tau is not None, "", False, 1, 1.0, "any_query", cells, pages_repaired=3, pages=6)
        answers.add("int8", needles.Answer(run, tau, 1024))
    assert answers.violations() == (3, 6) and answers.over() == (1, 2)
    assert answers("int8", 0.2)[0].paged_in == 3 * 1024 and answers.right("int8") == [False]


def test_text_that_repeats_itself_has_few_new_grams() -> None:
    assert long_text.distinct(torch.arange(40)) == 1.0
    assert long_text.distinct(torch.arange(4).repeat(100)) < 0.02
    values = np.array([[[0.1, 0.3, 0.2, 0.1]]])
    assert long_text.by_kv_head(values, 2).tolist() == [[[0.3, 0.2]]]


def test_an_aimed_query_strains_most(chosen: Path) -> None:
    from dataclasses import replace

    from experiments.stores import Attention, Layout, write

    captured = activations.captured(Text("prose", "story", 128), None)
    attention = Attention.of(captured, 0)
    store = write(attention, 0, Layout(dither=64, witness=1), seed=3)
    basis = torch.eye(attention.q.shape[-1], dtype=torch.float64).expand(len(attention.k), -1, -1)
    q = adaptive.aimed(store, basis)
    best = adaptive.strain(store.error(q), store.radius(q, 1e-6))
    drawn = torch.randn(
        len(attention.k), 200, q.shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    assert (best > adaptive.strain(store.error(drawn), store.radius(drawn, 1e-6)).amax(-1, keepdim=True)).all()
    tight = replace(store, residual=10 * store.residual)
    assert (adaptive.strain(tight.error(q), tight.radius(q, 1e-6)) > 1).all()
