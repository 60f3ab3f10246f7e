"""What is not supported is refused by name, with the reason, and before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Gemma3nTextConfig, Llama4TextConfig, Qwen3NextConfig, T5Config

from witcert import StepRecord, WitCertCache
from witcert.padding import padding_mask
from witcert_kernels import Budget, BudgetExhausted, LayerCalibration

from .models import KV_HEADS, LAYERS, calibration, forward, generate, model, prompt

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

CONFIG = model("llama").config


def assert_untouched(cache: WitCertCache) -> None:
    assert all(layer.store is None for layer in cache.layers)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_another_attention_over_our_cache(attention: str) -> None:
    cache = WitCertCache(CONFIG)
    with pytest.raises(TypeError, match=r'call model.set_attn_implementation\("witcert"\) first'):
        forward("llama", prompt(4), cache, attention)
    assert_untouched(cache)


@pytest.mark.parametrize(
    "touch",
    [
        len,
        iter,
        lambda h: h.shape,
        lambda h: h[0],
        lambda h: torch.matmul(torch.ones(2), h),
        lambda h: torch.cat([h, h]),
    ],
)
def test_a_handle_is_good_for_nothing_else(touch: Callable[[Any], Any]) -> None:
    k = torch.zeros(1, KV_HEADS, 3, 16)
    key, value = WitCertCache(CONFIG).update(k, k, 0)
    assert key is value
    with pytest.raises(TypeError, match="WitCertCache: keys and values were used directly"):
        touch(key)


def test_our_attention_over_another_cache_or_none() -> None:
    for options in ({"past_key_values": DynamicCache()}, {"use_cache": False}):
        this = model("llama")
        this.set_attn_implementation("witcert")
        with pytest.raises(TypeError, match=r"past_key_values: got keys of type Tensor, wants a witcert.WitCertCache"):
            this(**prompt(4), **options)


def test_training_mode() -> None:
    this, cache = model("llama"), WitCertCache(CONFIG)
    this.train()
    try:
        with pytest.raises(ValueError, match="training"):
            forward("llama", prompt(4), cache)
    finally:
        this.eval()
    assert_untouched(cache)


def test_a_gradient_is_not_silently_wrong() -> None:
    this, cache = model("llama"), WitCertCache(CONFIG)
    this.set_attn_implementation("witcert")
    logits = this(**prompt(4), past_key_values=cache).logits
    with pytest.raises(RuntimeError, match="autograd"):
        logits.sum().backward()
    this.zero_grad()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"is_causal": False}, "another pattern than causal"),
        ({"attention_mask": torch.zeros(2, 1, 6, 6)}, "attention_mask: got 4 dimensions"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]] * 2)}, "zeros after a one"),
        ({"attention_mask": torch.tensor([[0, 1, 0, 1, 1, 1]] * 2)}, "zeros after a one"),
        ({"attention_mask": torch.ones(2, 7)}, r"attention_mask: got shape \[2, 7\], wants \[2, 6\]"),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask: got shape \[2, 3\], wants \[2, 6\]"),
    ],
)
def test_forward_options(options: dict[str, Any], message: str) -> None:
    this, cache = model("llama"), WitCertCache(CONFIG)
    this.set_attn_implementation("witcert")
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        this(**(prompt(6, 6) | {"past_key_values": cache} | options))
    assert_untouched(cache)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "attention_mask: got None"),
        (torch.ones(2, 7), "attention_mask: got 0 padded positions in sequence 1, wants 3"),
        (torch.tensor([[1] * 7, [0] * 5 + [1] * 2]), "attention_mask: got 5 padded positions in sequence 1, wants 3"),
    ],
)
def test_padding_that_contradicts_the_cache(mask: torch.Tensor | None, message: str) -> None:
    cache = WitCertCache(CONFIG)
    forward("llama", prompt(6, 3), cache)
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model("llama")(input_ids=torch.tensor([[3], [3]]), attention_mask=mask, past_key_values=cache)
    assert [layer.store.lengths for layer in cache.layers] == [[6, 3]] * LAYERS


def test_another_batch() -> None:
    cache = WitCertCache(CONFIG)
    forward("llama", prompt(6), cache)
    with pytest.raises(ValueError, match=r"attention_mask: got shape|batch: got 2 sequences, wants the 1"):
        forward("llama", {"input_ids": torch.tensor([[3], [3]]), "attention_mask": torch.ones(2, 7)}, cache)
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(), "encoder-decoder"),
        (Qwen3NextConfig(num_hidden_layers=4), "config.layer_types: got linear_attention"),
        (Llama4TextConfig(num_hidden_layers=4), "chunked"),
        (Gemma3nTextConfig(num_hidden_layers=4, num_kv_shared_layers=2), "share keys and values"),
    ],
)
def test_models(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WitCertCache(config)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scheme": "int7"}, ValueError, "scheme: got 'int7', wants one of .*fp8_raw"),
        ({"scheme": 8}, TypeError, "scheme: got int"),
        ({"tau": 0.0}, ValueError, "tau: got 0.0"),
        ({"tau": float("nan")}, ValueError, "tau: got nan"),
        ({"tau": 0.1, "backing": False}, ValueError, "backing: got False"),
        ({"history": -1}, ValueError, "history: got -1"),
        ({"history": 1.5}, TypeError, "history: got 1.5"),
        ({"backing": "no"}, TypeError, "backing: got 'no'"),
        ({"page": 4}, TypeError, "layout: got page, wants some of .*page_size"),
        ({"dither": True}, TypeError, "layout: got dither"),
        ({"scheme": "rtn4", "group": 8}, TypeError, "layout: got group"),
        ({"page_size": 3}, ValueError, "page_size: got 3"),
        ({"group": 5}, ValueError, "group: got 5"),
        ({"sketch": 1}, ValueError, "sketch: got 1, wants at most the calibration's 0"),
        ({"bypass": 1}, ValueError, "bypass: got 1, wants the calibration's 0"),
        ({"calibration": calibration()[:1]}, ValueError, "calibration: got 1 layers, wants the model's 2"),
        ({"calibration": [1, 2]}, TypeError, "calibration: wants"),
        ({"calibration": 7}, TypeError, "calibration: wants"),
        ({"calibration": "no such file"}, OSError, "no such file"),
        ({"calibration": "default"}, ValueError, "calibration.layers: got 30, wants the model's 2"),
        (
            {"calibration": [LayerCalibration.identity(3, 16)] * 2},
            ValueError,
            r"calibration: got .*\[3, 16\], wants \[2, 16\]",
        ),
        ({"budget": Budget(0.1, 2, 4, 9)}, ValueError, "budget: got one for scheme 'int8'"),
        ({"scheme": "int8_dither", "budget": 0.1}, TypeError, "budget: got float"),
        ({"scheme": "int8_dither", "budget": Budget(0.1, 2, 5, 9)}, ValueError, "budget: got 2 layers of 5 heads"),
    ],
)
def test_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        WitCertCache(CONFIG, **options)


@pytest.mark.parametrize(
    ("scheme", "seed", "error", "message"),
    [
        ("int8_dither", -1, ValueError, r"seed: got -1, wants a number in \[0, 18446744073709551615\]"),
        ("int8_dither", 2**64, ValueError, "seed: got 18446744073709551616"),
        ("int8_dither", 1.5, TypeError, "seed: got 1.5, wants an integer"),
        ("int8", 3, ValueError, "seed: got one for scheme 'int8', wants None without a dither"),
        ("rtn8", 3, ValueError, "seed: got one for scheme 'rtn8'"),
    ],
)
def test_seed(scheme: str, seed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        WitCertCache(CONFIG, scheme, seed=seed)


def test_layer_index() -> None:
    k = torch.zeros(1, KV_HEADS, 3, 16)
    with pytest.raises(ValueError, match=r"layer_idx: got 2, wants a number in \[0, 1\]"):
        WitCertCache(CONFIG).update(k, k, 2)


def test_a_window_that_the_model_does_not_pass_on() -> None:
    """A sliding layer whose window never reaches the attention function would silently attend to everything."""
    cache = WitCertCache(model("gemma2").config)
    with pytest.raises(ValueError, match="sliding_window: got None in layer 0, wants 8"):
        forward("llama", prompt(4), cache)
    assert_untouched(cache)


def test_patterns_that_the_padding_mask_cannot_carry() -> None:
    plain = {"attention_mask": torch.ones(1, 3), "allow_is_causal_skip": True, "use_vmap": False}
    assert padding_mask(**plain) is plain["attention_mask"]
    for change in ({"mask_function": lambda *i: True}, {"use_vmap": True}, {"allow_is_causal_skip": False}):
        with pytest.raises(ValueError, match="another pattern"):
            padding_mask(**(plain | change))


def test_budget_that_is_used_up_stops_before_the_step() -> None:
    budget = Budget(delta=0.1, layers=LAYERS, heads=4, steps=3)
    cache = WitCertCache(CONFIG, "int8_dither", budget=budget)
    with pytest.raises(BudgetExhausted, match=r"budget.steps: 1 more rows after 3"):
        generate("llama", prompt(5, 2), cache, max_new_tokens=9)
    assert [layer.get_seq_length() for layer in cache.layers] == [8, 8]
    assert cache.report().budget.spent == 3
    assert cache.report().cells_seen == 3 * 2 * 4 * LAYERS


def test_prefill_rows_behind_a_prefix_spend_the_budget() -> None:
    cache = WitCertCache(CONFIG, "int8_dither", budget=Budget(delta=0.1, layers=LAYERS, heads=4, steps=5))
    generate("llama", prompt(9), cache, max_new_tokens=1, prefill_chunk_size=5)
    assert cache.report().budget.spent == 4
    mask = torch.ones(1, 11)
    with pytest.raises(BudgetExhausted):
        forward("llama", {"input_ids": torch.tensor([[3, 3]]), "attention_mask": mask}, cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [9, 9]


def test_an_interrupted_step_is_noticed() -> None:
    cache, inputs = WitCertCache(CONFIG), prompt(4)
    forward("llama", inputs, cache)

    def interrupt(record: StepRecord) -> None:
        if record.layer == 1:
            raise KeyboardInterrupt

    cache.observer = interrupt
    token = {"input_ids": torch.tensor([[3]]), "attention_mask": torch.ones(1, 5)}
    with pytest.raises(KeyboardInterrupt):
        forward("llama", {"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(1, 6)}, cache)
    cache.observer = None
    with pytest.raises(ValueError, match=r"a step was interrupted; call reset\(\)"):
        forward("llama", {"input_ids": torch.tensor([[3]]), "attention_mask": torch.ones(1, 7)}, cache)
    cache.reset()
    forward("llama", inputs, cache)
    forward("llama", token, cache)
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.crop(-0.5), "tokens_to_remove: got -0.5"),
        (lambda cache: cache.reorder_cache(torch.tensor([0.5])), "beam_idx: got dtype torch.float32"),
        (lambda cache: cache.reorder_cache([0]), "beam_idx: got list"),
        (lambda cache: cache.batch_select_indices([0]), "indices: got list"),
        (lambda cache: cache.batch_repeat_interleave(1.5), "repeats: got 1.5"),
        (lambda cache: cache.update(torch.ones(1), torch.ones(1), "0"), "layer_idx: got '0'"),
        (lambda cache: cache.preload([(None, None)] * 2), "keys_values, key: got NoneType"),
        (lambda cache: WitCertCache(None), "config: got NoneType"),
    ],
)
def test_arguments_of_another_type(call: Callable[[Any], Any], message: str) -> None:
    cache = WitCertCache(CONFIG)
    with pytest.raises(TypeError, match=f"^{message}"):
        call(cache)
