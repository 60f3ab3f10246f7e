"""What capture records, against the model's own cache and its own attention weights, and the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.cache.models import VOCAB, WINDOW, model
from tests.calibration.tensors import captured
from witcert.capture import Captured, CapturedLayer, CaptureMetadata, ModelFingerprint, capture, traits

TOKENS, STEPS = 40, 12


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(2, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(5))


def glm() -> PreTrainedModel:
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": VOCAB}
    return GlmForCausalLM(
        GlmConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, initializer_range=0.2)
    ).eval()


def named(name: str) -> PreTrainedModel:
    return glm() if name == "glm" else model(name)


def weights(layer: CapturedLayer, meta: CaptureMetadata) -> torch.Tensor:
    """Attention weights ``[heads, steps, tokens]`` that the file's own definition gives."""
    tokens, kv_heads, _ = layer.k.shape
    q = layer.q.double().unflatten(1, (kv_heads, -1))
    x = meta.sm_scale * torch.einsum("nkgd,tkd->kgnt", q, layer.k.double()).flatten(0, 1)
    if meta.logits_soft_cap:
        x = meta.logits_soft_cap * (x / meta.logits_soft_cap).tanh()
    position = torch.arange(tokens - len(layer.q), tokens)[:, None]
    token = torch.arange(tokens)
    x = x.masked_fill(token > position, -torch.inf)
    if layer.window_left >= 0:
        x = x.masked_fill(token < position - layer.window_left, -torch.inf)
    if layer.sinks is not None:
        x = torch.cat([x, layer.sinks.double()[:, None, None].expand(-1, x.shape[1], 1)], -1)
    return x.softmax(-1)[..., :tokens]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss", "glm"])
def test_capture_is_what_the_model_attended_with(name: str, ids: torch.Tensor) -> None:
    """Keys and values are those of the model's cache; the weights that they give are the model's eager ones."""
    this = named(name)
    this.set_attn_implementation("eager")
    cache = DynamicCache()
    with torch.no_grad():
        eager = this(ids[None], past_key_values=cache, output_attentions=True).attentions
    got = capture(this, ids, steps=STEPS)
    assert this.config._attn_implementation == "eager"
    for n, layer in enumerate(got.layers):
        assert layer.q.shape == (STEPS, 4, 16)
        if layer.window_left < 0:  # a sliding layer's cache forgets
            torch.testing.assert_close(layer.k, cache.layers[n].keys[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(layer.v, cache.layers[n].values[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
        wanted = eager[n][0, :, -STEPS:].double()
        torch.testing.assert_close(weights(layer, got.metadata), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "windows", "cap", "sinks", "rope"),
    [
        ("llama", [-1, -1], 0.0, False, ("half", None)),
        ("gemma2", [WINDOW - 1, -1], 2.0, False, ("half", None)),
        ("gpt_oss", [WINDOW - 1, -1], 0.0, True, ("half", None)),
        ("glm", [-1, -1], 0.0, False, ("interleaved", 8)),
    ],
)
def test_metadata_says_what_the_model_does(
    name: str, windows: list[int], cap: float, sinks: bool, rope: tuple[str, int | None], ids: torch.Tensor
) -> None:
    got = capture(named(name), ids, steps=STEPS)
    assert [layer.window_left for layer in got.layers] == windows
    assert got.metadata.logits_soft_cap == cap
    assert all((layer.sinks is not None) == sinks for layer in got.layers)
    assert (got.metadata.rope_layout, got.metadata.rotary_dim) == rope
    assert traits(got) == traits(named(name)) == ModelFingerprint.of(named(name)).model_dump()


def test_window_that_the_text_does_not_fill_is_none(ids: torch.Tensor) -> None:
    assert [layer.window_left for layer in capture(model("gemma2"), ids[:WINDOW]).layers] == [-1, -1]


def test_progress_counts_layers(ids: torch.Tensor) -> None:
    seen: list[tuple[str, int, int]] = []
    capture(model("llama"), ids, progress=lambda *step: seen.append(step))
    assert seen == [("capture", 1, 2), ("capture", 2, 2)]


def test_weights_hash_sees_one_changed_parameter() -> None:
    this = glm()
    before = ModelFingerprint.of(this).weights
    assert before == ModelFingerprint.of(glm()).weights
    with torch.no_grad():
        this.model.layers[1].self_attn.k_proj.weight += 1e-3
    assert ModelFingerprint.of(this).weights != before


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": torch.zeros(3)}, TypeError, "input_ids: got dtype"),
        ({"input_ids": torch.zeros(1, 3, dtype=torch.int64)}, ValueError, r"input_ids: got shape \[1, 3\]"),
        ({"steps": 0}, ValueError, "steps: got 0"),
        ({"steps": 1.5}, TypeError, r"steps: got 1\.5"),
        ({"steps": TOKENS + 1}, ValueError, f"steps: got {TOKENS + 1}"),
        (
            {"input_ids": torch.ones(129, dtype=torch.int64)},
            ValueError,
            "input_ids: got 129 tokens, wants at most .* 128",
        ),
    ],
)
def test_bad_arguments_are_named(
    change: dict[str, object], error: type[Exception], message: str, ids: torch.Tensor
) -> None:
    with pytest.raises(error, match=message):
        capture(model("llama"), **({"input_ids": ids} | change))  # type: ignore[arg-type]


def test_model_with_attention_of_its_own_is_refused(ids: torch.Tensor) -> None:
    this = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=VOCAB)).eval()
    with pytest.raises(ValueError, match="model: captured 0 of 2 layers"):
        capture(this, ids)


def test_model_that_does_not_mask_causally_is_refused(ids: torch.Tensor) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCAB
    )
    this = LlamaForCausalLM(config).eval()
    this.model.layers[0].self_attn.is_causal = False
    before = this.config._attn_implementation
    with pytest.raises(ValueError, match="layer 0 is not causal"):
        capture(this, ids)
    assert this.config._attn_implementation == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_file_round_trip(dtype: torch.dtype, tmp_path: Path, ids: torch.Tensor) -> None:
    for made in (capture(glm().to(dtype), ids), captured(dtype=dtype, sinks=True, windows=(7, -1))):
        made.save(tmp_path / "c.safetensors")
        back = Captured.load(tmp_path / "c.safetensors")
        assert back.metadata == made.metadata
        for a, b in zip(made.layers, back.layers, strict=True):
            assert a.window_left == b.window_left
            assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("q", "k", "v"))
            assert (a.sinks is None) == (b.sinks is None)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"none/c\.safetensors"):
        captured(tokens=3, steps=1).save(tmp_path / "none" / "c.safetensors")


def test_a_file_is_readable_by_whom_other_files_are(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    captured(tokens=3, steps=1).save(tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_file_of_another_engine_needs_only_the_scale(tmp_path: Path) -> None:
    tensors = {
        f"layers.{n}.{name}": torch.randn(10 if name != "q" else 4, 2, 8) for n in range(2) for name in ("q", "k", "v")
    }
    save_file(tensors, tmp_path / "c.safetensors", metadata={"sm_scale": "0.5", "window_left": "3", "engine": "other"})
    got = Captured.load(tmp_path / "c.safetensors")
    assert [layer.window_left for layer in got.layers] == [3, 3]
    assert (got.metadata.sm_scale, got.metadata.rope_layout, got.metadata.fingerprint) == (0.5, "half", None)


@pytest.mark.parametrize(
    ("tensors", "metadata", "error", "message"),
    [
        ({}, {"sm_scale": None}, ValueError, "sm_scale"),
        ({}, {"sm_scale": "-1"}, ValueError, "sm_scale"),
        ({}, {"rope_layout": "spiral"}, ValueError, "rope_layout"),
        ({}, {"logits_soft_cap": "-2"}, ValueError, "logits_soft_cap"),
        ({}, {"window_left": "1,2,3"}, ValueError, "window_left: got 3 numbers"),
        ({}, {"window_left": "wide"}, ValueError, "window_left: got 'wide'"),
        ({"layers.1.k": None}, {}, ValueError, r"layers\.1\.k: got no such tensor"),
        ({"layers.0.k": None, "layers.1.k": None}, {}, ValueError, r"layers\.0\.k: got no such tensor"),
        ({"layers.1.v": None}, {}, ValueError, r"layers\.1\.v: got no such tensor"),
        ({"layers.0.q": torch.zeros(5, 3, 8)}, {}, ValueError, r"layers\.0\.q: got 3 heads"),
        ({"layers.0.q": torch.zeros(11, 2, 8)}, {}, ValueError, r"layers\.0\.q: got 11 query rows"),
        ({"layers.0.q": torch.zeros(4, 2, 6)}, {}, ValueError, r"layers\.0\.q: got shape"),
        ({"layers.0.k": torch.zeros(10, 2, 8, dtype=torch.float64)}, {}, TypeError, r"layers\.0\.k: got dtype"),
        ({"layers.0.v": torch.zeros(10, 2, 8, dtype=torch.float16)}, {}, TypeError, r"layers\.0\.v: got dtype"),
        ({"layers.0.sinks": torch.zeros(3)}, {}, ValueError, r"layers\.0\.sinks: got shape"),
        ({"layers.0.q": torch.zeros(3, 2, 8)}, {}, ValueError, r"layers: got \(tokens, steps\)"),
    ],
)
def test_bad_file_is_refused_by_name(
    tensors: dict[str, torch.Tensor | None],
    metadata: dict[str, str | None],
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    captured(tokens=10, steps=4, heads=2, d=8).save(tmp_path / "good.safetensors")
    merged = load_file(tmp_path / "good.safetensors") | tensors
    fields = {"sm_scale": "0.5"} | metadata
    save_file(
        {name: tensor for name, tensor in merged.items() if tensor is not None},
        tmp_path / "bad.safetensors",
        metadata={name: value for name, value in fields.items() if value is not None},
    )
    with pytest.raises(error, match=message):
        Captured.load(tmp_path / "bad.safetensors")


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Captured.load(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("not tensors")
    with pytest.raises(OSError, match="not a safetensors file"):
        Captured.load(tmp_path / "text.safetensors")
