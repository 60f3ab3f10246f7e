"""The report: cells, running counts, bytes, JSON."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from witcert import Report, WitCertCache

from .models import HEADS, KV_HEADS, LAYERS, calibration, forward, generate, model, prompt

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")


def run(scheme: str = "rtn4", **options: object) -> WitCertCache:
    cache = WitCertCache(model("llama").config, scheme, **options)  # type: ignore[arg-type]
    generate("llama", prompt(12, 4), cache, max_new_tokens=6)
    return cache


def test_cells() -> None:
    """One for each sequence, layer, head and decode step, in the order in which they were read."""
    report = run().report()
    assert report.complete
    assert [(c.step, c.layer, c.sequence, c.head) for c in report.cells] == [
        (step, layer, b, head)
        for step in range(12, 17)
        for layer in range(LAYERS)
        for b in range(2)
        for head in range(4)
    ]
    for cell in report.cells:
        assert cell.position == cell.step - (8 if cell.sequence else 0)
        assert cell.compressed == cell.position + 1
        assert cell.decode
        assert cell.meter_before == cell.meter <= min(1.0, cell.eform) + 1e-5
    assert sum(report.histogram) == report.cells_seen == 5 * LAYERS * 2 * HEADS
    assert report.max_meter == max(cell.meter for cell in report.cells)


def test_bounded_history_keeps_the_newest_cells_and_counts_all() -> None:
    full, short, none = (run(history=n).report() for n in (100_000, 21, 0))
    assert short.cells == full.cells[-21:]
    assert none.cells == []
    for report in (short, none):
        assert not report.complete
        for name in ("cells_seen", "histogram", "max_meter", "non_finite", "repairs"):
            assert getattr(report, name) == getattr(full, name)
        for tau in (0.001, 0.01, 0.2, 0.5, 0.999):
            assert report.coverage(tau) == full.coverage(tau)
        assert full.median_meter <= report.median_meter <= full.median_meter + 1e-3
        assert report.coverage(0.0105) <= full.coverage(0.0105)
    assert full.median_meter == statistics.median_low(cell.meter for cell in full.cells)


def test_coverage_wants_a_threshold_that_certifies() -> None:
    report = run().report()
    for tau in (0.0, 1.0, 3.0, float("nan")):
        with pytest.raises(ValueError, match="tau: got"):
            report.coverage(tau)


def test_a_report_without_cells() -> None:
    report = WitCertCache(model("llama").config).report()
    assert report.coverage(0.2) != report.coverage(0.2)
    assert report.median_meter != report.median_meter
    assert report.summary_line() == "int8: no step read a compressed token"


def test_bytes_and_pages() -> None:
    cache = run("kivi4", tau=0.001, page_size=64)
    report = cache.report()
    assert report.pages == LAYERS * KV_HEADS * 2
    stores = [layer.store for layer in cache.layers]
    assert (
        report.bytes.store
        == sum(store.pool.nbytes for store in stores)
        == LAYERS * 2 * stores[0].pool.layout.bytes_per_page
    )
    assert report.bytes.backing == LAYERS * 2 * 64 * KV_HEADS * 32 * 4
    assert report.bytes.exact == report.pages_repaired * 64 * 32 * 4
    assert report.bytes.tail == LAYERS * (17 + 9) * KV_HEADS * 32 * 4
    assert report.bytes.per_token == 16 * 2 + 8 * 2 + 16 * 2 + 2
    assert report.bytes_per_token == report.bytes.nominal_per_token == 16 + 2 + 4
    assert run("int8").report().bytes_per_token == 36


def test_provenance() -> None:
    report = run("int8_dither", calibration=calibration()).report()
    assert report.guarantee == "fixed_trajectory"
    assert report.seed is not None
    assert report.calibration is not None and len(report.calibration) == 64
    assert report.budget is not None and (report.budget.delta, report.budget.steps, report.budget.spent) == (
        0.01,
        128,
        5,
    )
    assert report.versions["torch"] == torch.__version__
    plain = run("int8").report()
    assert (plain.guarantee, plain.seed, plain.calibration, plain.budget) == ("any_query", None, None, None)
    seeds = {WitCertCache(model("llama").config, "int8_dither").report().seed for _ in range(4)}
    assert len(seeds) == 4, "a dither's key is never a constant"


def test_a_seed_repeats_the_dither() -> None:
    """Two requests of one key hold the same bytes, and say so; another key gives others."""

    def codes(seed: int) -> torch.Tensor:
        cache = run("int8_dither", seed=seed)
        assert cache.report().seed == seed
        stores = [layer.store for layer in cache.layers if layer.store is not None]
        return torch.stack([store.pool.k_codes for store in stores])

    key = 2**64 - 1
    assert torch.equal(codes(key), codes(key)) and not torch.equal(codes(key), codes(0))
    cache = run("int8_dither", seed=key)
    cache.reset()
    assert cache.report().seed == key


def test_json_round_trip(tmp_path: Path) -> None:
    report = run().report()
    report.cells[0].risk = float("inf")
    path = tmp_path / "report.json"
    report.to_json(path)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert Report.model_validate_json(path.read_text()) == report


def test_summary_line() -> None:
    line = run("int8", tau=0.5).report().summary_line(0.5)
    assert line.startswith("int8: 80 cells, coverage 1.0000 at τ = 0.5, meter median ")
    assert line.endswith("(any_query), 36 bytes a token and kv head, 0 of 8 pages repaired")


def test_a_step_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting a step uses no value of a tensor on the host."""
    cache = run()
    kept: list[object] = []
    cache.observer = kept.append
    forward("llama", {"input_ids": torch.full((2, 1), 5), "attention_mask": _mask()}, cache)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda *args, **kwargs: pytest.fail("a host synchronisation"))
    cache._history.add(kept[0])  # type: ignore[arg-type]


def _mask() -> torch.Tensor:
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[1, :8] = 0
    return mask


def test_html_is_one_file(tmp_path: Path) -> None:
    run(history=7).report().to_html(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == 2 and "<script" not in html
    assert "any_query" in html and "rtn4" in html
    WitCertCache(model("llama").config).report().to_html(tmp_path / "empty.html")
    assert "no step read a compressed token" in (tmp_path / "empty.html").read_text(encoding="utf-8")
