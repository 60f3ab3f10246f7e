"""Captured tensors: what a model's attention computes with, recorded in one forward pass and kept in one file."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from witcert_kernels.checks import check_integer, check_tensor
from witcert_kernels.layout import MODEL_DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Progress = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and of how much."""

ATTENTION = "witcert_capture"
SAMPLE = 1024


class ModelFingerprint(BaseModel):
    """What a model must share with the one that some tensors or a calibration came from.

    ``rotary_dim`` is None where all channels rotate; ``dtype`` is a torch name; ``weights`` is the SHA-256 over the
    names, shapes and an even sample of about 1024 elements of every parameter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    rope_layout: Literal["half", "interleaved"]
    rotary_dim: int | None
    dtype: str
    weights: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFingerprint:
        """The fingerprint of a loaded transformers model."""
        rope_layout, rotary_dim = rope_of(model)
        return cls(
            **shapes_of(model.config),
            rope_layout=rope_layout,
            rotary_dim=rotary_dim,
            dtype=str(model.dtype).removeprefix("torch."),
            weights=weights_hash(model),
        )


def shapes_of(config: PreTrainedConfig) -> dict[str, int]:
    """``layers, heads, kv_heads, head_dim, head_dim_v`` of a transformers configuration."""
    text: Any = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    nope = getattr(text, "qk_nope_head_dim", None)
    if nope is not None:  # latent attention: its head_dim is the rotary part
        head_dim = nope + text.qk_rope_head_dim
    return {
        "layers": text.num_hidden_layers,
        "heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "head_dim_v": getattr(text, "v_head_dim", None) or head_dim,
    }


def rope_of(model: PreTrainedModel) -> tuple[Literal["half", "interleaved"], int | None]:
    """How a model pairs its rotary channels, asked of its own ``rotate_half``, and how many rotate (None: all)."""
    text: Any = model.config.get_text_config(decoder=True)
    head_dim = shapes_of(model.config)["head_dim"]
    rope = getattr(text, "rope_parameters", None) or {}
    factor = rope.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1.0
    rotary = getattr(text, "rotary_dim", None) or int(head_dim * factor)
    layout: Literal["half", "interleaved"] = "half"
    for module in model.modules():
        source = sys.modules[type(module).__module__]
        rotate = getattr(source, "rotate_half", None) or getattr(source, "rotate_every_two", None)
        if hasattr(module, "layer_idx") and rotate is not None:
            partner = -int(rotate(torch.arange(8.0).view(1, 1, 1, 8))[..., 0])
            layout = "interleaved" if partner == 1 else "half"
            break
    return layout, rotary if 0 < rotary < head_dim else None


def weights_hash(model: PreTrainedModel) -> str:
    """SHA-256 as :class:`ModelFingerprint` describes it, hexadecimal."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE)].cpu().contiguous()
        digest.update(f"{name} {list(parameter.shape)} ".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def traits(model: PreTrainedModel | PreTrainedConfig | Captured | ModelFingerprint) -> dict[str, Any]:
    """The fields of :class:`ModelFingerprint` that the argument tells: a configuration has no weights, say."""
    if isinstance(model, ModelFingerprint):
        return model.model_dump()
    if isinstance(model, Captured):
        if model.metadata.fingerprint is not None:
            return model.metadata.fingerprint.model_dump()
        layer = model.layers[0]
        return {
            "layers": len(model.layers),
            "heads": layer.q.shape[1],
            "kv_heads": layer.k.shape[1],
            "head_dim": layer.k.shape[2],
            "head_dim_v": layer.v.shape[2],
            "rope_layout": model.metadata.rope_layout,
            "rotary_dim": model.metadata.rotary_dim,
            "dtype": str(layer.k.dtype).removeprefix("torch."),
        }
    if isinstance(model, torch.nn.Module):
        return ModelFingerprint.of(model).model_dump()
    return dict(shapes_of(model))


class CaptureMetadata(BaseModel):
    """What the tensors of a capture do not say. ``fingerprint`` is None in files that another engine wrote."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sm_scale: float = Field(gt=0, le=1e6)
    rope_layout: Literal["half", "interleaved"] = "half"
    rotary_dim: int | None = None
    logits_soft_cap: float = Field(default=0.0, ge=0, le=1e6)
    model: str = ""
    fingerprint: ModelFingerprint | None = None


@dataclass(frozen=True)
class CapturedLayer:
    """One layer's attention inputs, after RoPE, all of one model dtype.

    q ``[steps, heads, d]``, k ``[tokens, kv_heads, d]``, v ``[tokens, kv_heads, d_v]``; query row i attends to the
    first ``tokens - steps + 1 + i`` tokens, ``window_left`` tokens before its own at most (-1: no window), and to a
    sink with logit ``sinks`` ``[heads]`` if there is one.

    Raises:
        TypeError, ValueError: a wrong dtype or shape, by the tensor's name.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    window_left: int = -1
    name: str = "layer"

    def __post_init__(self) -> None:
        check_tensor(f"{self.name}.k", self.k, (None, None, None), MODEL_DTYPES)
        tokens, kv_heads, head_dim = self.k.shape
        check_tensor(f"{self.name}.v", self.v, (tokens, kv_heads, None), self.k.dtype)
        check_tensor(f"{self.name}.q", self.q, (None, None, head_dim), self.k.dtype)
        steps, heads, _ = self.q.shape
        if not 1 <= steps <= tokens:
            raise ValueError(f"{self.name}.q: got {steps} query rows, wants 1 to the {tokens} tokens of k")
        if kv_heads == 0 or heads == 0 or heads % kv_heads:
            raise ValueError(f"{self.name}.q: got {heads} heads, wants a multiple of the {kv_heads} kv heads of k")
        if self.sinks is not None:
            check_tensor(f"{self.name}.sinks", self.sinks, (heads,), MODEL_DTYPES)
        check_integer("window_left", self.window_left, -1)


@dataclass(frozen=True)
class Captured:
    """Captured tensors of all layers: of one text, so of as many tokens and query rows each.

    Raises:
        ValueError: no layer, or layers of different lengths.
    """

    layers: list[CapturedLayer]
    metadata: CaptureMetadata

    def __post_init__(self) -> None:
        lengths = {(len(layer.k), len(layer.q)) for layer in self.layers}
        if len(lengths) != 1:
            raise ValueError(f"layers: got (tokens, steps) = {sorted(lengths)}, wants one pair for all layers")

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: ``layers.N.q``, ``.k``, ``.v``, optional ``.sinks``, and the metadata."""
        tensors = {}
        for n, layer in enumerate(self.layers):
            for name in ("q", "k", "v", "sinks"):
                tensor = getattr(layer, name)
                if tensor is not None:
                    tensors[f"layers.{n}.{name}"] = tensor.contiguous()
        metadata = {"window_left": ",".join(str(layer.window_left) for layer in self.layers)}
        for name, value in self.metadata:
            if value is not None:
                metadata[name] = value.model_dump_json() if isinstance(value, BaseModel) else str(value)
        write_safetensors(tensors, path, metadata)

    @classmethod
    def load(cls, path: str | Path) -> Captured:
        """Read a file, ours or another engine's.

        Raises:
            OSError: no such file, or not safetensors.
            TypeError, ValueError: a tensor or a metadata field that is missing or wrong, by name.
        """
        metadata, tensors = read_safetensors(path)
        windows = metadata.pop("window_left", "-1").split(",")
        known = {name: metadata[name] for name in CaptureMetadata.model_fields if name in metadata}
        layers = layer_count(tensors, ("q", "k", "v"))
        if len(windows) not in (1, layers):
            raise ValueError(f"window_left: got {len(windows)} numbers, wants one, or one for each of {layers} layers")
        if len(windows) == 1:
            windows = windows * layers
        out = []
        for n in range(layers):
            parts = {name: tensors.get(f"layers.{n}.{name}") for name in ("q", "k", "v", "sinks")}
            try:
                window = int(windows[n])
            except ValueError:
                raise ValueError(f"window_left: got {windows[n]!r}, wants an integer") from None
            out.append(CapturedLayer(**parts, window_left=window, name=f"layers.{n}"))  # type: ignore[arg-type]
        values: dict[str, Any] = dict(known)
        if "fingerprint" in known:
            values["fingerprint"] = ModelFingerprint.model_validate_json(known["fingerprint"])
        return cls(out, CaptureMetadata.model_validate(values))


def read_safetensors(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file. Raises OSError where it cannot be read as one."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except Exception as error:
        raise OSError(f"{path}: not a safetensors file ({error})") from error


def write_safetensors(tensors: dict[str, Tensor], path: str | Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file. Raises OSError where that is not possible."""
    Path(path).write_bytes(save(tensors, metadata=metadata))  # save_file would make a file that only its owner reads


def layer_count(tensors: dict[str, Tensor], parts: tuple[str, ...]) -> int:
    """Layers of a file of ``layers.N.part`` tensors. Raises ValueError unless each N from 0 on has all ``parts``."""
    found = [re.match(r"layers\.(\d+)\.", name) for name in tensors]
    count = max((int(match[1]) + 1 for match in found if match), default=1)
    for name in (f"layers.{n}.{part}" for n in range(count) for part in parts):
        if name not in tensors:
            raise ValueError(f"{name}: got no such tensor, wants one for each layer from 0 to {count - 1}")
    return count


class _Recorder:
    """The attention function of a capture: keeps each layer's inputs and answers with exact attention."""

    def __init__(self, steps: int, layers: int, progress: Progress | None) -> None:
        self.steps, self.expected, self.progress = steps, layers, progress
        self.layers: dict[int, CapturedLayer] = {}
        self.scalars: set[tuple[float, float]] = set()

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        n = module.layer_idx
        if n in self.layers or key.shape[2] != query.shape[2] or not getattr(module, "is_causal", True):
            raise ValueError(f"model: layer {n} is not causal self-attention over the text, which capture wants")
        if kwargs.get("position_bias") is not None:
            raise ValueError(f"model: layer {n} adds a position bias, which captured tensors cannot say")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        cap = float(softcap or 0.0)
        q, k, v = (t[0].transpose(0, 1).detach() for t in (query, key, value))
        self.layers[n] = CapturedLayer(
            q=q[-self.steps :].cpu().clone(),
            k=k.cpu().clone(),
            v=v.cpu().clone(),
            sinks=None if s_aux is None else s_aux.detach().reshape(-1).cpu().clone(),
            window_left=_window_left(attention_mask, self.steps, n),
            name=f"layers.{n}",
        )
        self.scalars.add((scale, cap))
        if self.progress is not None:
            self.progress("capture", len(self.layers), self.expected)
        if cap or s_aux is not None:
            return _dense(query, key, value, attention_mask, scale, cap, s_aux), None
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)


def _allowed(mask: Tensor | None, start: int, stop: int, device: torch.device, tokens: int) -> Tensor:
    """Rows ``start … stop`` of a mask as bool ``[rows, tokens]``; None is causal."""
    if mask is None:
        return torch.arange(tokens, device=device) <= torch.arange(start, stop, device=device)[:, None]
    rows = mask[0, 0, start:stop, :tokens]
    return rows if rows.dtype == torch.bool else rows == 0


def _window_left(mask: Tensor | None, steps: int, layer: int) -> int:
    """The window that a mask's last rows show, -1 for none."""
    if mask is None:
        return -1
    tokens = mask.shape[2]
    rows = _allowed(mask, tokens - steps, tokens, mask.device, tokens)
    token, position = (torch.arange(t, tokens, device=mask.device) for t in (0, tokens - steps))
    window = int(rows[-1].sum()) - 1
    wanted = (token <= position[:, None]) & (token >= position[:, None] - window)
    if not torch.equal(rows, wanted):
        raise ValueError(f"model: layer {layer} masks neither causally nor with a sliding window, which capture wants")
    return window if window < tokens - 1 else -1


def _dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    """Attention with a soft cap or sinks, which SDPA lacks: ``[batch, heads, n, d]`` to ``[batch, n, heads, d_v]``."""
    tokens, groups = q.shape[2], q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(groups, 1).float() for t in (k, v))
    out = []
    for start in range(0, tokens, 256):
        stop = min(start + 256, tokens)
        x = q[:, :, start:stop].float() @ keys.transpose(2, 3) * scale
        x = cap * (x / cap).tanh() if cap else x
        x = x.masked_fill(~_allowed(mask, start, stop, q.device, tokens), float("-inf"))
        if sinks is not None:
            x = torch.cat([x, sinks.float().view(1, -1, 1, 1).expand(len(x), -1, stop - start, 1)], -1)
        out.append(x.softmax(-1)[..., :tokens] @ values)
    return torch.cat(out, 2).to(q.dtype).transpose(1, 2).contiguous()


_recorder: ContextVar[_Recorder] = ContextVar("witcert_capture")


def _attend(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _recorder.get()(*args, **kwargs)


def capture(
    model: PreTrainedModel, input_ids: Tensor, *, steps: int | None = None, progress: Progress | None = None
) -> Captured:
    """Run a text through a model once and keep what its attention read.

    Args:
        model: any local transformers model whose layers all are causal self-attention behind ``AttentionInterface``.
        input_ids: int64 ``[tokens]``.
        steps: query rows to keep, the last ones; None for all.
        progress: called with ``"capture"``, layers done and layers of the model.

    Raises:
        TypeError, ValueError: an argument of a wrong shape or range, or a model of another kind, by name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    check_tensor("input_ids", input_ids, (None,), torch.int64)
    tokens = len(input_ids)
    check_integer("steps", tokens if steps is None else steps, 1, tokens)
    text: Any = model.config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise ValueError(f"input_ids: got {tokens} tokens, wants at most the model's {limit} positions")
    shapes = shapes_of(model.config)
    recorder = _Recorder(tokens if steps is None else steps, shapes["layers"], progress)
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    before = model.config._attn_implementation
    token = _recorder.set(recorder)
    try:
        model.set_attn_implementation(ATTENTION)
        with torch.no_grad():
            model.base_model(input_ids=input_ids[None].to(model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
        _recorder.reset(token)
    if sorted(recorder.layers) != list(range(shapes["layers"])):
        raise ValueError(
            f"model: captured {len(recorder.layers)} of {shapes['layers']} layers, wants all of them, as causal "
            "attention behind transformers' AttentionInterface (linear and hybrid models have other layers)"
        )
    if len(recorder.scalars) != 1:
        raise ValueError(f"model: its layers have {len(recorder.scalars)} scales or soft caps, wants one")
    (scale, cap), fingerprint = recorder.scalars.pop(), ModelFingerprint.of(model)
    return Captured(
        [recorder.layers[n] for n in range(shapes["layers"])],
        CaptureMetadata(
            sm_scale=scale,
            rope_layout=fingerprint.rope_layout,
            rotary_dim=fingerprint.rotary_dim,
            logits_soft_cap=cap,
            model=str(model.config._name_or_path),
            fingerprint=fingerprint,
        ),
    )
