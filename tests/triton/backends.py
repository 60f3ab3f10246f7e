"""One case on both paths: the vectorised torch path on CPU tensors, and Triton on a CUDA device or interpreted."""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.kernels.oracle import Case, stored_keys
from witcert_kernels import Certificate, ExactPages, ObservatoryPool, PackedPool, certified_decode
from witcert_kernels.philox import GRID_STEP

Pool = PackedPool | ObservatoryPool
Result = tuple[torch.Tensor, torch.Tensor, Certificate]
CUDA = torch.cuda.is_available()
# one for each use: a patch that is entered again inside itself would leave the environment changed
on_cpu = partial(mock.patch.dict, os.environ, {"WITCERT_BACKEND": "torch"})
on_triton = partial(mock.patch.dict, os.environ, {"WITCERT_BACKEND": "triton"})


def to_device(pool: Pool) -> Pool:
    """The pool where Triton runs."""
    if not CUDA:
        return pool
    moved = copy.copy(pool)
    for name in (*pool.page_tensors, "bypass_channels", "band_of_channel"):
        if hasattr(pool, name):
            setattr(moved, name, getattr(pool, name).cuda())
    moved.calibration = pool.calibration.to("cuda")
    moved.exact = ExactPages(pool.layout, 0)
    moved.exact.k, moved.exact.v = pool.exact.k.cuda(), pool.exact.v.cuda()
    return moved


def _move(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def decode_triton(q: torch.Tensor, pool: Pool, *args: Any, **options: Any) -> Result:
    """``certified_decode`` by the Triton kernels, results on the CPU."""
    device = "cuda" if CUDA else "cpu"
    with on_triton():
        out, lse, cert = certified_decode(
            q.to(device),
            to_device(pool),
            *(_move(x, device) for x in args),
            **{name: _move(x, device) for name, x in options.items()},
        )
    fields = {name: _move(x, "cpu") for name, x in vars(cert).items()}
    return out.cpu(), lse.cpu(), Certificate(**fields)


def decode_torch(q: torch.Tensor, pool: Pool, *args: Any, **options: Any) -> Result:
    """``certified_decode`` by the torch path on CPU tensors."""
    with on_cpu():
        return certified_decode(q, pool, *args, **options)


def stored_bounds(case: Case, b: int, q: torch.Tensor, sm_scale: float, delta_local: float = 0.0) -> np.ndarray:
    """c, the bound on a logit's error, from the stored bytes, float64 ``[heads, tokens]``, no rounding allowed for."""
    pool, calibration = case.pool, case.pool.calibration
    per_head = case.heads // pool.layout.kv_heads
    steps = torch.from_numpy(stored_keys(case, b)[2])
    token = torch.arange(len(steps))
    page, offset = case.page_table[b, token // pool.layout.page_size].long(), token % pool.layout.page_size
    rows = []
    for head in range(case.heads):
        kv = head // per_head
        s, u = steps[:, kv], calibration.u[kv].double()
        z = (q[head].double() * calibration.f[kv].double()).masked_fill(calibration.bypass_mask[kv], 0.0)
        a = (u @ z).float().double()
        w = (z - a @ u).masked_fill(calibration.bypass_mask[kv], 0.0)
        c = s @ w.abs() / 2
        if pool.layout.witness_bands:
            total = torch.zeros(len(s), dtype=torch.float64)
            for band in range(pool.layout.witness_bands):
                inside = pool.band_of_channel == band
                unit = s[:, inside].square().sum(-1).sqrt() / 508
                total += w[inside].norm() * unit * pool.witness[page, offset, kv, band].double()
            c = torch.minimum(c, total)
        if delta_local:
            level = 2 * np.log(2 * len(s) / delta_local)
            c = torch.minimum(c, (level * (s * w).square().sum(-1) / 12).sqrt() + s @ w.abs() / 2 * GRID_STEP)
        rows.append(sm_scale * (c + (s @ u.abs().T / 254) @ a.abs() / 2))
    return torch.stack(rows).numpy()


def slack(case: Case, b: int, q: torch.Tensor, sm_scale: float) -> np.ndarray:
    """The largest rounding allowance that interfaces.md section 7 grants a float32 implementation, ``[heads]``."""
    keys = case.keys[b].double().abs().amax(0).repeat_interleave(case.heads // case.pool.layout.kv_heads, 0)
    top = (q.double().abs() * keys.amax(-1, keepdim=True)).sum(-1)
    return (8 * (q.shape[-1] + 16) * 2.0**-24 * sm_scale * top + 1e-5).numpy()
