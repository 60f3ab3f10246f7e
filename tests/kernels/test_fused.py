"""The compiled decode against the reader, whose formulas it repeats, and the arithmetic that it brings along."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from witcert_kernels import Budget, ExactPages, StoreLayout, certified_decode, fused, quantize_, reader, rounding
from witcert_kernels.compiled import Compiled
from witcert_ref import bounds

from .oracle import Case, exact_logits, make_case, softmax, stored_logits

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sketch": {"sketch": 4},
    "witness": {"sketch": 2, "witness_bands": 4},
    "bypass": {"bypass": 3, "sketch": 1},
    "dither": {"dither": True, "dither_period": 16},
    "everything": {"dither": True, "dither_period": 1, "bypass": 1, "sketch": 2, "witness_bands": 3},
    "interleaved": {"sketch": 2, "witness_bands": 4, "bypass": 2, "rope_layout": "interleaved"},
}


def query(case: Case, rows: int, scale: float = 1.0) -> torch.Tensor:
    layout = case.pool.layout
    g = torch.Generator().manual_seed(rows)
    return (scale * torch.randn(rows, case.heads, layout.head_dim, generator=g)).to(layout.dtype)


def both(monkeypatch: pytest.MonkeyPatch, case: Case, q: torch.Tensor, **more: Any) -> list[Any]:
    """The call, compiled and by the reader; the compiled one must not have asked the reader."""
    arguments = (q, case.pool, case.page_table, case.seq_lens)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "decode", None)
        mine = certified_decode(*arguments, **more)
    monkeypatch.setenv("WITCERT_BACKEND", "torch")
    its = certified_decode(*arguments, **more)
    monkeypatch.delenv("WITCERT_BACKEND")
    return [mine, its]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_agrees_with_the_reader_and_is_sound(monkeypatch: pytest.MonkeyPatch, name: str, page_size: int) -> None:
    case = make_case(3, StoreLayout(2, 64, 48, page_size=page_size, **LAYOUTS[name]), [1, 70, 0, 200], heads=6)
    q = query(case, 4)
    budget = Budget(1e-2, 30, 6, 100) if "dither" in LAYOUTS[name] else None
    (out, lse, cert), (out2, lse2, cert2) = both(monkeypatch, case, q, budget=budget, return_shares=True)
    torch.testing.assert_close(out, out2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, lse2, rtol=1e-6, atol=1e-5)
    for field in ("meter", "eform", "risk", "value_error", "shares"):
        torch.testing.assert_close(getattr(cert, field), getattr(cert2, field), rtol=1e-4, atol=1e-6)
    assert torch.equal(cert.compressed, cert2.compressed) and cert.guarantee == cert2.guarantee
    plain = certified_decode(q, case.pool, case.page_table, case.seq_lens)[2]
    for b in (0, 1, 3):
        x, y = (f(case, b, q[b], 0.125) for f in (exact_logits, stored_logits))
        for head in range(6):
            least = bounds.worst_case_relaxed(softmax(y[head]), np.abs(x[head] - y[head]))
            assert float(plain.meter[b, head]) >= least


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [-1, 0, 20])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dither", [False, True])
def test_rows_of_the_store(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: int, causal: bool, dither: bool
) -> None:
    layout = StoreLayout(3, 64, 64, page_size=16, sketch=1, bypass=1, dither=dither, dither_period=8, dtype=dtype)
    case = make_case(4, layout, [40, 130], heads=6)
    more = {"qo_indptr": torch.tensor([0, 5, 12], dtype=torch.int32), "causal": causal, "window_left": window}
    (out, lse, cert), (out2, lse2, cert2) = both(monkeypatch, case, query(case, 12), **more)
    torch.testing.assert_close(out, out2, rtol=2e-2, atol=1e-4)
    torch.testing.assert_close(lse, lse2, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(cert.meter, cert2.meter, rtol=1e-4, atol=1e-6)
    assert torch.equal(cert.compressed, cert2.compressed)


@pytest.mark.parametrize("scale", [30.0, 100.0, 3000.0])
def test_a_large_c_is_as_tight_as_the_readers(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    case = make_case(5, StoreLayout(1, 64, 64), [90], heads=2)
    q = query(case, 1, scale)
    arguments = (q, case.pool, case.page_table, case.seq_lens)
    cert = certified_decode(*arguments)[2]
    monkeypatch.setenv("WITCERT_BACKEND", "torch")
    other = certified_decode(*arguments)[2]
    for field in ("meter", "eform", "risk"):
        torch.testing.assert_close(getattr(cert, field), getattr(other, field), rtol=1e-4, atol=1e-6)


def test_only_rows_that_are_not_finite_are_left_to_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(6, StoreLayout(2, 64, 64, page_size=16, sketch=1), [60, 60], heads=4)
    q = query(case, 2)
    clean, _ = both(monkeypatch, case, q)
    k = case.keys[0][7:8].clone()
    k[0, 1, 5] = math.nan
    quantize_(k, case.values[0][7:8], case.pool, case.page_table[0, 0].long()[None] * 16 + 7)
    found = certified_decode(q, case.pool, case.page_table, case.seq_lens)
    monkeypatch.setenv("WITCERT_BACKEND", "torch")
    left = certified_decode(q, case.pool, case.page_table, case.seq_lens)
    for at, source in (((0, slice(2, 4)), left), ((0, slice(0, 2)), clean), ((1, slice(0, 4)), clean)):
        assert torch.equal(found[0][at], source[0][at]) and torch.equal(found[1][at], source[1][at])
        assert torch.equal(found[2].meter[at], source[2].meter[at])
    assert bool((found[2].meter[0, 2:] == 1).all())


@pytest.mark.parametrize("other", ["exact pages", "many rows"])
def test_a_sequence_for_the_reader_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    case = make_case(6, StoreLayout(1, 64, 64, page_size=16, sketch=1), [60, 60], heads=2)
    rows = 20 if other == "many rows" else 1
    q, more = query(case, rows + 1), {}
    if other == "exact pages":
        table = torch.full((2, 1, case.page_table.shape[1]), -1, dtype=torch.int32)
        table[0, 0, 1], more = 0, {"exact_pages": table}
        case.pool.exact = ExactPages(case.pool.layout, 1)
    alone = certified_decode(q[rows:], case.pool, case.page_table[1:], case.seq_lens[1:], return_shares=True)
    indptr = torch.tensor([0, rows, rows + 1], dtype=torch.int32)
    arguments = (q, case.pool, case.page_table, case.seq_lens, indptr)
    both = certified_decode(*arguments, return_shares=True, **more)
    assert torch.equal(both[0][rows:], alone[0]) and torch.equal(both[1][rows:], alone[1])
    assert torch.equal(both[2].meter[rows:], alone[2].meter) and torch.equal(both[2].shares[1:], alone[2].shares)
    monkeypatch.setenv("WITCERT_BACKEND", "torch")
    left = certified_decode(*arguments, return_shares=True, **more)
    assert torch.equal(both[0][:rows], left[0][:rows]) and torch.equal(both[2].meter[:rows], left[2].meter[:rows])
    assert torch.equal(both[2].shares[0], left[2].shares[0])


def test_a_value_that_is_not_finite_reaches_only_the_value_error() -> None:
    case = make_case(6, StoreLayout(2, 64, 64, page_size=16, sketch=1), [60, 60], heads=4)
    arguments = (query(case, 2), case.pool, case.page_table, case.seq_lens)
    clean = certified_decode(*arguments)
    v = case.values[0][7:8].clone()
    v[0, 1, 5] = math.inf
    quantize_(case.keys[0][7:8], v, case.pool, case.page_table[0, 0].long()[None] * 16 + 7)
    out, _, cert = certified_decode(*arguments)
    assert torch.equal(cert.meter, clean[2].meter) and bool(out.isfinite().all())
    assert bool((cert.value_error[0, 2:] == math.inf).all()) and torch.equal(
        cert.value_error[1], clean[2].value_error[1]
    )
    assert torch.equal(out[1], clean[0][1]) and torch.equal(out[0, :2], clean[0][0, :2])


def test_asking_for_shares_changes_nothing_else() -> None:
    case = make_case(8, StoreLayout(2, 64, 64, page_size=16), [100], heads=4)
    arguments = (query(case, 1), case.pool, case.page_table, case.seq_lens)
    without, cert = certified_decode(*arguments), certified_decode(*arguments, return_shares=True)[2]
    assert torch.equal(without[2].meter, cert.meter)
    most = cert.risk[0].expm1().view(2, 2).amax(-1)
    assert bool((cert.shares[0].sum(-1) >= most * (1 - 1e-5)).all())


@pytest.mark.parametrize("bits", [0x7C00, 0x7E00, 0xFC00, 0xFE00, 0xBC00])
@pytest.mark.parametrize("backend", ["", "torch"])
def test_a_scale_that_is_no_scale_is_not_read(monkeypatch: pytest.MonkeyPatch, bits: int, backend: str) -> None:
    """Inf, NaN and negative numbers, which no writer of ours stores."""
    case = make_case(9, StoreLayout(1, 64, 64, page_size=16), [40], heads=2)
    arguments = (query(case, 1), case.pool, case.page_table, case.seq_lens)
    monkeypatch.setenv("WITCERT_BACKEND", backend)
    page, stored = int(case.page_table[0, 0]), bits - (bits >> 15 << 16)
    case.pool.v_scale.view(torch.int16)[page, 3] = stored
    out, _, cert = certified_decode(*arguments)
    assert bool((cert.value_error == math.inf).all()) and bool((cert.meter < 1).all()) and bool(out.isfinite().all())
    case.pool.k_scale.view(torch.int16)[page, 3] = stored
    assert bool((certified_decode(*arguments)[2].meter == 1).all())


@pytest.mark.parametrize("backend", ["", "torch"])
def test_a_query_that_requires_a_gradient(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    case = make_case(10, StoreLayout(1, 64, 64, page_size=16, bypass=1), [40], heads=2)
    q = query(case, 1)
    monkeypatch.setenv("WITCERT_BACKEND", backend)
    wanted = certified_decode(q, case.pool, case.page_table, case.seq_lens)
    k, v = case.keys[0][:1].clone().requires_grad_(), case.values[0][:1].clone().requires_grad_()
    quantize_(k, v, case.pool, case.page_table[0, :1].long() * 16)
    assert not any(getattr(case.pool, name).requires_grad for name in case.pool.page_tensors)
    got = certified_decode(q.clone().requires_grad_(), case.pool, case.page_table, case.seq_lens)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[2].meter, wanted[2].meter)
    for output in got[:2]:
        with pytest.raises(RuntimeError, match="autograd"):
            output.sum().backward(retain_graph=True)


def test_a_traced_call_reads_no_page_that_is_not_there() -> None:
    case = make_case(11, StoreLayout(1, 64, 64, page_size=16), [40], heads=2)
    q = query(case, 1)

    def meter(page_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        return certified_decode(q, case.pool, page_table, seq_lens)[2].meter

    traced = torch.compile(meter, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(case.page_table, case.seq_lens), meter(case.page_table, case.seq_lens))
    for page in (case.pool.num_pages, 10**7, -1):
        table = case.page_table.clone()
        table[0, 1] = page
        with pytest.raises(ValueError, match="page_table"):
            traced(table, case.seq_lens)
    with pytest.raises(ValueError, match="page_table"):
        traced(case.page_table, torch.tensor([10**4], dtype=torch.int32))


def test_a_folder_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(12, StoreLayout(1, 64, 64), [20], heads=2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    compiled = Compiled(fused.read_sequence, fastmath=fused.ANY_ORDER)
    monkeypatch.setattr(compiled, "_run", full)
    monkeypatch.setattr(fused, "_read_sequence", compiled)
    assert bool(certified_decode(query(case, 1), case.pool, case.page_table, case.seq_lens)[2].meter.isfinite().all())
    assert compiled._run is not full


@pytest.mark.parametrize("name", ["EXP_ERROR", "UNDERFLOW", "MOMENT_REL", "STEP_WIDEN"])
def test_the_budget_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Compiled code is kept on disk: a constant baked into it would outlive its change."""
    case = make_case(7, StoreLayout(1, 64, 64), [50], heads=2)
    arguments = (query(case, 1), case.pool, case.page_table, case.seq_lens)
    before = certified_decode(*arguments)[2].eform
    monkeypatch.setattr(rounding, name, 1.5 if name == "STEP_WIDEN" else 1e-2)
    assert bool((certified_decode(*arguments)[2].eform > before).all())


def test_exp_is_exact_enough_for_the_budget() -> None:
    x = np.concatenate([np.linspace(-700, 300, 100_001), np.geomspace(1e-300, 1, 1000)])
    for value in x:
        e, s = fused.exp_parts(value)
        assert abs(s + s * e - math.exp(value)) <= 2.0**-50 * math.exp(value)
        if value >= 0:
            assert abs(s * e + (s - 1) - math.expm1(value)) <= 2.0**-50 * math.expm1(value)


@pytest.mark.parametrize("odd", [math.nan, -math.nan, math.inf, -math.inf])
def test_extremes_order_what_is_not_finite_outside(odd: float) -> None:
    g = np.random.default_rng(0)
    for numbers in (g.standard_normal(37), -g.random(8), g.random(8), np.array([-0.0, 0.0]), np.array([3e-45, -1e-40])):
        x = numbers.astype(np.float32)
        assert fused.extremes(x) == (x.min(), x.max())
        for at in range(len(x)):
            y = x.copy()
            y[at] = odd
            low, high = fused.extremes(y)
            assert not (low > -math.inf and high < math.inf)
    c = np.abs(g.standard_normal(37))
    assert fused.largest(c) == c.max()


@pytest.mark.parametrize("lanes", [3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
def test_dots(lanes: int, tokens: int) -> None:
    g = np.random.default_rng(tokens)
    z, slots = g.standard_normal((lanes, 20)).astype(np.float32), g.permutation(80)[:tokens]
    codes = g.integers(-127, 128, (80, 2, 20), dtype=np.int8)
    x = np.full((lanes, tokens), np.nan, np.float32)
    fused.dots(z, codes, slots, 1, x)
    np.testing.assert_allclose(x, z.astype(np.float64) @ codes[slots, 1].T, rtol=1e-5, atol=1e-3)


def test_all_halves_are_read_exactly() -> None:
    bits = np.arange(0x7C00, dtype=np.int16)
    out = np.empty(len(bits), np.float32)
    fused.load_halves(bits[:, None, None], np.arange(len(bits)), 0, out)
    np.testing.assert_array_equal(out, bits.view(np.float16).astype(np.float32))
    for bad in (np.inf, np.nan, -np.inf, -np.nan, -1.0):
        one = np.array([1, bad], np.float16).view(np.int16)
        fused.load_halves(one[:, None, None], np.arange(2), 0, out[:2])
        assert out[0] == 1 and out[1] == np.inf


def test_rounding_up() -> None:
    x = np.abs(np.random.default_rng(0).standard_normal(1000)) * np.geomspace(1e-44, 1e38, 1000)
    y = np.array([fused.up(value) for value in [0.0, *x]])
    assert (y[1:] >= x).all() and y[0] == 0
    assert (y[1:] <= np.nextafter(x.astype(np.float32), np.float32(np.inf))).all()


@pytest.mark.parametrize("counts", [[0, 3, 0], [3, 0, 0], [0, 0, 0]])
def test_sequences_without_rows(monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> None:
    case = make_case(14, StoreLayout(2, 64, 64, page_size=16), [40, 40, 40], heads=4)
    indptr = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    mine, its = both(monkeypatch, case, query(case, sum(counts)), qo_indptr=indptr)
    torch.testing.assert_close(mine[0], its[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine[2].meter, its[2].meter, rtol=1e-4, atol=1e-6)
