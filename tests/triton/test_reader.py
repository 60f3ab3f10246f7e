"""The Triton reader against the torch path and the oracle: outputs, and a meter that is sound with tolerance 0."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.kernels.oracle import Case, exact_logits, make_case, softmax, stored_logits
from tests.kernels.test_decode import LAYOUTS, queries, repair, tv
from witcert_kernels import Budget, StoreLayout, quantize_
from witcert_kernels.rounding import DIGIT_TERMS
from witcert_ref import bounds

from .backends import Result, decode_torch, decode_triton, slack, stored_bounds

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, under the interpreter

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
OUT_RTOL = {F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}


def assert_agree(case: Case, q: torch.Tensor, expected: Result, got: Result, sequence_of_row: list[int]) -> None:
    """Everything that the two paths report, within the documented rounding allowance."""
    (out, lse, cert), (out_t, lse_t, cert_t) = expected, got
    top = max(float(v.abs().max()) for v in case.values if len(v))
    assert out_t.dtype == out.dtype and bool(out_t.isfinite().all())
    assert float((out_t.double() - out.double()).abs().max()) <= 8 * OUT_RTOL[q.dtype] * top
    torch.testing.assert_close(lse_t, lse, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(cert_t.compressed, cert.compressed, rtol=0, atol=0)
    assert bool((cert_t.meter <= cert_t.eform + 1e-4).all())
    for row, b in enumerate(sequence_of_row):
        if len(case.keys[b]):
            room = slack(case, b, q[row], 0.125)
            assert bool((cert_t.meter[row].numpy() <= 1.01 * cert.meter[row].numpy() + room).all())
            assert bool((cert_t.meter[row].numpy() >= cert.meter[row].numpy() / 1.02 - room).all())
            assert bool(
                ((cert_t.risk[row] - cert.risk[row]).abs().numpy() <= 0.01 * cert.risk[row].numpy() + room).all()
            )


def assert_sound(case: Case, q: torch.Tensor, got: Result) -> None:
    """One row a sequence: meter and value error against the exact keys and values."""
    per_head = case.heads // case.pool.layout.kv_heads
    out, lse, cert = got
    for b, length in enumerate(case.seq_lens.tolist()):
        if length == 0:
            assert bool((out[b] == 0).all()) and bool((lse[b] == -math.inf).all()) and bool((cert.meter[b] == 0).all())
            assert bool((cert.value_error[b] == 0).all()) and bool((cert.risk[b] == 0).all())
            continue
        x, y = exact_logits(case, b, q[b], 0.125), stored_logits(case, b, q[b], 0.125)
        assert bool((cert.meter[b].double().numpy() >= tv(x, y)).all())
        v = case.values[b].double().repeat_interleave(per_head, 1)
        exact = torch.einsum("ht,thd->hd", torch.from_numpy(softmax(x)), v)
        assert bool(((out[b].double() - exact).norm(dim=-1) <= cert.value_error[b]).all())


@pytest.mark.parametrize(("name", "dtype"), list(zip(LAYOUTS, [F32, BF16, F16, F32, BF16] * 2, strict=True)))
def test_layouts(name: str, dtype: torch.dtype) -> None:
    layout = StoreLayout(2, 64, 48 if "group" not in LAYOUTS[name] else 64, dtype=dtype, page_size=16, **LAYOUTS[name])
    case = make_case(3, layout, [1, 70, 0, 150], heads=6)
    q = queries(case, 4)
    arguments = (case.page_table, case.seq_lens)
    expected = decode_torch(q, case.pool, *arguments)
    got = decode_triton(q, case.pool, *arguments, splits=2)
    assert_agree(case, q, expected, got, [0, 1, 2, 3])
    assert_sound(case, q, got)


@pytest.mark.parametrize(
    ("d", "d_v", "kv_heads", "heads", "page_size", "dtype", "options"),
    [
        (80, 80, 3, 3, 1, F16, {"sketch": 1}),
        (96, 64, 1, 7, 4, F32, {"group": 32}),
        (128, 128, 2, 8, 256, BF16, {"sketch": 1, "witness_bands": 1}),
        (256, 256, 1, 4, 32, F32, {"sketch": 4, "witness_bands": 4}),
        (192, 128, 1, 20, 64, F16, {"bypass": 2}),
        (64, 64, 1, 35, 128, F32, {"dither": True, "dither_period": 64}),
    ],
)
def test_shapes(
    d: int, d_v: int, kv_heads: int, heads: int, page_size: int, dtype: torch.dtype, options: dict[str, int]
) -> None:
    """Head dims that are no powers of two, any number of query heads a kv head, any page size."""
    layout = StoreLayout(kv_heads, d, d_v, dtype=dtype, page_size=page_size, **options)
    case = make_case(11, layout, [3, 90], heads=heads)
    q = queries(case, 2)
    arguments = (case.page_table, case.seq_lens)
    got = decode_triton(q, case.pool, *arguments, sm_scale=0.125, splits=2)
    assert_agree(case, q, decode_torch(q, case.pool, *arguments, sm_scale=0.125), got, [0, 1])
    assert_sound(case, q, got)


def extend_arguments(
    case: Case, rows: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    n = sum(rows)
    g = torch.Generator().manual_seed(9)
    layout = case.pool.layout
    k_new = torch.randn(n, layout.kv_heads, layout.head_dim, generator=g).to(dtype)
    v_new = torch.randn(n, layout.kv_heads, layout.head_dim_v, generator=g).to(dtype)
    indptr = torch.tensor(np.cumsum([0, *rows]), dtype=torch.int32)
    return queries(case, n), indptr, k_new, v_new


@pytest.mark.parametrize(
    ("dtype", "cap", "window", "with_sinks", "with_bias", "with_exact", "causal"),
    [
        (F32, 0.0, -1, False, False, False, True),
        (F32, 5.0, 20, True, True, True, True),
        (BF16, 0.0, 20, True, False, True, True),
        (F16, 5.0, -1, False, True, False, False),
    ],
)
def test_extend_rows(
    dtype: torch.dtype, cap: float, window: int, with_sinks: bool, with_bias: bool, with_exact: bool, causal: bool
) -> None:
    """A ragged batch of rows behind stored prefixes, with every option of the op."""
    layout = StoreLayout(2, 64, 32, dtype=dtype, page_size=16, sketch=2)
    case = make_case(6, layout, [40, 0, 97], heads=4)
    rows = [3, 30, 1]
    q, indptr, k_new, v_new = extend_arguments(case, rows, dtype)
    g = torch.Generator().manual_seed(3)
    bias = None
    if with_bias:
        bias = torch.randn(34, 4, 110, generator=g)
        bias[torch.rand(34, 4, 110, generator=g) < 0.2] = -math.inf
    exact = None
    if with_exact:
        exact = repair(case, (torch.rand(3, 2, 7, generator=g) < 0.4) & (case.page_table[:, None] >= 0))
    options = {
        "sinks": torch.randn(4, generator=g) if with_sinks else None, "logits_soft_cap": cap, "window_left": window,
        "bias": bias, "sm_scale": 0.125,
    }  # fmt: skip
    arguments = (case.page_table, case.seq_lens, indptr, k_new, v_new, causal, exact)
    expected = decode_torch(q, case.pool, *arguments, **options)
    got = decode_triton(q, case.pool, *arguments, **options, splits=2)
    assert_agree(case, q, expected, got, [b for b, count in enumerate(rows) for _ in range(count)])
    for b, length in enumerate(case.seq_lens.tolist()):
        for i in range(min(rows[b], 3)):
            r, end = int(indptr[b]) + i, i + 1 if causal else rows[b]
            fresh = k_new[int(indptr[b]) : int(indptr[b]) + end].double().repeat_interleave(2, 1)
            tail = (0.125 * torch.einsum("hd,thd->ht", q[r].double(), fresh)).numpy()
            x, y = exact_logits(case, b, q[r], 0.125), stored_logits(case, b, q[r], 0.125)
            if exact is not None:
                fixed = (exact[b] >= 0).repeat_interleave(16, 1)[:, :length].repeat_interleave(2, 0).numpy()
                y = np.where(fixed, x, y)
            x, y = np.concatenate([x, tail], 1), np.concatenate([y, tail], 1)
            if bias is not None:
                x, y = (w + bias[r, :, : w.shape[1]].double().numpy() for w in (x, y))
            if cap:
                x, y = (np.where(np.isinf(w), w, cap * np.tanh(w / cap)) for w in (x, y))
            if window >= 0:
                hidden = np.arange(x.shape[1]) < length + i - window
                x[:, hidden], y[:, hidden] = -np.inf, -np.inf
            v = torch.cat([case.values[b], v_new[int(indptr[b]) :][:end]]).double().repeat_interleave(2, 1)
            sinks = options["sinks"]
            if isinstance(sinks, torch.Tensor):
                x, y = (np.concatenate([w, sinks.double().numpy()[:, None]], 1) for w in (x, y))
                v = torch.cat([v, torch.zeros_like(v[:1])])
            assert bool((got[2].meter[r].double().numpy() >= tv(x, y)).all())
            truth = torch.einsum("ht,thd->hd", torch.from_numpy(softmax(x)), v)
            assert bool(((got[0][r].double() - truth).norm(dim=-1) <= got[2].value_error[r]).all())


def test_rows_of_the_store_are_causal() -> None:
    layout = StoreLayout(2, 64, 64, page_size=16)
    case = make_case(7, layout, [90], heads=4)
    q = queries(case, 3)
    together = decode_triton(q, case.pool, case.page_table, case.seq_lens, torch.tensor([0, 3], dtype=torch.int32))
    for i in range(3):
        length = torch.tensor([88 + i], dtype=torch.int32)
        alone = decode_triton(q[i : i + 1], case.pool, case.page_table, length)
        torch.testing.assert_close(together[0][i : i + 1], alone[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(together[2].meter[i : i + 1], alone[2].meter, rtol=1e-3, atol=1e-5)
        assert together[2].compressed[i].tolist() == [88 + i] * 4


@pytest.mark.parametrize("name", ["everything", "dither"])
def test_repaired_pages_are_exact_by_their_flag(name: str) -> None:
    layout = StoreLayout(2, 64, 64, page_size=16, **LAYOUTS[name])
    case = make_case(8, layout, [100, 33], heads=4)
    choose = torch.rand(2, 2, case.page_table.shape[1], generator=torch.Generator().manual_seed(2)) < 0.5
    choose &= case.page_table[:, None] >= 0
    q = queries(case, 2)
    table = repair(case, choose)
    arguments = (case.page_table, case.seq_lens)
    expected = decode_torch(q, case.pool, *arguments, exact_pages=table)
    got = decode_triton(q, case.pool, *arguments, exact_pages=table, splits=2)
    assert_agree(case, q, expected, got, [0, 1])
    for b, length in enumerate(case.seq_lens.tolist()):
        x, y = exact_logits(case, b, q[b], 0.125), stored_logits(case, b, q[b], 0.125)
        fixed = choose[b].repeat_interleave(16, 1)[:, :length].repeat_interleave(2, 0).numpy()
        assert bool((got[2].meter[b].double().numpy() >= tv(x, np.where(fixed, x, y))).all())
    everything = repair(case, (case.page_table[:, None] >= 0).expand(-1, 2, -1))
    cert = decode_triton(q, case.pool, *arguments, exact_pages=everything)[2]
    assert bool((cert.meter < 1e-4).all()) and bool((cert.compressed == 0).all())


def test_any_split_count_reads_the_same() -> None:
    case = make_case(12, StoreLayout(1, 64, 64, page_size=16, sketch=1, witness_bands=2), [150, 5], heads=4)
    q = queries(case, 2)
    one, many = (decode_triton(q, case.pool, case.page_table, case.seq_lens, splits=n) for n in (1, 40))
    for a, b in ((one[0], many[0]), (one[1], many[1])):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for name in ("meter", "eform", "risk", "value_error"):
        torch.testing.assert_close(getattr(one[2], name), getattr(many[2], name), rtol=1e-5, atol=1e-6)


def test_radius_is_on_offer_with_a_budget() -> None:
    case = make_case(5, StoreLayout(1, 64, 64, dither=True), [150], heads=4)
    q = queries(case, 2)[1:2]
    budget = Budget(1e-2, 30, 4, 100)
    arguments = (case.page_table, case.seq_lens)
    plain, radius = (decode_triton(q, case.pool, *arguments, budget=x) for x in (None, budget))
    assert (plain[2].guarantee, radius[2].guarantee) == ("any_query", "fixed_trajectory")
    assert bool((radius[2].meter < plain[2].meter).all())
    assert_agree(case, q, decode_torch(q, case.pool, *arguments, budget=budget), radius, [0])


def test_one_bad_token_is_contained() -> None:
    layout = StoreLayout(2, 64, 64, page_size=16, sketch=2, witness_bands=2, bypass=1)
    case = make_case(10, layout, [60, 60], heads=4)
    q = queries(case, 2)
    arguments = (case.page_table, case.seq_lens)
    clean = decode_triton(q, case.pool, *arguments)
    k, v = case.keys[0][7:8].clone(), case.values[0][9:10].clone()
    k[0, 1, 5], v[0, 0, 5] = math.nan, math.inf
    first = case.page_table[0, 0].long()[None] * 16
    quantize_(k, case.values[0][7:8], case.pool, first + 7)
    quantize_(case.keys[0][9:10], v, case.pool, first + 9)
    q_bad = q.clone()
    q_bad[1, 3, 0] = math.nan
    out, _, cert = decode_triton(q_bad, case.pool, *arguments)
    assert bool(out.isfinite().all())
    assert bool((cert.meter[0, 2:] == 1).all()) and bool((cert.risk[0, 2:] == math.inf).all())
    assert bool((cert.eform[0, 2:] == math.inf).all()) and bool((cert.meter[0, :2] < 1).all())
    assert bool((cert.value_error[0, :2] == math.inf).all()) and bool(cert.value_error[0, 2:].isfinite().all())
    assert float(cert.meter[1, 3]) == 1
    torch.testing.assert_close(out[1, :3], clean[0][1, :3], rtol=0, atol=0)
    torch.testing.assert_close(cert.meter[1, :3], clean[2].meter[1, :3], rtol=0, atol=0)


def test_slots_that_nobody_attends_to_may_hold_anything() -> None:
    layout = StoreLayout(2, 64, 64, page_size=16, sketch=2, witness_bands=2, bypass=1)
    case = make_case(13, layout, [60], heads=4)
    q = queries(case, 1)
    bias = torch.zeros(1, 4, 60)
    bias[:, :, :20] = -math.inf
    arguments = (case.page_table, case.seq_lens)
    clean = decode_triton(q, case.pool, *arguments, bias=bias)
    page = case.page_table[0].long()
    for name in ("k_scale", "v_scale", "bypass"):
        tensor = getattr(case.pool, name)
        tensor[page[0]], tensor[page[1], :4], tensor[page[3], 12:] = math.nan, math.nan, math.nan
    dirty = decode_triton(q, case.pool, *arguments, bias=bias)
    for a, b in ((clean[0], dirty[0]), (clean[1], dirty[1]), (clean[2].meter, dirty[2].meter)):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_huge_bound_on_a_light_token_does_not_decide() -> None:
    """e^c beyond float32's range while its token's weight is tiny: the exponents meet before the product."""
    layout = StoreLayout(1, 64, 64, page_size=16)
    case = make_case(14, layout, [40], heads=2, calibrated=False)
    k = torch.zeros(1, 1, 64)
    k[0, 0, 0], k[0, 0, 1:] = -4000.0, 0.01
    quantize_(k, case.values[0][:1], case.pool, case.page_table[0, 0].long()[None] * 16 + 5)
    case.keys[0][5] = k[0]
    q = torch.ones(3, 2, 64) * torch.tensor([0.3, 1.0, 3.0])[:, None, None]
    arguments = (case.page_table.expand(3, -1), case.seq_lens.expand(3))
    expected, got = decode_torch(q, case.pool, *arguments)[2], decode_triton(q, case.pool, *arguments)[2]
    assert bool((got.meter <= 1.01 * expected.meter).all()) and bool((got.meter < 0.9).all())
    torch.testing.assert_close(got.risk, expected.risk, rtol=1e-2, atol=1e-3)
    for row in range(3):
        y, c = stored_logits(case, 0, q[row], 0.125), stored_bounds(case, 0, q[row], 0.125)
        assert float(c.max()) > 35
        assert bool((got.meter[row].double().numpy() >= bounds.meter(softmax(y), c)).all())


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("largest", [40.0, 100.0, 200.0, 300.0])
def test_a_tile_of_huge_bounds_does_not_decide(largest: float, splits: int) -> None:
    """Where all tokens of the first tile have c of 40 to 300, and later ones are e^2c as heavy: e^2c leaves float32's
    range before the maximum rises, and the meter is still that of the reference."""
    layout = StoreLayout(1, 64, 64, page_size=64)
    case = make_case(15, layout, [150], heads=1, calibrated=False, scale=0.2)
    k = torch.full((64, 1, 64), 0.01)
    k[:, 0, 0] = -32 * largest
    quantize_(k, case.values[0][:64], case.pool, case.page_table[0, 0].long() * 64 + torch.arange(64))
    case.keys[0][:64] = k
    # their logits are below the others' by 2 c and a little more
    q = torch.ones(1, 1, 64)
    q[0, 0, 0] = 0.5 + 0.75 / largest
    arguments = (case.page_table, case.seq_lens)
    cert = decode_triton(q, case.pool, *arguments, sm_scale=0.125, splits=splits)[2]
    y, c = stored_logits(case, 0, q[0], 0.125), stored_bounds(case, 0, q[0], 0.125)
    assert abs(float(c.max()) - largest) < 0.02 * largest and 1 < y[0, 64:].mean() - y[0, 0] - 2 * float(c.max()) < 6
    formula, light = bounds.meter(softmax(y)[0], c[0]), bounds.meter(softmax(y[:, 64:])[0], c[0, 64:])
    zeta = (DIGIT_TERMS + 2) * 2.0**-24 * 255 * float(c.max())  # the documented rounding of a logit
    assert formula > 1.05 * light
    assert formula <= float(cert.meter) <= 1.01 * formula * math.exp(2 * zeta) + zeta / 2 + 1e-5
