"""An oracle for the op: one row, one head, one token at a time, float64, from the stored bytes alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from witcert_kernels import LayerCalibration, PackedPool, StoreLayout, quantize_
from witcert_kernels.philox import dither


@dataclass
class Case:
    """A filled pool and the exact tokens behind it."""

    pool: PackedPool
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    heads: int


def random_calibration(
    generator: torch.Generator, kv_heads: int, head_dim: int, sketch: int, bypass: int, layout: str = "half"
) -> LayerCalibration:
    """A calibration with every part of it at work."""
    half = head_dim // 2
    pairs = torch.stack([torch.randperm(half, generator=generator)[:bypass] for _ in range(kv_heads)])
    mask = LayerCalibration.identity(kv_heads, head_dim, bypass=pairs, rope_layout=layout).bypass_mask
    f = torch.rand(kv_heads, half, generator=generator) + 0.5
    f = torch.cat([f, f], 1) if layout == "half" else f.repeat_interleave(2, 1)
    mu = torch.randn(kv_heads, head_dim, generator=generator)
    u = torch.randn(kv_heads, sketch, head_dim, generator=generator).masked_fill(mask[:, None], 0.0)
    u = torch.nn.functional.normalize(u, dim=-1)
    return LayerCalibration(mu.masked_fill(mask, 0.0), f.masked_fill(mask, 1.0), u, pairs, rope_layout=layout)


def make_case(
    seed: int,
    layout: StoreLayout,
    lengths: list[int],
    heads: int,
    calibrated: bool = True,
    scale: float = 2.0,
) -> Case:
    """Random keys with outlier channels and a massive first token, written page by shuffled page."""
    g = torch.Generator().manual_seed(seed)
    pages = [-(-length // layout.page_size) for length in lengths]
    spare = 3
    calibration = (
        random_calibration(g, layout.kv_heads, layout.head_dim, layout.sketch, layout.bypass, layout.rope_layout)
        if calibrated
        else None
    )
    pool = PackedPool(
        layout, sum(pages) + spare, layer=5, calibration=calibration, seed=2**63 + 12345 if layout.dither else None
    )
    for name in ("k_scale", "v_scale"):
        getattr(pool, name).fill_(float("nan"))
    order = torch.randperm(sum(pages) + spare, generator=g)
    table = torch.full((len(lengths), max([*pages, 1])), -1, dtype=torch.int32)
    keys, values, used = [], [], 0
    for b, length in enumerate(lengths):
        k = torch.randn(length, layout.kv_heads, layout.head_dim, generator=g) * scale
        k[:, :, 3] *= 6
        k[:1] *= 5
        v = torch.randn(length, layout.kv_heads, layout.head_dim_v, generator=g)
        k, v = k.to(layout.dtype), v.to(layout.dtype)
        mine = order[used : used + pages[b]]
        used += pages[b]
        table[b, : pages[b]] = mine
        position = torch.arange(length)
        slots = mine[position // layout.page_size] * layout.page_size + position % layout.page_size
        quantize_(k, v, pool, slots, position)
        keys.append(k)
        values.append(v)
    return Case(pool, table, torch.tensor(lengths, dtype=torch.int32), keys, values, heads)


def stored_keys(case: Case, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the store says of sequence b in equalised coordinates: ``x_hat``, sketch coordinates p, steps (float64)."""
    pool, layout = case.pool, case.pool.layout
    length = int(case.seq_lens[b])
    token = torch.arange(length)
    page, offset = case.page_table[b, token // layout.page_size].long(), token % layout.page_size
    steps = pool.k_scale[page, offset].double().repeat_interleave(layout.head_dim // layout.groups, -1)
    codes = pool.k_codes[page, offset].double()
    if layout.dither:
        xi = dither(pool.seed, pool.layer, layout.kv_heads, token // layout.dither_period, layout.head_dim)
        codes = codes - xi.double()
    x_hat = torch.where(steps.isfinite(), codes * torch.where(steps.isfinite(), steps, 0.0), 0.0)
    x_hat[pool.calibration.bypass_mask.expand_as(x_hat)] = 0.0
    unit = torch.einsum("krd,tkd->tkr", pool.calibration.u.double().abs(), steps) / 254
    p = pool.sketch[page, offset].double() * unit
    return x_hat.numpy(), p.numpy(), steps.numpy()


def stored_logits(case: Case, b: int, q: torch.Tensor, sm_scale: float) -> np.ndarray:
    """y before soft cap and bias, float64 ``[heads, tokens]``, of one query row ``[heads, d]``."""
    pool, calibration = case.pool, case.pool.calibration
    per_head = case.heads // pool.layout.kv_heads
    x_hat, p, _ = stored_keys(case, b)
    mask = calibration.bypass_mask.numpy()
    mu, f, u = (t.double().numpy() for t in (calibration.mu, calibration.f, calibration.u))
    rows = []
    for head in range(case.heads):
        kv = head // per_head
        query = q[head].double().numpy()
        z = np.where(mask[kv], 0.0, query * f[kv])
        a = (u[kv] @ z).astype(np.float32).astype(np.float64)
        kept = case.keys[b][:, kv].double().numpy() @ np.where(mask[kv], query, 0.0)
        rows.append(sm_scale * (x_hat[:, kv] @ z - p[:, kv] @ a + query @ mu[kv] + kept))
    return np.stack(rows)


def exact_logits(case: Case, b: int, q: torch.Tensor, sm_scale: float) -> np.ndarray:
    """Logits of the exact keys, float64 ``[heads, tokens]``."""
    per_head = case.heads // case.pool.layout.kv_heads
    k = case.keys[b].double().repeat_interleave(per_head, 1)
    return (sm_scale * torch.einsum("hd,thd->ht", q.double(), k)).numpy()


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis; zeros for a row of −Inf only."""
    top = x.max(-1, keepdims=True)
    e = np.exp(x - np.where(np.isinf(top), 0.0, top))
    total = e.sum(-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)
