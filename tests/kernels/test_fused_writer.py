"""The compiled writer against the torch one: the same bytes, but where only the order of a sum differs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from witcert_kernels import PackedPool, StoreLayout, fused_writer, quantize_, writer

from .oracle import random_calibration

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sketch": {"sketch": 4, "page_size": 1},
    "witness": {"witness_bands": 4, "sketch": 2},
    "bypass": {"bypass": 3, "sketch": 1},
    "groups": {"group": 16, "sketch": 2, "witness_bands": 3},
    "dither": {"dither": True, "dither_period": 8, "witness_bands": 2, "bypass": 2, "sketch": 1},
    "interleaved": {"witness_bands": 4, "bypass": 2, "rope_layout": "interleaved"},
}


def numbers(layout: StoreLayout, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values over many magnitudes; zeros, subnormals and numbers that are not finite among them."""
    g = torch.Generator().manual_seed(n)
    scale = torch.logspace(-9, 4, n)[:, None, None]
    k, v = (scale * torch.randn(n, layout.kv_heads, width, generator=g) for width in (64, 48))
    k[3], v[3], k[4, 0, 5], v[4, 1, 7] = 0.0, 0.0, 1e-41, -1e-41
    k[5, 0, 1], k[6, 1, 63], v[7, 0, 0], v[8, 1, 2], k[9, 0, 8], v[9] = (
        math.nan,
        math.inf,
        -math.inf,
        math.nan,
        3e38,
        3e38,
    )
    return k.to(layout.dtype), v.to(layout.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_writes_what_the_torch_writer_writes(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    layout = StoreLayout(2, 64, 48, **{"page_size": 16, "dtype": dtype, **LAYOUTS[name]})
    g = torch.Generator().manual_seed(1)
    calibration = random_calibration(g, 2, 64, layout.sketch, layout.bypass, layout.rope_layout)
    k, v = numbers(layout, 200)
    slots = torch.randperm(400, generator=g)[:200]
    pools = []
    for other, backend in ((writer, ""), (fused_writer, "torch")):
        monkeypatch.setenv("WITCERT_BACKEND", backend)
        pools.append(PackedPool(layout, 400 // layout.page_size, layer=3, calibration=calibration, seed=11))
        with monkeypatch.context() as patch:
            patch.setattr(other, "write_packed", None)
            quantize_(k, v, pools[-1], slots, torch.arange(200))
    mine, its = pools
    for field in mine.page_tensors:
        got, wanted = getattr(mine, field), getattr(its, field)
        if field == "v_norm":
            torch.testing.assert_close(got, wanted, rtol=2.0**-23, atol=0)
        elif field in ("sketch", "witness"):
            off = (got.int() - wanted.int()).abs()
            assert not bool((off > 1).any()) and int(off.sum()) <= off.numel() // 1000
        else:
            assert torch.equal(got, wanted), field
    assert bool(mine.k_scale.isinf().any()) and bool(mine.v_scale.isinf().any())


def test_pools_and_keys_of_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = StoreLayout(2, 64, 48, page_size=8)
    k, v = numbers(layout, 40)
    plain, strided = (PackedPool(layout, 5) for _ in range(2))
    strided.k_codes = torch.zeros(5, 2, 8, 64, dtype=torch.int8).transpose(1, 2)
    strided.v_scale = torch.zeros(5, 8, 2, 3, dtype=torch.float16)[..., 1:2]
    quantize_(k, v, plain, torch.arange(40))
    k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    quantize_(k, v, strided, torch.arange(80)[::2] // 2)
    assert torch.equal(plain.k_codes, strided.k_codes) and torch.equal(plain.v_scale, strided.v_scale)


@pytest.mark.parametrize("slot", [-1, 32])
def test_a_traced_call_writes_to_no_slot_that_is_not_there(slot: int) -> None:
    pool = PackedPool(StoreLayout(2, 64, 48, page_size=16), 2)
    k, v = numbers(pool.layout, 10)
    traced = torch.compile(lambda at: quantize_(k, v, pool, at), fullgraph=True, backend="aot_eager")
    slots = torch.arange(10)
    slots[9] = slot
    with pytest.raises(ValueError, match="slots"):
        traced(slots)
    assert not bool(pool.k_codes.any())
