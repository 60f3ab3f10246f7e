"""A refused step leaves the cache as it was; schemes cannot touch the keys; autocast is understood."""

from __future__ import annotations

import copy

import pytest
import torch

from witcert import WitCertCache, schemes
from witcert.truth import true_tv

from .models import forward, generate, model, prompt

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")


def lengths(cache: WitCertCache) -> list[int]:
    return [layer.get_seq_length() for layer in cache.layers]


@pytest.mark.parametrize("wrong", ["softcap", "scale", "dtype", "heads", "sinks", "longer", "batch", "values", "mask"])
def test_a_refused_step_changes_nothing(wrong: str) -> None:
    cache = WitCertCache(model("llama").config, "int8_dither")
    generate("llama", prompt(9), cache, max_new_tokens=3)
    kv, d = 2, cache.layers[0].store.pool.layout.head_dim  # type: ignore[union-attr]
    shape = (2 if wrong == "batch" else 1, kv, 2 if wrong == "longer" else 1, d)
    k = torch.ones(shape, dtype=torch.float64 if wrong == "dtype" else torch.float32)
    v = torch.ones(1, kv, 3, d) if wrong == "values" else k
    query = torch.ones(1, 3 if wrong == "heads" else 4, 1, d)
    before, spent, report = lengths(cache), cache.budget.spent, cache.report()  # type: ignore[union-attr]
    bytes_before = copy.deepcopy(cache.layers[0].store.pool.k_codes)  # type: ignore[union-attr]
    handle, _ = cache.update(k, v, 0)
    options = {
        "sm_scale": -1.0 if wrong == "scale" else None,
        "logits_soft_cap": 2e6 if wrong == "softcap" else 0.0,
        "sinks": torch.full((4,), torch.nan) if wrong == "sinks" else None,
    }
    mask = "none" if wrong == "mask" else None
    with pytest.raises((ValueError, TypeError), match=r"^(softcap|scaling|query|key|value|s_aux|attention_mask): got"):
        cache.attend(handle, query, mask, **options)  # type: ignore[arg-type]
    assert lengths(cache) == before and cache.budget.spent == spent  # type: ignore[union-attr]
    assert torch.equal(cache.layers[0].store.pool.k_codes, bytes_before)  # type: ignore[union-attr]
    assert cache.report() == report
    step = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones(1, before[0] + 1, dtype=torch.int64)}
    forward("llama", step, cache)
    assert lengths(cache) == [n + 1 for n in before]


def test_a_refused_preload_can_be_repeated() -> None:
    cache = WitCertCache(model("llama").config)
    good = [(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)) for _ in cache.layers]
    with pytest.raises(TypeError, match=r"^value: got dtype"):
        cache.preload([good[0], (good[1][0], good[1][1].double())])
    assert lengths(cache) == [0, 0]
    cache.preload(good)
    assert lengths(cache) == [5, 5]


def test_a_scheme_that_works_in_place_is_still_measured() -> None:
    scheme = schemes.Scheme("in place", keys=lambda x: x.clamp_(-0.1, 0.1), values=lambda x: x.mul_(0), bits=4)
    cache = WitCertCache(model("llama").config, scheme, backing=True)
    largest: list[float] = []

    def watch(record: object) -> None:
        true = true_tv(record)  # type: ignore[arg-type]
        assert bool((record.certificate.meter >= true).all())  # type: ignore[attr-defined]
        largest.append(float(true.max()))

    cache.observer = watch
    generate("llama", prompt(12), cache, max_new_tokens=4)
    assert max(largest) > 1e-3


def test_autocast() -> None:
    cache = WitCertCache(model("llama").config, backing=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        generate("llama", prompt(12), cache, max_new_tokens=3)
    report = cache.report()
    assert report.cells_seen > 0 and report.max_meter < 1
