"""The op as an op: schemas, fake kernels, torch.compile, splits, shapes and dtypes, memory, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from witcert_kernels import Budget, BudgetExhausted, PackedPool, StoreLayout, certified_decode, quantize_, reader
from witcert_kernels.precision import full_precision

from .oracle import exact_logits, make_case, softmax, stored_logits
from .test_decode import queries, tv


def test_opcheck() -> None:
    case = make_case(1, StoreLayout(2, 64, 32, page_size=8, sketch=1), [20, 9], heads=4)
    pool, cal, q = case.pool, case.pool.calibration, queries(case, 2)
    arguments = (
        q, case.page_table, case.seq_lens, None, None, None, None, pool.exact.k, pool.exact.v, None, None, pool.k_codes,
        pool.k_scale, pool.sketch, pool.witness, pool.bypass, pool.v_codes, pool.v_scale, pool.v_norm, cal.mu, cal.f,
        cal.u, pool.bypass_channels, pool.band_of_channel, False, 64, 0, 5, True, 0.125, 0.0, -1, 0.0, 1, False,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.witcert.decode_packed, arguments)
    write = (
        case.keys[0][:5], case.values[0][:5], torch.arange(5), torch.arange(5), pool.k_codes, pool.k_scale, pool.sketch,
        pool.witness, pool.bypass, pool.v_codes, pool.v_scale, pool.v_norm, cal.mu, cal.f, cal.u, pool.bypass_channels,
        pool.band_of_channel, False, 64, 0, 5,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.witcert.quantize_packed_, write)


def test_compiles_to_one_graph() -> None:
    case = make_case(2, StoreLayout(2, 64, 64, page_size=8), [30], heads=4)
    pool, cal, q = case.pool, case.pool.calibration, queries(case, 1)

    def step(q: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.witcert.decode_packed(
            q * 1.0, page_table, seq_lens, None, None, None, None, pool.exact.k, pool.exact.v, None, None, pool.k_codes,
            pool.k_scale, pool.sketch, pool.witness, pool.bypass, pool.v_codes, pool.v_scale, pool.v_norm, cal.mu,
            cal.f, cal.u, pool.bypass_channels, pool.band_of_channel, False, 64, 0, 5, True, 0.125, 0.0, -1, 0.0, 1,
            False,
        )  # fmt: skip

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(
        compiled(q, case.page_table, case.seq_lens), step(q, case.page_table, case.seq_lens), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_traced_step_takes_any_batch() -> None:
    """Write and read through the public functions, traced once with sizes that vary."""
    case = make_case(2, StoreLayout(2, 64, 64, page_size=8), [30, 12, 9], heads=4)
    q = queries(case, 3)

    def step(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, q: torch.Tensor, rows: torch.Tensor) -> Any:
        quantize_(k, v, case.pool, slots)
        out, lse, cert = certified_decode(q, case.pool, case.page_table[rows], case.seq_lens[rows])
        return out, lse, cert.meter

    traced = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (1, 2, 3):
        rows = torch.arange(count)
        slots = case.page_table[rows, 0].long() * 8
        k, v = (torch.stack([x[b][0] for b in range(count)]) for x in (case.keys, case.values))
        for got, wanted in zip(traced(k, v, slots, q[rows], rows), step(k, v, slots, q[rows], rows), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 7, 8])
def test_shapes_and_dtypes(dims: tuple[int, int], dtype: torch.dtype, heads: int) -> None:
    layout = StoreLayout(1, *dims, dtype=dtype, page_size=4, sketch=1, witness_bands=1)
    case = make_case(3, layout, [33], heads=heads, scale=0.7)
    q = queries(case, 2)[1:2]
    out, lse, cert = certified_decode(q, case.pool, case.page_table, case.seq_lens, sm_scale=dims[0] ** -0.5)
    assert out.shape == (1, heads, dims[1]) and out.dtype == dtype and lse.dtype == torch.float32
    x = exact_logits(case, 0, q[0], dims[0] ** -0.5)
    v = case.values[0].double().repeat_interleave(heads, 1)
    exact = torch.einsum("ht,thd->hd", torch.from_numpy(softmax(x)), v)
    assert bool(((out[0].double() - exact).norm(dim=-1) <= cert.value_error[0]).all())
    assert bool((cert.meter < 1).all())


@pytest.mark.parametrize("name", ["plain", "everything", "dither"])
def test_any_split_count(name: str) -> None:
    from .test_decode import LAYOUTS

    case = make_case(4, StoreLayout(2, 64, 64, page_size=4, **LAYOUTS[name]), [200], heads=4)
    q = queries(case, 2)[1:2]
    one = certified_decode(q, case.pool, case.page_table, case.seq_lens, splits=1)
    for splits in (2, 3, 7, 50, 200):
        many = certified_decode(q, case.pool, case.page_table, case.seq_lens, splits=splits)
        torch.testing.assert_close(many[0], one[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(many[2].meter, one[2].meter, rtol=1e-3, atol=2e-5)
        x, y = exact_logits(case, 0, q[0], 0.125), stored_logits(case, 0, q[0], 0.125)
        assert bool((many[2].meter[0].double().numpy() >= tv(x, y)).all())


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any op made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("length", [2048, 8192])
def test_peak_temporary_is_one_tile_a_head(length: int) -> None:
    layout = StoreLayout(2, 64, 64, page_size=64, sketch=1)
    case = make_case(5, layout, [length], heads=6)
    packed = reader.PackedReader(
        {
            **{n: getattr(case.pool, n) for n in case.pool.page_tensors},
            **{n: getattr(case.pool.calibration, n) for n in ("mu", "f", "u")},
            "bypass_channels": case.pool.bypass_channels,
            "band_of_channel": case.pool.band_of_channel,
        },
        {"dither": 0, "dither_period": 64, "seed": 0, "layer": 0},
    )
    q = queries(case, 1)
    with Largest() as largest:
        reader.decode(
            q, packed, case.page_table, case.seq_lens, None, None, None, None, case.pool.exact.k, case.pool.exact.v,
            None, None, causal=True, sm_scale=0.125, cap=0.0, window_left=-1, delta_local=0.0, splits=1,
            want_shares=False,
        )  # fmt: skip
    assert largest.bytes <= reader.TILE * 2 * 64 * 8


def test_budget() -> None:
    budget = Budget(1e-2, layers=2, heads=3, steps=10)
    assert budget.delta_local == 1e-2 / 60
    budget.spend(10)
    with pytest.raises(BudgetExhausted, match=r"budget.steps: 1 more rows after 10"):
        budget.spend(1)
    assert budget.spent == 10
    for name, value in (("delta", 0.0), ("delta", 1.5), ("layers", 0), ("steps", -1), ("delta", float("nan"))):
        with pytest.raises(ValueError, match=f"budget.{name}: got"):
            Budget(**{"delta": 0.1, "layers": 1, "heads": 1, "steps": 1, name: value})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"budget.heads: got 1\.5"):
        Budget(0.1, 1, 1.5, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows: got -1"):
        budget.spend(-1)
    assert budget.spent == 10


def test_bad_input_is_named() -> None:
    case = make_case(6, StoreLayout(2, 64, 64, page_size=8), [20, 30], heads=4)
    good: dict[str, Any] = {
        "q": queries(case, 2),
        "pool": case.pool,
        "page_table": case.page_table,
        "seq_lens": case.seq_lens,
    }
    indptr = torch.tensor([0, 1, 2], dtype=torch.int32)
    bad: list[tuple[str, type[Exception], dict[str, Any]]] = [
        ("q", TypeError, {"q": good["q"].half()}),
        ("q", TypeError, {"q": None}),
        ("q", ValueError, {"q": good["q"][..., :32]}),
        ("q", ValueError, {"q": good["q"][:, :3]}),
        ("q", ValueError, {"q": good["q"][:1]}),
        ("pool", TypeError, {"pool": 3}),
        ("page_table", TypeError, {"page_table": case.page_table.long()}),
        ("page_table", ValueError, {"page_table": case.page_table + 100}),
        ("page_table", ValueError, {"page_table": case.page_table[0]}),
        ("seq_lens", TypeError, {"seq_lens": case.seq_lens.long()}),
        ("seq_lens", ValueError, {"seq_lens": case.seq_lens + 1000}),
        ("seq_lens", ValueError, {"seq_lens": -case.seq_lens}),
        ("qo_indptr", ValueError, {"qo_indptr": indptr * 2}),
        ("k_new", ValueError, {"k_new": torch.ones(2, 3, 64), "v_new": torch.ones(2, 2, 64)}),
        ("k_new, v_new", ValueError, {"k_new": torch.ones(2, 2, 64)}),
        ("exact_pages", ValueError, {"exact_pages": torch.zeros(2, 2, case.page_table.shape[1], dtype=torch.int32)}),
        ("exact_pages", ValueError, {"exact_pages": torch.full((2, 3, 1), -1, dtype=torch.int32)}),
        ("sinks", ValueError, {"sinks": torch.zeros(3)}),
        ("sinks", ValueError, {"sinks": torch.full((4,), float("nan"))}),
        ("bias", ValueError, {"bias": torch.zeros(2, 4, 7)}),
        ("bias", ValueError, {"bias": torch.full((2, 4, 40), float("inf"))}),
        ("logits_soft_cap", ValueError, {"logits_soft_cap": -1.0}),
        ("window_left", ValueError, {"window_left": -2}),
        ("logits_soft_cap", TypeError, {"logits_soft_cap": np.ones(2)}),
        ("sm_scale", ValueError, {"sm_scale": 0.0}),
        ("sm_scale", TypeError, {"sm_scale": "1.0"}),
        ("sm_scale", TypeError, {"sm_scale": True}),
        ("sm_scale", TypeError, {"sm_scale": torch.ones(2)}),
        ("splits", ValueError, {"splits": 0}),
        ("budget", TypeError, {"budget": 0.01}),
        ("window_left", TypeError, {"window_left": 1.5}),
        ("splits", TypeError, {"splits": 2.0}),
        ("causal", TypeError, {"causal": "no"}),
        ("return_shares", TypeError, {"return_shares": None}),
    ]
    for name, kind, change in bad:
        with pytest.raises(kind, match=f"^{name}: got"):
            certified_decode(**{**good, **change})


def test_pool_copies_move_every_part() -> None:
    layout = StoreLayout(2, 64, 64, page_size=8, sketch=1, witness_bands=1, bypass=1)
    case = make_case(7, layout, [20, 30], heads=4)
    q = queries(case, 2)
    before = certified_decode(q, case.pool, case.page_table, case.seq_lens)
    order = torch.arange(case.pool.num_pages).flip(0)
    case.pool.take_pages(order, case.pool.num_pages + 4)
    moved = torch.where(case.page_table < 0, -1, case.pool.num_pages - 5 - case.page_table).to(torch.int32)
    after = certified_decode(q, case.pool, moved, case.seq_lens)
    for x, y in zip(
        (before[0], before[2].meter, before[2].value_error),
        (after[0], after[2].meter, after[2].value_error),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert isinstance(case.pool, PackedPool) and all(
        len(getattr(case.pool, n)) == case.pool.num_pages for n in case.pool.page_tensors
    )


def test_copies_of_no_page_are_named() -> None:
    pool = PackedPool(StoreLayout(2, 64, 64), 3)
    k_codes = pool.k_codes
    bad: list[tuple[str, type[Exception], Any]] = [
        ("pages", TypeError, [[0, 1]]),
        ("pages", TypeError, [torch.tensor([0, 1], dtype=torch.int32)]),
        ("pages", ValueError, [torch.tensor([[0, 1]])]),
        ("pages", ValueError, [torch.tensor([0, 3])]),
        ("pages", ValueError, [torch.tensor([-1, 2])]),
        ("num_pages", ValueError, [torch.tensor([0, 1]), 1]),
        ("num_pages", TypeError, [torch.tensor([0, 1]), 2.0]),
    ]
    for name, kind, arguments in bad:
        with pytest.raises(kind, match=f"^{name}: got"):
            pool.take_pages(*arguments)
    assert pool.k_codes is k_codes
    pool.take_pages(torch.tensor([], dtype=torch.int64))
    assert pool.num_pages == 0


def test_reduced_precision_elsewhere_does_not_matter() -> None:
    """Under autocast, and with float32 products allowed in bfloat16, bytes and certificates are the same."""
    layout = StoreLayout(2, 64, 64, page_size=8, sketch=2)
    plain = make_case(8, layout, [90], heads=4)
    q = queries(plain, 2)[1:2]
    wanted = certified_decode(q, plain.pool, plain.page_table, plain.seq_lens)
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            case = make_case(8, layout, [90], heads=4)
            got = certified_decode(q, case.pool, case.page_table, case.seq_lens)
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before
    assert all(
        torch.equal(getattr(case.pool, n).nan_to_num(), getattr(plain.pool, n).nan_to_num())
        for n in case.pool.page_tensors
    )
    for x, y in zip((*got[:2], got[2].meter), (*wanted[:2], wanted[2].meter), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_another_default_dtype_does_not_matter() -> None:
    layout = StoreLayout(2, 64, 64, page_size=8, group=32, witness_bands=2)
    wanted = make_case(9, layout, [30], heads=4, calibrated=False)
    q = queries(wanted, 2)[1:2]
    torch.set_default_dtype(torch.bfloat16)
    try:
        pool = PackedPool(layout, wanted.pool.num_pages)
        for name in pool.page_tensors:
            getattr(pool, name).copy_(getattr(wanted.pool, name))
        got = certified_decode(q, pool, wanted.page_table, wanted.seq_lens, return_shares=True)
    finally:
        torch.set_default_dtype(torch.float32)
    plain = certified_decode(q, wanted.pool, wanted.page_table, wanted.seq_lens, return_shares=True)
    torch.testing.assert_close((got[0], got[2].meter, got[2].shares), (plain[0], plain[2].meter, plain[2].shares))


def test_precision_is_held_until_the_last_one_leaves() -> None:
    matmul = torch.backends.mkldnn.matmul
    before, device = matmul.fp32_precision, torch.device("cpu")
    matmul.fp32_precision = "bf16"
    try:
        first, second = full_precision(device), full_precision(device)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert matmul.fp32_precision == "ieee"
        second.__exit__(None, None, None)
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before


def test_a_backend_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(1, StoreLayout(1, 64, 64), [5], heads=1)
    monkeypatch.setenv("WITCERT_BACKEND", "tritn")
    with pytest.raises(ValueError, match=r"^WITCERT_BACKEND: got 'tritn'"):
        certified_decode(queries(case, 1), case.pool, case.page_table, case.seq_lens)
