"""The measurement itself: the stored logits are those that the op reads, the exact ones those of the exact keys."""

from __future__ import annotations

import math

import pytest
import torch

from witcert import StepRecord, WitCertCache
from witcert.truth import logits, true_tv

from .models import NAMES, NO_GATE_LEFT, generate, model, prompt
from .test_models import STORES

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("tau", [None, 0.01])
def test_stored_logits_have_the_normaliser_that_the_op_reports(name: str, store: str, tau: float | None) -> None:
    """Sketch, bypass, equaliser, dither, repaired pages, own chunk, window, cap and sink each change the normaliser."""
    cache = WitCertCache(model(name).config, tau=tau, backing=True, page_size=4, **STORES[store])
    differences = []

    def compare(record: StepRecord) -> None:
        stored = torch.cat([logits(record.read, i)[1].logsumexp(-1) for i in range(len(record.read.sequences))])
        differences.append(float((stored - record.reading.lse).abs().max()))

    cache.observer = compare
    generate(name, prompt(37, 5), cache, max_new_tokens=6, prefill_chunk_size=34)
    assert max(differences) < 2e-5
    assert len(differences) == 7 * 2


def test_exact_logits_are_those_of_the_model() -> None:
    """Against the keys that the model's own cache holds, token by token."""
    cache = WitCertCache(model("llama").config, "rtn2", backing=True)
    exact = []

    def keep(record: StepRecord) -> None:
        if record.read.is_decode and record.layer == 0:
            k = cache.layers[0].store.backing.k.flatten(0, 1)[: record.read.lengths[0]]  # one page, one sequence
            p = torch.zeros(4, record.read.lengths[0], dtype=torch.float64)
            for head in range(4):
                for t in range(len(k)):
                    p[head, t] = math.fsum((record.read.q[0, head].double() * k[t, head // 2].double()).tolist()) / 4
            exact.append(float((logits(record.read, 0)[0][0] - p).abs().max()))

    cache.observer = keep
    generate("llama", prompt(9), cache, max_new_tokens=3)
    assert len(exact) == 2
    assert max(exact) < 1e-12


def test_nothing_is_lost_where_every_page_is_exact() -> None:
    cache = WitCertCache(model("gemma2").config, "rtn2", tau=NO_GATE_LEFT, page_size=4)
    largest = []

    def keep(record: StepRecord) -> None:
        largest.append(float(true_tv(record).max()))

    cache.observer = keep
    generate("gemma2", prompt(20, 3), cache, max_new_tokens=4)
    assert max(largest) < 1e-14


def test_exact_keys_are_needed() -> None:
    cache = WitCertCache(model("llama").config)
    cache.observer = true_tv
    with pytest.raises(ValueError, match="backing=True"):
        generate("llama", prompt(3), cache)
