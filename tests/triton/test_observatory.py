"""The observatory's Triton read against the torch path and the exact tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.kernels.oracle import random_calibration, softmax
from tests.kernels.test_decode import tv
from witcert_kernels import ExactPages, ObservatoryLayout, ObservatoryPool, observe_

from .backends import Result, decode_torch, decode_triton

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, under the interpreter

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HEADS, KV_HEADS, SM_SCALE = 6, 2, 0.125


@dataclass
class Observed:
    pool: ObservatoryPool
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def observed(layout: ObservatoryLayout, lengths: list[int], noise: float = 0.02) -> Observed:
    """Reconstructions with an error that has a common part, so that a sketch of it helps."""
    g = torch.Generator().manual_seed(1)
    pages = [-(-length // layout.page_size) for length in lengths]
    calibration = random_calibration(g, layout.kv_heads, layout.head_dim, layout.sketch, 0)
    pool = ObservatoryPool(layout, sum(pages) + 1, calibration=calibration)
    for name in ("witness", "v_error", "sketch_scale"):
        getattr(pool, name).fill_(math.nan)
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    order, keys, values = torch.randperm(sum(pages), generator=g), [], []
    for b, length in enumerate(lengths):
        mine, order = order[: pages[b]], order[pages[b] :]
        table[b, : pages[b]] = mine
        k = (2 * torch.randn(length, KV_HEADS, layout.head_dim, generator=g)).to(layout.dtype)
        v = torch.randn(length, KV_HEADS, layout.head_dim_v, generator=g).to(layout.dtype)
        common = torch.randn(1, KV_HEADS, layout.head_dim, generator=g)
        k_hat = k + noise * (torch.randn(k.shape, generator=g) + common)
        v_hat = v + noise * torch.randn(v.shape, generator=g)
        position = torch.arange(length)
        slots = mine[position // layout.page_size] * layout.page_size + position % layout.page_size
        observe_(k, v, k_hat.to(layout.dtype), v_hat.to(layout.dtype), pool, slots)
        keys.append(k)
        values.append(v)
    return Observed(pool, table, torch.tensor(lengths, dtype=torch.int32), keys, values)


def assert_agree(expected: Result, got: Result, meter_room: float) -> None:
    (out, lse, cert), (out_t, lse_t, cert_t) = expected, got
    room = {F32: 1e-5, F16: 4e-3, BF16: 4e-2}[out.dtype]
    torch.testing.assert_close(out_t.float(), out.float(), rtol=room, atol=room)
    torch.testing.assert_close(lse_t, lse, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(cert_t.compressed, cert.compressed, rtol=0, atol=0)
    torch.testing.assert_close(cert_t.risk, cert.risk, rtol=1e-2, atol=meter_room)
    assert bool((cert_t.meter >= cert.meter).all()) and bool((cert_t.meter <= 1.01 * cert.meter + meter_room).all())
    torch.testing.assert_close(cert_t.value_error, cert.value_error, rtol=2e-2, atol=10 * room + 1e-3)


@pytest.mark.parametrize(
    ("dtype", "r", "d", "d_v", "page_size", "cap"),
    [(F32, 0, 64, 48, 16, 0.0), (F32, 3, 64, 64, 256, 5.0), (F16, 2, 80, 64, 4, 0.0), (BF16, 4, 64, 64, 1, 0.0)],
)
def test_agrees_and_is_sound(dtype: torch.dtype, r: int, d: int, d_v: int, page_size: int, cap: float) -> None:
    layout = ObservatoryLayout(KV_HEADS, d, d_v, dtype=dtype, page_size=page_size, witness_bands=4, sketch=r)
    case = observed(layout, [1, 70, 0])
    g = torch.Generator().manual_seed(2)
    q = (torch.randn(3, HEADS, d, generator=g) * torch.tensor([0.1, 1.0, 1.0])[:, None, None]).to(dtype)
    options = {"logits_soft_cap": cap, "sm_scale": SM_SCALE}
    arguments = (case.page_table, case.seq_lens)
    expected = decode_torch(q, case.pool, *arguments, **options)
    got = decode_triton(q, case.pool, *arguments, **options, splits=2)
    assert_agree(expected, got, 1e-4)
    out, _, cert = got
    for b, length in enumerate(case.seq_lens.tolist()):
        if length == 0:
            assert bool((out[b] == 0).all()) and bool((cert.meter[b] == 0).all())
            continue
        token = torch.arange(length)
        page = case.page_table[b, token // page_size].long()
        k_hat = case.pool.k_hat[page, token % page_size].double()
        x, y = (
            (SM_SCALE * torch.einsum("hd,thd->ht", q[b].double(), k.double().repeat_interleave(3, 1))).numpy()
            for k in (case.keys[b], k_hat)
        )
        if cap:
            x, y = cap * np.tanh(x / cap), cap * np.tanh(y / cap)
        assert bool((cert.meter[b].double().numpy() >= tv(x, y)).all())
        v = case.values[b].double().repeat_interleave(3, 1)
        exact = torch.einsum("ht,thd->hd", torch.from_numpy(softmax(x)), v)
        assert bool(((out[b].double() - exact).norm(dim=-1) <= cert.value_error[b]).all())


def test_the_sketch_helps() -> None:
    meters = []
    for r in (0, 4):
        layout = ObservatoryLayout(KV_HEADS, 64, 64, witness_bands=2, sketch=r)
        case = observed(layout, [60], noise=0.2)
        cal = case.pool.calibration
        q = (cal.u.sum(1) / cal.f if r else torch.ones(KV_HEADS, 64)).repeat_interleave(3, 0)[None]
        cert = decode_triton(q, case.pool, case.page_table, case.seq_lens)[2]
        expected = decode_torch(q, case.pool, case.page_table, case.seq_lens)[2]
        torch.testing.assert_close(cert.meter, expected.meter, rtol=1e-2, atol=1e-4)
        one_part = cert.risk.expm1() / (1 + cert.risk.expm1())
        meters.append(float((cert.meter / one_part).max()))
    assert meters[1] < 0.75 * meters[0]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("known", [-40.0, -20.0, -3.0, 0.0, 3.0, 20.0])
def test_what_all_tokens_share_costs_nothing(known: float, with_sinks: bool) -> None:
    """Every logit is off by about ``known``, which the sketch holds and softmax does not see but for a sink."""
    layout = ObservatoryLayout(KV_HEADS, 16, 16, page_size=4, witness_bands=2, sketch=1)
    g = torch.Generator().manual_seed(5)
    length, calibration = 70, random_calibration(g, KV_HEADS, 16, 1, 0)
    pool = ObservatoryPool(layout, 18, calibration=calibration)
    k, v = (torch.randn(length, KV_HEADS, 16, generator=g) for _ in range(2))
    q = (calibration.u[:, 0] / calibration.f).repeat_interleave(3, 0)[None]
    share = known * (1 + 1e-3 * torch.randn(length, 1, 1, generator=g)) / SM_SCALE
    k_hat = k + share * calibration.f * calibration.u[:, 0] + 1e-3 * torch.randn(k.shape, generator=g)
    observe_(k, v, k_hat, v, pool, torch.arange(length))
    arguments = (torch.arange(18, dtype=torch.int32)[None], torch.tensor([length], dtype=torch.int32))
    sinks = torch.randn(HEADS, generator=g) + 4 if with_sinks else None
    options = {"sm_scale": SM_SCALE, "sinks": sinks}
    expected = decode_torch(q, pool, *arguments, **options)[2].meter
    meter = decode_triton(q, pool, *arguments, **options, splits=3)[2].meter
    budget = 8 * (16 + 16) * 2.0**-24 * SM_SCALE * q.abs().sum(-1) * k_hat.abs().max() + 1e-5
    assert bool((meter <= 1.01 * expected + 2 * budget).all())
    x, y = (
        SM_SCALE * torch.einsum("hd,thd->ht", q[0].double(), s)
        for s in (k.double().repeat_interleave(3, 1), k_hat.double().repeat_interleave(3, 1))
    )
    if sinks is not None:
        x, y = (torch.cat((s, sinks[:, None].double()), 1) for s in (x, y))
    assert bool((meter[0].double().numpy() >= tv(x.numpy(), y.numpy())).all())


def test_extend_rows_repaired_pages_and_sinks() -> None:
    layout = ObservatoryLayout(KV_HEADS, 64, 32, page_size=16, witness_bands=4, sketch=2)
    case = observed(layout, [40, 0, 50])
    g = torch.Generator().manual_seed(3)
    case.pool.exact = ExactPages(layout, 2)
    case.pool.exact.k.normal_(generator=g)
    case.pool.exact.v.normal_(generator=g)
    exact = torch.full((3, KV_HEADS, 4), -1, dtype=torch.int32)
    exact[0, 0, 1], exact[2, 1, 2] = 0, 1
    indptr = torch.tensor([0, 2, 5, 6], dtype=torch.int32)
    q = torch.randn(6, HEADS, 64, generator=g)
    k_new, v_new = torch.randn(6, KV_HEADS, 64, generator=g), torch.randn(6, KV_HEADS, 32, generator=g)
    bias = torch.randn(6, HEADS, 60, generator=g)
    bias[torch.rand(bias.shape, generator=g) < 0.1] = -math.inf
    arguments = (case.page_table, case.seq_lens, indptr, k_new, v_new, True, exact)
    options = {"sinks": torch.randn(HEADS, generator=g), "bias": bias, "window_left": 30}
    expected = decode_torch(q, case.pool, *arguments, **options)
    assert_agree(expected, decode_triton(q, case.pool, *arguments, **options, splits=2), 1e-4)


def test_one_bad_token_is_contained() -> None:
    layout = ObservatoryLayout(KV_HEADS, 64, 64, page_size=16, witness_bands=4, sketch=2)
    case = observed(layout, [40])
    q = torch.randn(1, HEADS, 64, generator=torch.Generator().manual_seed(4))
    k, v = case.keys[0][3:4].clone(), case.values[0][3:4].clone()
    k[0, 1, 7], v[0, 0, 7] = math.inf, math.nan
    observe_(k, v, k, v, case.pool, case.page_table[0, :1].long() * 16 + 3)
    out, _, cert = decode_triton(q, case.pool, case.page_table, case.seq_lens)
    assert bool(out.isfinite().all())
    assert bool((cert.meter[0, 3:] == 1).all()) and bool((cert.meter[0, :3] < 1).all())
    assert bool((cert.value_error[0, :3] == math.inf).all())
