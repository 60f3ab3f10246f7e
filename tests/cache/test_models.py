"""Whole models over every kind of store: the meter is never below the truth, and exact pages give exact text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from witcert import WitCertCache

from .models import NAMES, NO_GATE_LEFT, Watch, calibration, forward, generate, model, prompt

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

STORES: dict[str, dict[str, Any]] = {
    "int8": {},
    "int8 with everything": {"scheme": "int8", "calibration": calibration(), "witness_bands": 2, "group": 8},
    "int8_dither": {"scheme": "int8_dither", "calibration": calibration(), "dither_period": 4},
    "fp8_raw with a sketch": {"scheme": "fp8_raw", "calibration": calibration()},
    "rtn2": {"scheme": "rtn2"},
    "kivi2": {"scheme": "kivi2"},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("store", STORES)
def test_meter_is_never_below_the_true_total_variation(name: str, store: str) -> None:
    """Padded batch, chunked prefill, decode: all rows, all heads, tolerance 0."""
    options = STORES[store]
    cache = WitCertCache(model(name).config, backing=True, page_size=4, **options)
    watch = Watch(cache)
    generate(name, prompt(37, 5), cache, max_new_tokens=8, prefill_chunk_size=34)
    assert watch.cells == (2 * 3 + 2 * 7) * 4 * 2  # rows of the second chunk and of seven decode steps
    assert watch.violations == 0
    assert watch.largest > 1e-4, "the check must have something to check"
    report = cache.report()
    assert report.cells_seen == watch.cells
    assert report.guarantee == ("fixed_trajectory" if store == "int8_dither" else "any_query")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("scheme", "tau"), [("rtn4", 0.1), ("kivi2", 0.004), ("int8", 0.004)])
def test_meter_after_repair_is_never_below_the_truth(name: str, scheme: str, tau: float) -> None:
    extra = {"calibration": calibration()} if scheme == "int8" else {}
    cache = WitCertCache(model(name).config, scheme, tau=tau, page_size=4, **extra)
    watch = Watch(cache)
    generate(name, prompt(37, 5), cache)
    report = cache.report()
    assert watch.violations == 0
    assert 0 < report.pages_repaired < report.pages
    assert report.max_meter <= tau


@pytest.mark.parametrize("name", NAMES)
def test_prefill_is_exact(name: str) -> None:
    """Window, cap, sinks, scale, padding: the rows' own chunk is read exactly."""
    inputs = prompt(21, 3)
    cache = WitCertCache(model(name).config)
    got = forward(name, inputs, cache)
    wanted = forward(name, inputs, DynamicCache(), "eager")
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[real], wanted[real], rtol=1e-4, atol=1e-4)
    assert cache.report().cells_seen == 0


@pytest.mark.parametrize("name", NAMES)
def test_decode_over_exact_pages_is_exact(name: str) -> None:
    """Once every page is repaired, logits are the uncompressed ones, also of tokens that are appended later."""
    inputs = prompt(21, 3)
    cache = WitCertCache(model(name).config, "rtn2", tau=NO_GATE_LEFT, page_size=4)
    exact = DynamicCache()
    forward(name, inputs, cache)
    forward(name, inputs, exact, "eager")
    for step in range(9):
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, step + 1), value=1)
        token = {"input_ids": torch.full((2, 1), 5 + step), "attention_mask": mask}
        got, wanted = forward(name, token, cache), forward(name, token, exact, "eager")
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    report = cache.report()
    assert all(cell.compressed == 0 for cell in report.cells)
    assert report.pages_repaired == report.repairs


@pytest.mark.parametrize("name", NAMES)
def test_compressed_decode_is_close(name: str) -> None:
    inputs = prompt(21, 3)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    token = {"input_ids": torch.tensor([[4], [9]]), "attention_mask": mask}
    cache, exact = WitCertCache(model(name).config, "int8"), DynamicCache()
    forward(name, inputs, cache)
    forward(name, inputs, exact, "eager")
    got = forward(name, token, cache).log_softmax(-1)
    wanted = forward(name, token, exact, "eager").log_softmax(-1)
    assert float((wanted.exp() * (wanted - got)).sum(-1).max()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    this = model("llama", dtype)
    this.set_attn_implementation("witcert")
    cache = WitCertCache(this.config, calibration=calibration(), backing=True, page_size=4)
    watch = Watch(cache)
    this.generate(**prompt(19, 7), past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert watch.cells == 4 * 2 * 2 * 4
    assert watch.violations == 0
