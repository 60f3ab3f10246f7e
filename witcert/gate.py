"""The gate: pages are made exact until no kv head's certificate is above τ (paper sections 5 and 6.3.5).

Certified for τ < 1, where it looks at the meter; risk-ranked for τ ≥ 1, where the meter is saturated: there
``risk = log A`` is compared with the paper's scale, ½ (A² − 1) > τ.
"""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor

from witcert_kernels import Certificate

from .read import Read, Reading
from .transfer import to_device

MEASURES = ("meter", "eform", "risk", "value_error", "compressed")


def over(certificate: Certificate, tau: float, kv_heads: int) -> Tensor:
    """Which kv heads have a query head above τ, bool ``[rows, kv_heads]``. A NaN counts as above."""
    within = certificate.meter <= tau if tau < 1 else certificate.risk <= 0.5 * math.log1p(2 * tau)
    return ~within.unflatten(1, (kv_heads, -1)).all(-1)


def next_pages(shares: Tensor, repairable: Tensor, hot: Tensor) -> Tensor:
    """The pages of one round: a quarter of what is left in each hot kv head, largest share of A − 1 first.

    Args:
        shares: float32 ``[b, kv_heads, pages]``.
        repairable: bool of that shape, pages that are attended to and compressed.
        hot: bool ``[b, kv_heads]``.

    Returns:
        bool ``[b, kv_heads, pages]``.
    """
    order = shares.masked_fill(~repairable, -1.0).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)
    quota = (repairable.sum(-1) + 3) // 4
    return repairable & (rank < quota[..., None]) & hot[..., None]


def read_gated(read: Read, tau: float) -> Reading:
    """Decode, repair and decode again until no kv head is above τ, or all pages that its row attends to are exact.

    A token whose key is not finite stays so when its page is exact: such a row ends with all its pages exact.
    """
    out, lse, certificate = read.run()
    meter_before, compressed_before = certificate.meter, certificate.compressed
    store = read.store
    kv_heads = store.pool.layout.kv_heads
    repaired = torch.zeros(len(read.q), kv_heads, dtype=torch.int64, device=read.q.device)
    readable = read.readable_pages()[:, None, :].expand(-1, kv_heads, -1)
    hot = over(certificate, tau, kv_heads)
    shares = torch.zeros(readable.shape, dtype=torch.float32, device=read.q.device)
    if bool(hot.any()):  # asked for only where they are needed: on a GPU torch's own ops, not the kernels, find them
        rows = hot.any(1).nonzero()[:, 0]
        shares = shares.index_copy(0, rows, read.only(rows.tolist()).run(return_shares=True)[2].shares)
    while bool(hot.any()):
        exact = read.exact_pages()
        chosen = next_pages(shares, readable if exact is None else readable & (exact < 0), hot)
        rows = chosen.any(-1).any(-1).nonzero()[:, 0]
        if not len(rows):
            break
        whole = torch.zeros(len(store.lengths), *chosen.shape[1:], dtype=torch.bool, device=chosen.device)
        whole[to_device(read.sequences, chosen.device)] = chosen
        store.repair(whole)
        repaired += chosen.sum(-1)
        new_out, new_lse, new = read.only(rows.tolist()).run(return_shares=True)
        out, lse = out.index_copy(0, rows, new_out), lse.index_copy(0, rows, new_lse)
        certificate = _merge(certificate, new, rows)
        shares = shares.index_copy(0, rows, new.shares)
        hot = torch.zeros_like(hot).index_copy(0, rows, over(new, tau, kv_heads))
    return Reading(out, lse, certificate, meter_before, compressed_before, repaired)


def _merge(old: Certificate, new: Certificate, rows: Tensor) -> Certificate:
    values = {f.name: getattr(old, f.name) for f in fields(Certificate)}
    for name in MEASURES:
        values[name] = values[name].index_copy(0, rows, getattr(new, name))
    return Certificate(**values)
