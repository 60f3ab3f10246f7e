"""The true total variation of a read, for measurement only: dequantises the store and needs the exact keys.

It is what the meter bounds: attention over the exact keys against attention over what is stored, both in real
arithmetic up to float64's rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from witcert_kernels import ObservatoryPool, PackedPool
from witcert_kernels.philox import dither

from .read import Read
from .store import LayerStore

if TYPE_CHECKING:
    from .report import StepRecord


def true_tv(record: StepRecord) -> Tensor:
    """Total variation between exact and stored attention of each query row and head, float64 ``[rows, heads]``.

    Call it from ``WitCertCache.observer``, while the store is as it was read. NaN where a key or a query is not finite.

    Raises:
        ValueError: the cache keeps no exact keys.
    """
    if record.read.store.backing is None:
        raise ValueError("backing: got a cache without exact keys, wants WitCertCache(…, backing=True)")
    return read_tv(record.read)


def read_tv(read: Read) -> Tensor:
    """As :func:`true_tv`, of a read of any store that keeps exact keys."""
    pairs = [logits(read, i) for i in range(len(read.sequences))]
    return torch.cat([(exact.softmax(-1) - stored.softmax(-1)).abs().sum(-1) / 2 for exact, stored in pairs])


def logits(read: Read, i: int) -> tuple[Tensor, Tensor]:
    """Logits of the exact and of the stored keys for the rows of a read's i-th sequence, which keeps exact keys.

    float64 ``[rows, heads, tokens]``, after the cap, −Inf for tokens that a row does not attend to; a sink comes last.
    """
    store, sequence, length = read.store, read.sequences[i], read.lengths[i]
    rows = slice(i, i + 1) if read.qo_indptr is None else slice(read.qo_indptr[i], read.qo_indptr[i + 1])
    q, layout = read.q[rows].to(torch.float64), store.pool.layout
    scale = layout.head_dim**-0.5 if read.sm_scale is None else read.sm_scale

    def products(keys: Tensor) -> Tensor:
        return scale * torch.einsum("nkgd,tkd->nkgt", q.unflatten(1, (layout.kv_heads, -1)), keys).flatten(1, 2)

    exact, stored = products(exact_keys(store, sequence, length)), stored_logits(store, sequence, length, q, scale)
    first = length - len(q)
    if read.k_new is not None:
        own = products(read.k_new[rows].to(torch.float64))
        exact, stored, first = torch.cat([exact, own], -1), torch.cat([stored, own], -1), length
    position = torch.arange(first, first + len(q), device=q.device)[:, None]
    token = torch.arange(exact.shape[-1], device=q.device)
    hidden = token > position
    if read.window_left >= 0:
        hidden |= token < position - read.window_left
    return _finished(exact, hidden, read), _finished(stored, hidden, read)


def exact_keys(store: LayerStore, sequence: int, length: int) -> Tensor:
    """The keys that were written, float64 ``[length, kv_heads, head_dim]``, from the backing store."""
    assert store.backing is not None
    return store.backing.k.flatten(0, 1)[_slots(store, sequence, length)].to(torch.float64)


def stored_logits(store: LayerStore, sequence: int, length: int, q: Tensor, sm_scale: float) -> Tensor:
    """Scaled logits of the stored keys before any cap, sketch correction included, float64 ``[rows, heads, length]``.

    q: ``[rows, heads, head_dim]``. Repaired pages are read exactly.
    """
    pool, slots = store.pool, _slots(store, sequence, length)
    kv_heads = pool.layout.kv_heads
    q64 = q.to(torch.float64).unflatten(1, (kv_heads, -1))  # [rows, kv_heads, G, d]
    if isinstance(pool, PackedPool):
        logits = sm_scale * _packed_products(pool, slots, q64)
    else:
        logits = sm_scale * torch.einsum("nkgd,tkd->nkgt", q64, _entries(pool, "k_hat", slots))
    if store.exact_pages is not None:
        page_size = pool.layout.page_size
        position = torch.arange(length, device=q.device)
        slot = store.exact_pages[sequence][:, position // page_size]  # [kv_heads, length]
        exact = pool.exact.k[slot.clamp_min(0).to(torch.int64), position % page_size].to(torch.float64)
        products = sm_scale * torch.einsum("nkgd,ktd->nkgt", q64, exact)
        logits = torch.where((slot >= 0)[None, :, None, :], products, logits)
    return logits.flatten(1, 2)


def _finished(x: Tensor, hidden: Tensor, read: Read) -> Tensor:
    """With cap, mask and sink."""
    if read.logits_soft_cap:
        x = read.logits_soft_cap * (x / read.logits_soft_cap).tanh()
    x = x.masked_fill(hidden[:, None, :], -torch.inf)
    if read.sinks is None:
        return x
    return torch.cat([x, read.sinks.to(torch.float64)[None, :, None].expand(len(x), -1, 1)], -1)


def _slots(store: LayerStore, sequence: int, length: int) -> Tensor:
    position = torch.arange(length, device=store.pool.device)
    return store.slots(torch.full_like(position, sequence), position)


def _entries(pool: PackedPool | ObservatoryPool, name: str, slots: Tensor) -> Tensor:
    entries: Tensor = getattr(pool, name).flatten(0, 1)[slots]
    return entries.to(torch.float64)


def _packed_products(pool: PackedPool, slots: Tensor, q: Tensor) -> Tensor:
    """z·x̂ − Σ aᵢ pᵢ + bypass + q·μ, ``[rows, kv_heads, G, tokens]``; q float64 ``[rows, kv_heads, G, d]``."""
    layout, calibration = pool.layout, pool.calibration
    mu, f, u = (x.to(torch.float64) for x in (calibration.mu, calibration.f, calibration.u))
    steps = _entries(pool, "k_scale", slots).repeat_interleave(layout.head_dim // layout.groups, -1)
    codes = _entries(pool, "k_codes", slots)
    if layout.dither:
        period = torch.arange(len(slots), device=q.device) // layout.dither_period
        xi = dither(pool.seed, pool.layer, layout.kv_heads, period.unique(), layout.head_dim)
        codes = codes - xi[period].to(torch.float64)
    channels = pool.bypass_channels[None, :, None, :].expand(*q.shape[:1], -1, q.shape[2], -1)
    z = (q * f[:, None, :]).scatter(-1, channels, 0.0)
    out = torch.einsum("nkgd,tkd->nkgt", z, steps * codes)
    if layout.sketch:
        a = torch.einsum("nkgd,krd->nkgr", z, u).to(torch.float32).to(torch.float64)  # as the reader rounds it
        unit = torch.einsum("tkd,krd->tkr", steps, u.abs()) / 254
        out = out - torch.einsum("nkgr,tkr->nkgt", a, _entries(pool, "sketch", slots) * unit)
    if layout.bypass:
        out = out + torch.einsum("nkgc,tkc->nkgt", q.gather(-1, channels), _entries(pool, "bypass", slots))
    return out + torch.einsum("nkgd,kd->nkg", q, mu)[..., None]
