"""What a model's configuration and a calibration say about a cache's layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers import PreTrainedConfig

from witcert_kernels import LayerCalibration

if TYPE_CHECKING:
    from .calibration import Calibration

CalibrationLike: TypeAlias = "str | Path | Calibration | Sequence[LayerCalibration]"

LAYER_TYPES = ("full_attention", "sliding_attention")


def windows(config: PreTrainedConfig) -> list[int | None]:
    """Positions of each layer's sliding window, None for full attention.

    Raises:
        TypeError: not a configuration.
        ValueError: layers that a compressed store of keys and values cannot serve, with the reason.
    """
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config: got {type(config).__name__}, wants a PreTrainedConfig")
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
    calibration: CalibrationLike | None, config: PreTrainedConfig, layers: int
) -> tuple[list[LayerCalibration] | None, dict[str, Any]]:
    """A calibration for each layer, and the layout options that go with them.

    Raises:
        OSError: no such file.
        TypeError, ValueError: not a calibration, or one of another model, by name.
    """
    from .calibration import Calibration, default

    if calibration is None:
        return None, {}
    if isinstance(calibration, str | Path):
        calibration = default() if calibration == "default" else Calibration.load(calibration)
    options = {}
    if isinstance(calibration, Calibration):
        calibration.check(config)
        options = {"sketch": calibration.metadata.sketch, "witness_bands": calibration.metadata.witness_bands}
    given = calibration.fitted if isinstance(calibration, Calibration) else calibration
    if not isinstance(given, list | tuple) or not all(isinstance(layer, LayerCalibration) for layer in given):
        raise TypeError("calibration: wants a file, a Calibration, or a LayerCalibration for each layer")
    found = list(given)
    if len(found) != layers:
        raise ValueError(f"calibration: got {len(found)} layers, wants the model's {layers}")
    first = found[0]
    shared = {"bypass": first.bypass.shape[1], "rope_layout": first.rope_layout, "rotary_dim": first.rotary_dim}
    return found, {"sketch": first.u.shape[1]} | options | shared
