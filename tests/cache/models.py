"""Tiny models with random weights, large enough for attention that is not uniform."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from witcert import StepRecord, WitCertCache
from witcert.truth import true_tv
from witcert_kernels import LayerCalibration

torch.set_num_threads(1)

VOCAB, WINDOW, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 61, 8, 4, 2, 16, 2
NAMES = ("llama", "qwen3", "gemma2", "gpt_oss")
NO_GATE_LEFT = 1e-30
"""A threshold that only exact pages meet."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@cache
def model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of this family, in evaluation mode, with eager attention."""
    torch.manual_seed(7)
    made: PreTrainedModel
    if name == "llama":
        made = LlamaForCausalLM(LlamaConfig(**_COMMON))
    elif name == "qwen3":
        made = Qwen3ForCausalLM(Qwen3Config(**_COMMON))
    elif name == "gemma2":
        made = Gemma2ForCausalLM(
            Gemma2Config(**_COMMON, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=9)
        )
    else:
        made = GptOssForCausalLM(
            GptOssConfig(**_COMMON, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1)
        )
        for layer in made.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    made = made.to(dtype).eval()
    made.set_attn_implementation("eager")
    return made


def prompt(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens, left-padded to the longest of the lengths."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(2, VOCAB, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def calibration(seed: int = 3, r: int = 2, bypass: int = 1) -> list[LayerCalibration]:
    """A random calibration for every layer."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(LAYERS):
        pairs = torch.stack([torch.randperm(HEAD_DIM // 2, generator=generator)[:bypass] for _ in range(KV_HEADS)])
        off = torch.cat([pairs, pairs + HEAD_DIM // 2], dim=1)
        mu = 0.2 * torch.randn(KV_HEADS, HEAD_DIM, generator=generator)
        f = (0.3 * torch.randn(KV_HEADS, HEAD_DIM // 2, generator=generator)).exp().repeat(1, 2)
        u = torch.randn(KV_HEADS, r, HEAD_DIM, generator=generator)
        u = u.scatter(-1, off[:, None, :].expand(-1, r, -1), 0.0)
        u /= torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        layers.append(LayerCalibration(mu.scatter(1, off, 0.0), f.scatter(1, off, 1.0), u, pairs))
    return layers


def generate(name: str, inputs: dict[str, torch.Tensor], cache: WitCertCache | None, **options: Any) -> torch.Tensor:
    """Greedy text unless the options say otherwise, over a compressed cache, or over the model's own for None."""
    this = model(name)
    this.set_attn_implementation("eager" if cache is None else "witcert")
    options = {"max_new_tokens": 10, "do_sample": False} | options
    torch.manual_seed(11)
    return this.generate(**inputs, past_key_values=DynamicCache() if cache is None else cache, **options)


def forward(
    name: str, inputs: dict[str, torch.Tensor], cache: WitCertCache | DynamicCache, attention: str = "witcert"
) -> torch.Tensor:
    """Logits of one forward pass, positions following from the mask as in ``generate``."""
    this = model(name)
    this.set_attn_implementation(attention)
    n = inputs["input_ids"].shape[1]
    position = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)[:, -n:]
    with torch.no_grad():
        return this(**inputs, position_ids=position, past_key_values=cache, use_cache=True).logits


class Watch:
    """An observer that measures the true total variation of every cell."""

    def __init__(self, cache: WitCertCache, then: Callable[[StepRecord], None] | None = None) -> None:
        self.cells = 0
        self.violations = 0
        self.largest = 0.0
        self.then = then
        cache.observer = self

    def __call__(self, record: StepRecord) -> None:
        """Count cells whose meter is below the truth, tolerance 0."""
        true = true_tv(record)
        self.cells += int((record.certificate.compressed > 0).sum())
        self.violations += int((record.certificate.meter.double() < true).sum())
        self.largest = max(self.largest, float(true.max()))
        if self.then is not None:
            self.then(record)
