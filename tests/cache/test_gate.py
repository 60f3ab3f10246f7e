"""The gate: which kv heads are over τ, which pages go first, when it stops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from witcert import StepRecord, WitCertCache
from witcert.gate import next_pages, over
from witcert.read import Read
from witcert_kernels import Certificate

from .models import HEADS, KV_HEADS, NO_GATE_LEFT, Watch, forward, generate, model, prompt

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")


def certificate(meter: list[float], risk: list[float]) -> Certificate:
    m, r = torch.tensor([meter]), torch.tensor([risk])
    return Certificate(m, m, r, m, torch.ones_like(m, dtype=torch.int32), torch.empty(0), "any_query")


def test_a_kv_head_is_over_when_any_of_its_query_heads_is() -> None:
    cert = certificate([0.1, 0.3, 0.2, 0.1, math.nan, 0.0], [0.0] * 6)
    assert over(cert, 0.2, 3).tolist() == [[True, False, True]]
    assert over(cert, 0.3, 3).tolist() == [[False, False, True]]


def test_from_one_on_the_gate_compares_the_risk_on_the_scale_of_the_paper() -> None:
    """½ (A² − 1) > τ, with A = e^risk, whatever the meter says."""
    tau = 2.0
    a = math.sqrt(1 + 2 * tau)
    cert = certificate([1.0] * 4, [math.log(a) - 1e-4, 0.0, math.log(a) + 1e-4, math.inf])
    assert over(cert, tau, 4).tolist() == [[False, False, True, True]]
    assert over(cert, 1e6, 4).tolist() == [[False, False, False, True]]


def test_pages_go_in_the_order_of_their_shares_a_quarter_of_the_rest_at_a_time() -> None:
    shares = torch.tensor([[[0.1, 0.9, 0.0, 0.5, 0.5, 0.2, 7.0]]])
    left = torch.tensor([[[True, True, True, True, True, True, False]]])
    hot = torch.tensor([[True]])
    order = []
    for _ in range(5):
        chosen = next_pages(shares, left, hot)
        order.append(chosen[0, 0].nonzero()[:, 0].tolist())
        left &= ~chosen
    assert order == [[1, 3], [4], [5], [0], [2]]
    assert not bool(left.any())
    assert not bool(next_pages(shares, torch.ones_like(left), ~hot).any())


@pytest.mark.parametrize("tau", [0.3, 0.05, 3.0])
def test_no_decode_row_is_left_over_the_threshold(tau: float) -> None:
    cache = WitCertCache(model("llama").config, "rtn2", tau=tau, page_size=4)
    watch = Watch(cache)
    generate("llama", prompt(40, 9), cache)
    report = cache.report()
    assert watch.violations == 0
    assert report.gate == ("certified" if tau < 1 else "risk_ranked")
    assert 0 < report.pages_repaired == report.repairs
    for cell in report.cells:
        assert cell.meter <= tau if tau < 1 else cell.risk <= 0.5 * math.log1p(2 * tau)
        assert cell.meter <= cell.meter_before or cell.repaired
    if tau < 1:
        assert report.coverage(tau) == 1.0


def test_only_hot_kv_heads_are_repaired_and_only_what_is_needed() -> None:
    """One kv head of one layer has large keys: its pages are repaired, the others stay compressed."""
    this = model("llama")
    weight = this.model.layers[1].self_attn.k_proj.weight
    kept = weight.data.clone()
    weight.data[:16] *= 0.02
    try:
        cache = WitCertCache(this.config, "rtn4", tau=0.2, page_size=4)
        generate("llama", prompt(40), cache)
    finally:
        weight.data.copy_(kept)
    table = cache.layers[1].store.exact_pages
    assert not bool((table[:, 0] >= 0).any())
    assert bool((table[:, 1] >= 0).any())


def test_shares_are_asked_for_only_when_a_page_must_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    run = Read.run

    def counting(self: Read, **options: Any) -> Any:
        asked.append(bool(options.get("return_shares")))
        return run(self, **options)

    monkeypatch.setattr(Read, "run", counting)
    for scheme, tau, wanted in (("int8", 0.9, False), ("rtn2", 0.05, True)):
        asked.clear()
        generate("llama", prompt(40, 9), WitCertCache(model("llama").config, scheme, tau=tau, page_size=4))
        assert asked and any(asked) is wanted


def test_prefill_rows_are_metered_and_not_gated() -> None:
    cache = WitCertCache(model("llama").config, "rtn2", tau=0.01, page_size=4)
    forward("llama", prompt(20), cache)
    mask = torch.ones(1, 24)
    forward("llama", {"input_ids": torch.tensor([[4, 5, 6, 7]]), "attention_mask": mask}, cache)
    report = cache.report()
    assert report.cells_seen == 4 * HEADS * 2
    assert max(cell.meter for cell in report.cells) > 0.01
    assert report.repairs == 0


def test_the_gate_leaves_pages_outside_the_window_alone() -> None:
    cache = WitCertCache(model("gemma2").config, "rtn2", tau=NO_GATE_LEFT, page_size=4)
    forward("gemma2", prompt(41), cache)
    forward("gemma2", {"input_ids": torch.tensor([[4]]), "attention_mask": torch.ones(1, 42)}, cache)
    sliding, full = ((layer.store.exact_pages >= 0)[0, 0] for layer in cache.layers)
    assert sliding.tolist()[:11] == [False] * 8 + [True] * 3  # positions 34 to 41
    assert full.tolist()[:11] == [True] * 11


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("scheme", ["int8", "rtn4", "kivi4"])
@pytest.mark.parametrize("tau", [None, 0.3])
def test_a_key_that_is_not_finite(poison: float, scheme: str, tau: float | None) -> None:
    """It reads as meter 1 in its own kv head, never heals, and leaves the other sequence untouched."""
    this, inputs = model("llama"), prompt(36, 36)
    clean, cache = (WitCertCache(this.config, scheme, tau=tau, page_size=4, backing=True) for _ in range(2))
    wanted = generate("llama", inputs, clean, max_new_tokens=5)

    def spoil(module: torch.nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
        if out.shape[1] > 1:
            out = out.clone()
            out[0, 7, 3] = poison  # kv head 0
        return out

    handle = this.model.layers[1].self_attn.k_proj.register_forward_hook(spoil)
    try:
        got = generate("llama", inputs, cache, max_new_tokens=5)
    finally:
        handle.remove()
    assert torch.equal(got[1], wanted[1])
    report = cache.report()
    for cell in report.cells:
        lost = cell.sequence == 0 and cell.layer == 1 and cell.head < HEADS // KV_HEADS
        assert (cell.meter == 1.0) == lost
        assert (cell.risk == math.inf) == lost
    second, untouched = ([cell for cell in c.report().cells if cell.sequence == 1] for c in (cache, clean))
    assert second == untouched
    lost = [cell for cell in report.cells if cell.meter == 1.0]
    assert report.non_finite == len(lost) > 0
    assert report.histogram[-1] >= len(lost)
    assert report.coverage(0.999) == 1 - len(lost) / report.cells_seen
    if tau is not None:
        table = cache.layers[1].store.exact_pages
        assert bool((table[0, 0, :10] >= 0).all()), "it ends with all pages of its head exact"


def test_observer_sees_the_last_decode() -> None:
    cache = WitCertCache(model("llama").config, "rtn2", tau=0.05, page_size=4)
    records: list[StepRecord] = []
    cache.observer = records.append
    generate("llama", prompt(20), cache, max_new_tokens=3)
    assert [(r.layer, r.step, r.read.is_decode) for r in records] == [
        (layer, step, step > 19) for step in (19, 20, 21) for layer in range(2)
    ]
    first = next(r for r in records if r.read.is_decode)
    assert float(first.certificate.meter.max()) <= 0.05 < float(first.reading.meter_before.max())
    assert int(first.reading.repaired.sum()) > 0
