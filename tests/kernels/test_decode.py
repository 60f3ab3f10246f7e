"""The CPU path of the op against an oracle: outputs, and a meter that is sound with tolerance 0 and not useless."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from witcert_kernels import (
    Budget,
    ExactPages,
    LayerCalibration,
    PackedPool,
    StoreLayout,
    certified_decode,
    quantize_,
)
from witcert_ref import bounds

from .oracle import Case, exact_logits, make_case, softmax, stored_logits

LAYOUTS = {
    "plain": {},
    "groups": {"group": 16},
    "sketch": {"sketch": 4},
    "witness": {"sketch": 2, "witness_bands": 4},
    "witness-groups": {"sketch": 2, "witness_bands": 3, "group": 32},
    "bypass": {"bypass": 3, "sketch": 1},
    "everything": {"bypass": 2, "sketch": 3, "witness_bands": 4, "group": 16},
    "dither": {"dither": True, "dither_period": 16},
    "dither-everything": {"dither": True, "bypass": 1, "sketch": 2, "witness_bands": 2, "group": 32},
    "interleaved": {"sketch": 2, "witness_bands": 4, "bypass": 2, "rope_layout": "interleaved"},
}


def tv(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return 0.5 * np.abs(softmax(x) - softmax(y)).sum(-1)


def queries(case: Case, rows: int, seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    shape = (rows, case.heads, case.pool.layout.head_dim)
    return (torch.randn(*shape, generator=g) * torch.tensor([0.05, 1.0, 4.0])[torch.arange(rows) % 3, None, None]).to(
        case.pool.layout.dtype
    )


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_ragged_batch(name: str, page_size: int) -> None:
    layout = StoreLayout(2, 64, 48 if "group" not in LAYOUTS[name] else 64, page_size=page_size, **LAYOUTS[name])
    case = make_case(3, layout, [1, 70, 0, 200], heads=6)
    q = queries(case, 4)
    out, lse, cert = certified_decode(q, case.pool, case.page_table, case.seq_lens, splits=3)
    assert cert.guarantee == "any_query"
    for b, length in enumerate(case.seq_lens.tolist()):
        if length == 0:
            assert bool((out[b] == 0).all()) and bool((lse[b] == -math.inf).all()) and bool((cert.meter[b] == 0).all())
            continue
        x, y = exact_logits(case, b, q[b], 0.125), stored_logits(case, b, q[b], 0.125)
        np.testing.assert_allclose(lse[b], np.log(np.exp(y - y.max()).sum(-1)) + y.max(), rtol=1e-5, atol=1e-4)
        assert bool((cert.meter[b].double().numpy() >= tv(x, y)).all())
        v = case.values[b].double().repeat_interleave(3, 1)
        exact = torch.einsum("ht,thd->hd", torch.from_numpy(softmax(x)), v)
        assert bool(((out[b].double() - exact).norm(dim=-1) <= cert.value_error[b]).all())


@pytest.mark.parametrize("name", ["plain", "dither", "everything"])
def test_meter_is_the_formula(name: str) -> None:
    """At least the worst case for the bound that the store implies, at most that bound's meter and a little."""
    layout = StoreLayout(2, 64, 64, **LAYOUTS[name])
    case = make_case(4, layout, [150], heads=4)
    q = queries(case, 3)[1:2]
    _, _, cert = certified_decode(q, case.pool, case.page_table, case.seq_lens)
    y = stored_logits(case, 0, q[0], 0.125)
    x = exact_logits(case, 0, q[0], 0.125)
    for head in range(4):
        c = np.abs(y[head] - x[head])
        assert float(cert.meter[0, head]) >= bounds.worst_case_relaxed(softmax(y[head]), c)
    if name == "plain":
        f = case.pool.calibration.f.double().numpy()
        steps = case.pool.k_scale[case.page_table[0].long()].double().flatten(0, 1)[:150, :, 0].numpy()
        for head in range(4):
            alpha = np.abs(q[0, head].double().numpy() * f[head // 2]).sum()
            c = 0.125 * alpha * steps[:, head // 2] / 2
            formula = float(bounds.meter(softmax(y[head]), c))
            assert formula <= float(cert.meter[0, head]) <= 1.01 * formula + 1e-4
            assert float(cert.meter[0, head]) <= min(1.0, float(cert.eform[0, head])) + 1e-4


def test_radius_needs_a_budget_and_is_labelled() -> None:
    layout = StoreLayout(2, 64, 64, dither=True)
    case = make_case(5, layout, [300], heads=4)
    q = queries(case, 2)[1:2]
    plain = certified_decode(q, case.pool, case.page_table, case.seq_lens)[2]
    budget = Budget(1e-2, 30, 4, 100)
    radius = certified_decode(q, case.pool, case.page_table, case.seq_lens, budget=budget)[2]
    assert (plain.guarantee, radius.guarantee) == ("any_query", "fixed_trajectory")
    assert bool((radius.meter < plain.meter).all())
    undithered = make_case(5, StoreLayout(2, 64, 64), [300], heads=4)
    cert = certified_decode(q, undithered.pool, undithered.page_table, undithered.seq_lens, budget=budget)[2]
    assert cert.guarantee == "any_query"


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_extend_rows(cap: float, window: int, with_sinks: bool) -> None:
    layout = StoreLayout(2, 64, 32, page_size=16, sketch=2)
    case = make_case(6, layout, [40, 0, 97], heads=4)
    rows = [3, 5, 1]
    indptr = torch.tensor([0, 3, 8, 9], dtype=torch.int32)
    q = queries(case, 9)
    g = torch.Generator().manual_seed(9)
    k_new, v_new = torch.randn(9, 2, 64, generator=g), torch.randn(9, 2, 32, generator=g)
    sinks = torch.randn(4, generator=g) if with_sinks else None
    bias = torch.randn(9, 4, 110, generator=g)
    out, lse, cert = certified_decode(
        q, case.pool, case.page_table, case.seq_lens, indptr, k_new, v_new,
        sinks=sinks, logits_soft_cap=cap, window_left=window, bias=bias, splits=2,
    )  # fmt: skip
    for b, length in enumerate(case.seq_lens.tolist()):
        for i in range(rows[b]):
            r = int(indptr[b]) + i
            fresh = k_new[int(indptr[b]) : r + 1].double().repeat_interleave(2, 1)
            tail = (0.125 * torch.einsum("hd,thd->ht", q[r].double(), fresh)).numpy()
            x, y = (
                np.concatenate([f(case, b, q[r], 0.125), tail], 1) + bias[r, :, : length + i + 1].double().numpy()
                for f in (exact_logits, stored_logits)
            )
            if cap:
                x, y = cap * np.tanh(x / cap), cap * np.tanh(y / cap)
            if window >= 0:
                hidden = np.arange(length + i + 1) < length + i - window
                x[:, hidden], y[:, hidden] = -np.inf, -np.inf
            v = torch.cat([case.values[b], v_new[int(indptr[b]) : r + 1]]).double().repeat_interleave(2, 1)
            if sinks is not None:
                x, y = (np.concatenate([w, sinks.double().numpy()[:, None]], 1) for w in (x, y))
                v = torch.cat([v, torch.zeros_like(v[:1])])
            np.testing.assert_allclose(lse[r], np.log(np.exp(y).sum(-1)), rtol=1e-5, atol=1e-4)
            assert bool((cert.meter[r].double().numpy() >= tv(x, y)).all())
            exact = torch.einsum("ht,thd->hd", torch.from_numpy(softmax(x)), v)
            assert bool(((out[r].double() - exact).norm(dim=-1) <= cert.value_error[r]).all())


def test_causal_rows_of_the_store() -> None:
    layout = StoreLayout(2, 64, 64, page_size=16)
    case = make_case(7, layout, [90], heads=4)
    q = queries(case, 7)
    indptr = torch.tensor([0, 7], dtype=torch.int32)
    together = certified_decode(q, case.pool, case.page_table, case.seq_lens, indptr)
    for i in range(7):
        length = torch.tensor([90 - 6 + i], dtype=torch.int32)
        alone = certified_decode(q[i : i + 1], case.pool, case.page_table, length)
        torch.testing.assert_close(together[0][i : i + 1], alone[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(together[2].meter[i : i + 1], alone[2].meter, rtol=1e-4, atol=1e-4)
    everything = certified_decode(q, case.pool, case.page_table, case.seq_lens, indptr, causal=False)
    torch.testing.assert_close(everything[0][-1], together[0][-1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(everything[0][0], together[0][0], rtol=1e-3)


def repair(case: Case, choose: torch.Tensor) -> torch.Tensor:
    """Put exact pages where ``choose`` (bool ``[batch, kv_heads, max_pages]``) says; returns the table of slots."""
    layout = case.pool.layout
    table = torch.full(choose.shape, -1, dtype=torch.int32)
    picked = choose.nonzero().tolist()
    case.pool.exact = ExactPages(layout, len(picked))
    case.pool.exact.k.fill_(float("nan"))
    for slot, (b, kv, page) in enumerate(picked):
        token = slice(page * layout.page_size, (page + 1) * layout.page_size)
        k, v = case.keys[b][token, kv], case.values[b][token, kv]
        case.pool.exact.k[slot, : len(k)], case.pool.exact.v[slot, : len(v)] = k, v
        table[b, kv, page] = slot
    return table


@pytest.mark.parametrize("name", ["plain", "everything", "dither"])
def test_repaired_pages_are_exact_by_their_flag(name: str) -> None:
    layout = StoreLayout(2, 64, 64, page_size=16, **LAYOUTS[name])
    case = make_case(8, layout, [100, 33], heads=4)
    g = torch.Generator().manual_seed(2)
    choose = torch.rand(2, 2, case.page_table.shape[1], generator=g) < 0.5
    choose &= case.page_table[:, None] >= 0
    table = repair(case, choose)
    q = queries(case, 2)
    out, lse, cert = certified_decode(q, case.pool, case.page_table, case.seq_lens, exact_pages=table, splits=2)
    for b, length in enumerate(case.seq_lens.tolist()):
        x, y = exact_logits(case, b, q[b], 0.125), stored_logits(case, b, q[b], 0.125)
        fixed = choose[b].repeat_interleave(16, 1)[:, :length].repeat_interleave(2, 0).numpy()
        y = np.where(fixed, x, y)
        np.testing.assert_allclose(lse[b], np.log(np.exp(y - y.max()).sum(-1)) + y.max(), rtol=1e-5, atol=1e-4)
        assert bool((cert.meter[b].double().numpy() >= tv(x, y)).all())
        assert cert.compressed[b].tolist() == (~fixed).sum(-1).tolist()
        v = case.values[b].double().repeat_interleave(2, 1)
        exact = torch.einsum("ht,thd->hd", torch.from_numpy(softmax(x)), v)
        assert bool(((out[b].double() - exact).norm(dim=-1) <= cert.value_error[b]).all())
    everything = repair(case, (case.page_table[:, None] >= 0).expand(-1, 2, -1))
    cert = certified_decode(q, case.pool, case.page_table, case.seq_lens, exact_pages=everything)[2]
    assert bool((cert.meter < 1e-4).all()) and bool((cert.compressed == 0).all())


def test_shares_sum_to_the_excess() -> None:
    layout = StoreLayout(2, 64, 64, page_size=16)
    case = make_case(9, layout, [100], heads=2)
    q = queries(case, 3)[1:2]
    cert = certified_decode(q, case.pool, case.page_table, case.seq_lens, return_shares=True)[2]
    torch.testing.assert_close(cert.shares.sum(-1)[0], cert.risk[0].expm1(), rtol=1e-3, atol=1e-6)


def test_one_bad_token_is_contained() -> None:
    layout = StoreLayout(2, 64, 64, page_size=16, sketch=2, witness_bands=2, bypass=1)
    for value in (math.nan, math.inf, -math.inf):
        case = make_case(10, layout, [60, 60], heads=4)
        q = queries(case, 2)
        clean = certified_decode(q, case.pool, case.page_table, case.seq_lens)
        k, v = case.keys[0][7:8].clone(), case.values[0][7:8].clone()
        k[0, 1, 5] = value
        quantize_(k, v, case.pool, case.page_table[0, 0].long()[None] * 16 + 7)
        out, _, cert = certified_decode(q, case.pool, case.page_table, case.seq_lens)
        assert bool(out.isfinite().all())
        assert bool((cert.meter[0, 2:] == 1).all()) and bool((cert.risk[0, 2:] == math.inf).all())
        torch.testing.assert_close(out[1], clean[0][1], rtol=0, atol=0)
        torch.testing.assert_close(cert.meter[0, :2], clean[2].meter[0, :2], rtol=0, atol=0)
        v[0, 0, 5] = value
        quantize_(case.keys[0][7:8], v, case.pool, case.page_table[0, 0].long()[None] * 16 + 7)
        out, _, cert = certified_decode(q, case.pool, case.page_table, case.seq_lens)
        assert bool(out.isfinite().all()) and bool((cert.meter[0] < 1).all())
        assert bool((cert.value_error[0, :2] == math.inf).all()) and bool(cert.value_error[0, 2:].isfinite().all())
        q[0, 0, 0] = value
        cert = certified_decode(q, case.pool, case.page_table, case.seq_lens)[2]
        assert float(cert.meter[0, 0]) == 1 and bool((cert.meter[0, 1:] < 1).all())


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_terms_that_cancel_are_in_the_rounding_budget(cap: float) -> None:
    """A bias of -10^6 against a bypass term of 10^6 leaves small logits and float32 errors of 1/16."""
    layout = StoreLayout(1, 64, 64, page_size=16, bypass=1)
    case = make_case(11, layout, [40], heads=2)
    channels = case.pool.bypass_channels[0]
    g = torch.Generator().manual_seed(1)
    k = torch.randn(40, 1, 64, generator=g) * 0.01
    k[:, :, channels] = 1000 + torch.rand(40, 1, 2, generator=g) * 1e-3
    v = torch.randn(40, 1, 64, generator=g)
    slots = case.page_table[0, torch.arange(40) // 16].long() * 16 + torch.arange(40) % 16
    quantize_(k, v, case.pool, slots)
    case.keys[0], case.values[0] = k, v
    q = torch.randn(1, 2, 64, generator=g) * 0.01
    q[:, :, channels] = 4003.0
    bias = torch.full((1, 2, 40), -0.125 * 2 * 4003e3) + torch.randn(1, 2, 40, generator=g)
    out, _, cert = certified_decode(q, case.pool, case.page_table, case.seq_lens, bias=bias, logits_soft_cap=cap)
    x = exact_logits(case, 0, q[0], 0.125) + bias[0].double().numpy()
    x = cap * np.tanh(x / cap) if cap else x
    exact = torch.einsum("ht,thd->hd", torch.from_numpy(softmax(x)), v.double().expand(-1, 2, -1))
    error = (out[0].double() - exact).norm(dim=-1)
    assert bool((error <= cert.value_error[0]).all()) and bool((error > 1e-3).any())
    assert bool((cert.meter[0] > 0.01).all())


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("part", ["bypass", "shift", "chunk"])
def test_a_finite_logit_that_overflows_is_meter_one(part: str, sign: float, cap: float) -> None:
    layout = StoreLayout(1, 64, 64, page_size=16, bypass=1)
    case = make_case(12, layout, [20], heads=1)
    channel = (
        int(case.pool.bypass_channels[0, 0])
        if part == "bypass"
        else int((~case.pool.calibration.bypass_mask).nonzero()[0, 1])
    )
    k, v, q = case.keys[0].clone(), case.values[0], torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(1))
    options: dict[str, torch.Tensor] = {}
    q[0, 0, channel] = sign * 1e20
    if part == "bypass":
        k[5, 0, channel] = 1e30
    elif part == "shift":
        mu = case.pool.calibration.mu.clone()
        mu[0, channel] = k[:, 0, channel] = 1e20
        case.pool = PackedPool(layout, case.pool.num_pages, calibration=replace(case.pool.calibration, mu=mu))
        options = {"sinks": torch.zeros(1)}
    else:
        q[0, 0, channel] = sign
        options = {"k_new": torch.full((1, 1, 64), 3e38), "v_new": torch.ones(1, 1, 64)}
        q[:] = sign * 1e3
    slots = case.page_table[0, torch.arange(20) // 16].long() * 16 + torch.arange(20) % 16
    quantize_(k, v, case.pool, slots)
    out, _, cert = certified_decode(q, case.pool, case.page_table, case.seq_lens, logits_soft_cap=cap, **options)
    assert float(cert.meter) == 1.0 and float(cert.risk) == math.inf
    assert bool(out.isfinite().all()) and not bool(cert.value_error.isnan().any())


def test_a_bias_over_no_token() -> None:
    pool = PackedPool(StoreLayout(2, 8, 8), 1)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    out, lse, cert = certified_decode(torch.ones(1, 4, 8), pool, table, lengths, bias=torch.zeros(1, 4, 0))
    assert bool((out == 0).all()) and bool((lse == -math.inf).all()) and bool((cert.meter == 0).all())


def test_cancellation_inside_a_float64_sum_is_in_the_budget() -> None:
    big = 2.0**30
    calibration = LayerCalibration(
        mu=torch.tensor([[big, 1.5, big, 0.0]]),
        f=torch.full((1, 4), 2.0**-30),
        u=torch.zeros(1, 0, 4),
        bypass=torch.empty(1, 0, dtype=torch.int64),
    )
    pool = PackedPool(StoreLayout(1, 4, 2, page_size=4), 1, calibration=calibration)
    k = calibration.mu[None].expand(4, 1, 4).contiguous()
    v = torch.tensor([[1.0, 0.0]]).expand(4, 1, 2).contiguous()
    quantize_(k, v, pool, torch.arange(4))
    q = torch.tensor([[[big, 1.0, -big, 0.0]]])
    out, _, cert = certified_decode(
        q, pool, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32), sm_scale=1.0,
        sinks=torch.tensor([3.0]),
    )  # fmt: skip
    weight = 4 * math.exp(1.5) / (4 * math.exp(1.5) + math.exp(3.0))
    error = abs(float(out[0, 0, 0]) - weight)
    assert error > 0.1 and error <= float(cert.value_error)


def test_an_output_cannot_overflow() -> None:
    pool = PackedPool(StoreLayout(1, 2, 2, torch.float16, page_size=4), 1)
    v = torch.full((4, 1, 2), 65504.0, dtype=torch.float16)
    quantize_(v * 0, v, pool, torch.arange(4))
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    out, _, cert = certified_decode(v[:1] * 0, pool, table, lengths)
    assert bool((out == 65504).all()) and bool(cert.value_error.isfinite().all())
