"""Every way to generate: over exact pages the uncompressed text, over compressed ones the same in any batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from witcert import WitCertCache
from witcert.schemes import Scheme

from .models import NO_GATE_LEFT, VOCAB, Watch, calibration, forward, generate, model, prompt

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

STORES: dict[str, dict[str, Any]] = {
    "int8": {"scheme": "int8", "calibration": calibration(), "witness_bands": 2},
    "kivi2": {"scheme": "kivi2"},
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_return_sequences": 3},
    "beam search": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "chunked prefill": {"prefill_chunk_size": 5},
    "chunks of one token": {"prefill_chunk_size": 1},
    "two stop lengths": {"eos_token_id": list(range(2, VOCAB, 3))},
}


def exact_cache(name: str = "llama", **options: Any) -> WitCertCache:
    """A compressed cache whose gate makes every page exact that a decode row reads."""
    return WitCertCache(model(name).config, **({"scheme": "rtn2", "tau": NO_GATE_LEFT, "page_size": 4} | options))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("mode", [m for m in MODES if not m.startswith("chunk")])
def test_text_over_exact_pages_is_the_uncompressed_text(name: str, mode: str) -> None:
    """Reordered, repeated and dropped beams included: one exact page of another beam would change the text."""
    inputs = prompt(14, 3)
    wanted = generate(name, inputs, None, **MODES[mode])
    cache = exact_cache(name)
    got = generate(name, inputs, cache, **MODES[mode])
    assert torch.equal(got, wanted)
    assert cache.report().repairs > 0


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("mode", MODES)
def test_meter_holds_in_every_mode(store: str, mode: str) -> None:
    cache = WitCertCache(model("llama").config, backing=True, page_size=4, **STORES[store])
    watch = Watch(cache)
    generate("llama", prompt(36, 5), cache, max_new_tokens=5, **MODES[mode])
    assert watch.cells > 0
    assert watch.violations == 0


@pytest.mark.parametrize("store", STORES)
def test_greedy_text_is_the_same_alone_and_in_a_left_padded_batch(store: str) -> None:
    lengths = (33, 1, 12)
    inputs = prompt(*lengths)
    together = generate("llama", inputs, WitCertCache(model("llama").config, **STORES[store]), max_new_tokens=12)
    for b, length in enumerate(lengths):
        alone = {key: value[b : b + 1, -length:] for key, value in inputs.items()}
        text = generate("llama", alone, WitCertCache(model("llama").config, **STORES[store]), max_new_tokens=12)
        assert torch.equal(text[0, length:], together[b, max(lengths) :])


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("guess", ["assistant", "prompt lookup"])
def test_assisted_decoding_rolls_back_exactly(store: str, guess: str) -> None:
    """Rejected guesses leave no trace in the store: what it holds is what a cache without guesses would hold."""
    this, inputs = model("llama"), prompt(31)
    inputs["input_ids"][0, 16:] = inputs["input_ids"][0, :15]
    assistant = model("qwen3")
    assistant.set_attn_implementation("eager")
    options = {"assistant_model": assistant} if guess == "assistant" else {"prompt_lookup_num_tokens": 3}
    cache = WitCertCache(this.config, page_size=4, **STORES[store])
    text = generate("llama", inputs, cache, max_new_tokens=14, **options)
    tokens = text[:, : cache.get_seq_length()]
    again = WitCertCache(this.config, page_size=4, **STORES[store])
    forward("llama", {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, again)
    assert cache.layers[0].store.lengths == again.layers[0].store.lengths
    # the first layer's keys do not depend on how the text was read, up to the rounding of a product's shape
    name, tolerance = ("k_codes", 1) if store == "int8" else ("k_hat", 1e-3)
    ours, theirs = (_tokens(c, name) for c in (cache, again))
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-3, atol=tolerance)
    assert float((ours == theirs).float().mean()) > 0.99


def _tokens(cache: WitCertCache, tensor: str) -> torch.Tensor:
    store = cache.layers[0].store
    position = torch.arange(store.lengths[0])
    return getattr(store.pool, tensor).flatten(0, 1)[store.slots(torch.zeros_like(position), position)]


def test_assisted_text_is_the_uncompressed_text_where_nothing_is_lost() -> None:
    inputs = prompt(15)
    assistant = model("qwen3")
    assistant.set_attn_implementation("eager")
    wanted = generate("llama", inputs, None, max_new_tokens=14)
    nearly_exact = Scheme("identity", lambda k: k, lambda v: v, bits=16, token_group=8)
    cache = WitCertCache(model("llama").config, nearly_exact, page_size=4)
    assert torch.equal(generate("llama", inputs, cache, max_new_tokens=14, assistant_model=assistant), wanted)


def test_second_turn_on_the_same_cache() -> None:
    first = prompt(9, 4)
    cache, plain = exact_cache(), DynamicCache()
    turns = []
    for attention, past in (("eager", plain), ("witcert", cache)):
        this = model("llama")
        this.set_attn_implementation(attention)
        text = this.generate(**first, past_key_values=past, max_new_tokens=6, do_sample=False)
        more = torch.cat([text, torch.full((2, 5), 17)], dim=1)
        mask = torch.nn.functional.pad(first["attention_mask"], (0, 11), value=1)
        turns.append(
            this.generate(input_ids=more, attention_mask=mask, past_key_values=past, max_new_tokens=6, do_sample=False)
        )
    assert torch.equal(*turns)
    assert all(cell.decode for cell in cache.report().cells), "all that the second turn's prefill reads is exact"


def test_second_turn_reads_the_first_from_the_store() -> None:
    cache = WitCertCache(model("llama").config, backing=True)
    watch = Watch(cache)
    text = generate("llama", prompt(9, 4), cache, max_new_tokens=6)
    mask = torch.nn.functional.pad(prompt(9, 4)["attention_mask"], (0, 11), value=1)
    more = {"input_ids": torch.cat([text, torch.full((2, 5), 17)], dim=1), "attention_mask": mask}
    generate("llama", more, cache, max_new_tokens=4)
    rows = [cell for cell in cache.report().cells if not cell.decode]
    assert len(rows) == 2 * 6 * 4 * 2  # sequences, rows, heads, layers
    assert watch.violations == 0


def test_a_copy_shares_nothing_with_its_original() -> None:
    """Prefix reuse: a deep copy generates what the original would, and leaves it alone."""
    inputs = prompt(14, 3)
    cache = WitCertCache(model("llama").config, "kivi2", tau=0.004, page_size=4)
    forward("llama", inputs, cache)
    seen: list[int] = []
    cache.observer = lambda record: seen.append(record.step)
    copied = copy.deepcopy(cache)
    text = [generate("llama", _next(inputs), c, max_new_tokens=6) for c in (copied, cache)]
    assert torch.equal(*text)
    assert copied.observer is cache.observer
    assert len(seen) == 2 * 2 * 6
    assert cache.get_seq_length() == 20
    assert copied.report().cells == cache.report().cells


def _next(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.cat([inputs["input_ids"], torch.full((len(inputs["input_ids"]), 1), 5)], dim=1)
    return {"input_ids": tokens, "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)}


def test_reset_begins_a_new_request() -> None:
    cache = WitCertCache(model("llama").config, "int8_dither", tau=0.1)
    first = generate("llama", prompt(9), cache)
    seed = cache.report().seed
    cache.reset()
    report = cache.report()
    assert (report.cells_seen, report.pages, cache.get_seq_length(), report.budget.spent) == (0, 0, 0, 0)
    assert report.seed != seed
    assert torch.equal(generate("llama", prompt(9), cache), first)
    assert cache.report().budget.spent == 9


def test_preloaded_prompt_is_what_a_prefill_writes() -> None:
    """Exact keys and values from elsewhere give the same bytes as the model's own, and the same text."""
    inputs = prompt(21, 6)
    written, loaded = (WitCertCache(model("llama").config, calibration=calibration(), backing=True) for _ in range(2))
    forward("llama", inputs, written)
    exact = []
    for layer in written.layers:
        k, v = (torch.zeros(2, 21, *x.shape[2:]) for x in (layer.store.backing.k, layer.store.backing.v))
        for b, length in enumerate((21, 6)):
            slots = layer.store.slots(torch.full((length,), b), torch.arange(length))
            for target, source in ((k, layer.store.backing.k), (v, layer.store.backing.v)):
                target[b, 21 - length :] = source.flatten(0, 1)[slots]
        exact.append((k.transpose(1, 2), v.transpose(1, 2)))
    loaded.preload(exact, inputs["attention_mask"])
    for ours, theirs in zip(loaded.layers, written.layers, strict=True):
        for name in ours.store.pool.page_tensors:
            assert torch.equal(getattr(ours.store.pool, name), getattr(theirs.store.pool, name))
    text = [generate("llama", _next(inputs), c) for c in (written, loaded)]
    assert torch.equal(*text)
    assert written.report().cells == loaded.report().cells
    with pytest.raises(ValueError, match="preload: got a cache of 31 positions"):
        loaded.preload(exact)
    loaded.reset()
    for wrong, message in ((exact[:1], "got 1 layers, wants 2"), ([exact[0], (exact[1][0], exact[1][1][:1])], "shape")):
        with pytest.raises(ValueError, match=f"keys_values: got .*{message}|keys_values: {message}"):
            loaded.preload(wrong)
        assert all(layer.store is None for layer in loaded.layers)


def test_inference_mode_and_ordinary_mode_mix() -> None:
    inputs = prompt(6)
    cache = WitCertCache(model("llama").config, "kivi2", backing=True)
    with torch.inference_mode():
        generate("llama", inputs, cache, max_new_tokens=30)
    mask = torch.ones(1, 36, dtype=torch.long)
    forward("llama", {"input_ids": torch.tensor([[3]]), "attention_mask": mask}, cache)
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    assert cache.report().cells_seen == 30 * 4 * 2


def test_prompt_past_the_window_of_the_model_is_not_refused() -> None:
    """The cache has no limit; positions past ``max_position_embeddings`` are the model's own business."""
    cache = WitCertCache(model("llama").config, backing=True)
    watch = Watch(cache)
    generate("llama", prompt(140), cache, max_new_tokens=3)
    assert watch.cells == 2 * 4 * 2
    assert watch.violations == 0


def test_one_token_prompt_attends_to_itself_exactly() -> None:
    cache, inputs = WitCertCache(model("llama").config, "sign1"), prompt(1)
    got, wanted = forward("llama", inputs, cache), forward("llama", inputs, DynamicCache(), "eager")
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert cache.report().cells_seen == 0
    generate("llama", _next(inputs), cache, max_new_tokens=2)
    assert cache.report().cells_seen == 2 * 4 * 2


def test_empty_prompt_row_begins_with_its_first_token() -> None:
    """A row that is all padding holds nothing, gives zeros, and begins when a token comes."""
    inputs = prompt(5, 2)
    inputs["attention_mask"][1] = 0
    cache = WitCertCache(model("llama").config, backing=True)
    watch = Watch(cache)
    forward("llama", inputs, cache)
    assert cache.layers[0].store.lengths == [5, 0]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    got = forward("llama", {"input_ids": torch.tensor([[8], [8]]), "attention_mask": mask}, cache)
    first = {"input_ids": torch.tensor([[8]]), "attention_mask": torch.ones(1, 1)}
    alone = forward("llama", first, DynamicCache(), "eager")
    torch.testing.assert_close(got[1], alone[0], rtol=1e-4, atol=1e-4)
    assert cache.layers[1].store.lengths == [6, 1]
    assert watch.violations == 0


def test_no_prompt_begins_with_the_bos_token_and_an_empty_one_writes_nothing() -> None:
    this, cache = model("llama"), WitCertCache(model("llama").config)
    this.set_attn_implementation("witcert")
    with torch.no_grad(), pytest.raises(RuntimeError):  # transformers cannot embed nothing, whatever the cache
        this(input_ids=torch.zeros(1, 0, dtype=torch.long), past_key_values=cache)
    assert all(layer.store is None for layer in cache.layers)
    text = this.generate(past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert text[0, 0] == 1
    assert cache.report().cells_seen == 2 * 4 * 2
