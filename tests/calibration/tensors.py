"""Synthetic captures: keys with an offset, channels of unlike ranges, queries that keep to a few directions."""

from __future__ import annotations

from typing import Any

import torch

from witcert.capture import Captured, CapturedLayer, CaptureMetadata
from witcert_kernels.layout import rope_pairs

torch.set_num_threads(1)


def captured(
    *,
    layers: int = 2,
    tokens: int = 150,
    steps: int = 20,
    heads: int = 4,
    kv_heads: int = 2,
    d: int = 16,
    d_v: int = 8,
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    windows: tuple[int, ...] = (-1, -1),
    seed: int = 0,
    **metadata: Any,
) -> Captured:
    """Random tensors of these shapes."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for n in range(layers):
        ranges = torch.randn(kv_heads, d, generator=g).exp()
        k = torch.randn(tokens, kv_heads, d, generator=g) * ranges + 3 * torch.randn(kv_heads, d, generator=g)
        away = torch.randn(1, heads, d, generator=g)
        q = (2 * away + torch.randn(steps, heads, d, generator=g)) / (
            1 + ranges.repeat_interleave(heads // kv_heads, 0)
        )
        v = torch.randn(tokens, kv_heads, d_v, generator=g)
        out.append(
            CapturedLayer(
                q.to(dtype),
                k.to(dtype),
                v.to(dtype),
                torch.randn(heads, generator=g) if sinks else None,
                windows[n % len(windows)],
            )
        )
    return Captured(out, CaptureMetadata(**({"sm_scale": d**-0.5, "model": "random"} | metadata)))


def with_outlier_pair(capture: Captured, pair: int, factor: float = 40.0) -> Captured:
    """The same tensors with the keys of one RoPE pair made this much larger."""
    meta = capture.metadata
    layers = []
    for layer in capture.layers:
        k = layer.k.clone()
        k[..., rope_pairs(k.shape[-1], meta.rope_layout, meta.rotary_dim)[pair]] *= factor
        layers.append(CapturedLayer(layer.q, k, layer.v))
    return Captured(layers, meta)
