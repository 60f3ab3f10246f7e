"""What a model's configuration and a calibration say about a cache's layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from witcert_kernels import LayerCalibration

if TYPE_CHECKING:
    from .calibration import Calibration

LAYER_TYPES = ("full_attention", "sliding_attention")


def windows(config: PreTrainedConfig) -> list[int | None]:
    """Positions of each layer's sliding window, None for full attention.

    Raises:
        ValueError: layers that a compressed store of keys and values cannot serve, with the reason.
    """
    text: Any = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise ValueError("config: got an encoder-decoder model, wants a decoder: cross-attention is not causal")
    if getattr(text, "num_kv_shared_layers", None) or "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
        raise ValueError("config: got layers that share keys and values, wants each layer to have its own")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False):
        raise ValueError("config: got bidirectional attention, wants causal attention")
    window, types = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if types is None:
        if getattr(text, "attention_chunk_size", None) is not None:
            raise ValueError("config: got chunked attention, wants full or sliding attention")
        types = [LAYER_TYPES[window is not None]] * text.num_hidden_layers
    refused = sorted(set(types) - set(LAYER_TYPES))
    if refused:
        raise ValueError(f"config.layer_types: got {', '.join(refused)}, wants {' or '.join(LAYER_TYPES)}")
    return [window if kind == "sliding_attention" else None for kind in types]


def layer_calibrations(
    calibration: str | Path | Calibration | Sequence[LayerCalibration] | None, layers: int
) -> tuple[list[LayerCalibration] | None, dict[str, Any]]:
    """A calibration for each layer, and the layout options that go with them; ``"default"`` is the shipped one.

    Raises:
        TypeError, ValueError: not a calibration, or one of another number of layers.
    """
    if calibration is None:
        return None, {}
    options: dict[str, Any] = {}
    if isinstance(calibration, Sequence) and not isinstance(calibration, str):
        found = list(calibration)
    else:
        if isinstance(calibration, str | Path):
            from .calibration import Calibration, default

            calibration = default() if calibration == "default" else Calibration.load(calibration)
        found = list(calibration.layers)
        bands = getattr(calibration.metadata, "witness_bands", None)
        options = {} if bands is None else {"witness_bands": bands}
    if not all(isinstance(layer, LayerCalibration) for layer in found):
        raise TypeError("calibration: wants a file, a Calibration, or a LayerCalibration for each layer")
    if len(found) != layers:
        raise ValueError(f"calibration: got {len(found)} layers, wants the model's {layers}")
    first = found[0]
    options |= {"sketch": first.u.shape[1], "bypass": first.bypass.shape[1]}
    options |= {"rope_layout": first.rope_layout, "rotary_dim": first.rotary_dim}
    return found, options
