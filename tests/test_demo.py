"""The main job on the real model: answers, and a bound that holds in every cell with tolerance 0."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from witcert import WitCertCache, page
from witcert.calibration import default_for
from witcert.demo import SCHEMES, TAU, Demo, fidelity, prefill, run_demo
from witcert.haystack import prompts

pytestmark = pytest.mark.model

ROUNDING = 1e-4
"""How far rounding may lift a meter above min(1, e-form): logits here are below 100 (witcert_kernels.rounding)."""


@pytest.fixture(scope="module")
def demo(smollm2: Any) -> Demo:
    model, tokenizer = smollm2
    seen: list[tuple[int, int]] = []
    result = run_demo(
        model,
        tokenizer,
        lambda name, done, total, worst: seen.append((done, total)),
        calibration=default_for(model),
        new_tokens=14,
        fidelity_tokens=24,
        needles=prompts(tokenizer, quick=True)[:1],
    )
    assert all(0 <= done <= total for done, total in seen) and seen == sorted(seen)
    return result


def test_every_scheme_ran_raw_and_gated(demo: Demo) -> None:
    ran = [(run.scheme, run.gated) for run in demo.runs]
    assert ran == [("uncompressed", False)] + [(s, g) for s in SCHEMES for g in (False, True)]
    assert all((len(run.cells) > 0) == (run.scheme != "uncompressed") for run in demo.runs if not run.gated)


def test_meter_is_at_least_the_true_tv_and_at_most_the_eform(demo: Demo) -> None:
    for run in demo.runs:
        cells = run.cells
        assert bool((cells["meter"] >= cells["true_tv"]).all()), run.scheme
        assert bool((cells["meter"] <= np.minimum(1, cells["eform"]) + ROUNDING).all()), run.scheme
    assert all(entry.get("violations", 0) == 0 for entry in demo.summary())


def test_gate_keeps_the_meter_at_tau_and_restores_the_answer(demo: Demo) -> None:
    by_run = {(run.scheme, run.gated): run for run in demo.runs}
    uncompressed = by_run["uncompressed", False]
    assert uncompressed.right
    for scheme in SCHEMES:
        gated = by_run[scheme, True]
        assert bool((gated.cells["meter"] <= TAU).all())
        assert 0 <= gated.pages_repaired <= gated.pages
    for scheme in ("rtn2", "kivi2"):
        assert by_run[scheme, True].answer == uncompressed.answer
        assert by_run[scheme, True].pages_repaired > 0
    assert by_run["int8", True].pages_repaired <= by_run["int8", True].pages / 1000


def test_guarantees_are_labelled(demo: Demo) -> None:
    for run in demo.runs:
        wanted = {"uncompressed": "exact", "int8_dither": "fixed_trajectory"}.get(run.scheme, "any_query")
        assert run.guarantee == wanted


def test_int8_is_close_to_uncompressed(demo: Demo) -> None:
    assert demo.fidelity is not None and demo.fidelity.tokens == 24
    assert demo.fidelity.top1 >= 0.97 and 0 <= demo.fidelity.mean_kl < 1e-2


def test_json_and_html(demo: Demo, tmp_path: Path) -> None:
    demo.write_json(tmp_path / "demo.json")
    document = json.loads((tmp_path / "demo.json").read_text())
    assert len(document["cells"]) == sum(len(run.cells) for run in demo.runs)
    assert {"prompt", "scheme", "gate", "layer", "head", "step", "meter", "eform", "true_tv", "guarantee"} == set(
        document["cells"][0]
    )
    assert [e["scheme"] for e in document["summary"]].count("int8") == 2
    html = page.render(demo)
    assert html.count("data:image/png;base64,") == 4
    assert 'name="viewport"' in html and not re.search(r'(src|href)="(?!data:)', html)
    for scheme in SCHEMES:
        assert scheme in html


def test_left_padded_batch_says_the_same(smollm2: Any) -> None:
    model, tokenizer = smollm2
    needles = prompts(tokenizer, quick=True)
    alone = []
    model.set_attn_implementation("witcert")
    for needle in needles:
        cache = WitCertCache(model.config, calibration=default_for(model))
        alone.append(_generate(model, needle.input_ids, torch.ones_like(needle.input_ids), cache)[0])
    longest = max(n.tokens for n in needles)
    ids = torch.full((len(needles), longest), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for i, needle in enumerate(needles):
        ids[i, longest - needle.tokens :], mask[i, longest - needle.tokens :] = needle.input_ids[0], 1
    together = _generate(model, ids, mask, WitCertCache(model.config, calibration=default_for(model)))
    for one, row in zip(alone, together, strict=True):
        assert one.tolist() == row[: len(one)].tolist()


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: WitCertCache) -> torch.Tensor:
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False)
    return out[:, ids.shape[1] :]


def test_fidelity_sees_a_bad_cache(smollm2: Any) -> None:
    model, tokenizer = smollm2
    prefix = prefill(model, prompts(tokenizer, quick=True)[0].input_ids)
    bad = fidelity(model, prefix, "rtn2", 6, None, lambda n, worst: None)
    assert bad.mean_kl > 0.1
