"""The Triton writer stores the bytes that the torch writer stores."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.oracle import random_calibration
from witcert_kernels import (
    LayerCalibration,
    ObservatoryLayout,
    ObservatoryPool,
    PackedPool,
    StoreLayout,
    observe_,
    quantize_,
)

from .backends import CUDA, decode_torch, decode_triton, on_cpu, on_triton, to_device

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, under the interpreter

CASES = {
    "plain": (64, 64, torch.float32, {}),
    "odd-dims": (80, 48, torch.float16, {"sketch": 2}),
    "groups": (96, 64, torch.bfloat16, {"group": 32, "sketch": 1, "witness_bands": 3, "bypass": 1}),
    "one-channel-groups": (16, 8, torch.float32, {"group": 1, "sketch": 2, "witness_bands": 8}),
    "wide": (192, 128, torch.bfloat16, {"sketch": 4, "witness_bands": 5, "bypass": 4}),
    "latent": (576, 512, torch.bfloat16, {"sketch": 1}),
    "dither": (64, 64, torch.float32, {"dither": True, "dither_period": 8, "sketch": 3, "witness_bands": 4}),
    "dither-groups": (64, 32, torch.float16, {"dither": True, "dither_period": 1, "group": 8, "bypass": 2}),
    "interleaved": (64, 64, torch.float32, {"rope_layout": "interleaved", "bypass": 3, "witness_bands": 4}),
}


def write(layout: StoreLayout, k: torch.Tensor, v: torch.Tensor, triton: bool) -> PackedPool:
    """A pool with the tokens at shuffled slots, some pages left as they were."""
    n = len(k)
    g = torch.Generator().manual_seed(5)
    calibration = random_calibration(
        g, layout.kv_heads, layout.head_dim, layout.sketch, layout.bypass, layout.rope_layout
    )
    device = "cuda" if triton and CUDA else "cpu"
    pool = PackedPool(
        layout, 2 + 2 * n // layout.page_size, layer=2**31 + 3, calibration=calibration, seed=2**63 + 9, device=device
    )
    slots = torch.randperm(pool.num_pages * layout.page_size, generator=g)[:n]
    positions = torch.randint(0, 10000, (n,), generator=g)
    with on_triton() if triton else on_cpu():
        quantize_(*(x.to(device) for x in (k, v)), pool, slots.to(device), positions.to(device))
    return pool


def assert_same_bytes(layout: StoreLayout, k: torch.Tensor, v: torch.Tensor) -> None:
    expected, got = write(layout, k, v, triton=False), write(layout, k, v, triton=True)
    for name in expected.page_tensors:
        torch.testing.assert_close(getattr(got, name).cpu(), getattr(expected, name), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_same_bytes(name: str) -> None:
    d, d_v, dtype, options = CASES[name]
    layout = StoreLayout(2, d, d_v, dtype=dtype, page_size=4, **options)
    g = torch.Generator().manual_seed(1)
    scale = torch.logspace(-3, 2, 37)[:, None, None]
    k = (torch.randn(37, 2, d, generator=g) * scale).to(dtype)
    v = (torch.randn(37, 2, d_v, generator=g) * scale).to(dtype)
    assert_same_bytes(layout, k, v)


@pytest.mark.parametrize("dither", [False, True])
def test_same_bytes_at_the_edges(dither: bool) -> None:
    """NaN, infinities, zeros, subnormal numbers, ties, and keys whose scale overflows."""
    layout = StoreLayout(1, 16, 16, page_size=2, group=8, sketch=1, witness_bands=2, bypass=1, dither=dither)
    edges = [math.nan, math.inf, -math.inf, 0.0, 1e-45, 1e-30, 3e38, 65504 * 127.0, 65505 * 127.0, -(2.0**-24), 0.5]
    k = torch.linspace(-1, 1, 16).repeat(len(edges) + 1, 1, 1)
    k[-1, 0] = torch.arange(16) / 2 - 4  # ties between codes, where the group's step is a power of two
    v = k.clone()
    for i, x in enumerate(edges):
        k[i, 0, i], v[-1 - i, 0, i] = x, x
    assert_same_bytes(layout, k, v)


def test_tensors_that_are_not_contiguous() -> None:
    """A calibration's are copied; a pool's are refused, where a kernel would read or write past them."""
    g = torch.Generator().manual_seed(3)
    mu, f = torch.randn(8, 2, generator=g).T, torch.tensor([[0.5]]).expand(2, 8)
    calibration = LayerCalibration(mu, f, torch.zeros(2, 0, 8), torch.zeros(2, 0, dtype=torch.int64))
    pool = PackedPool(StoreLayout(2, 8, 8, page_size=4), 1, calibration=calibration)
    k, q = (torch.randn(4, n, 8, generator=g) for n in (2, 2))
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    with on_cpu():
        quantize_(k, k, pool, torch.arange(4))
    want = decode_torch(q[:1], pool, table, lengths)
    got = decode_triton(q[:1], pool, table, lengths)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    assert float(got[2].meter.max()) < 0.1
    pool.v_codes = torch.zeros(1, 4, 2, 16, dtype=torch.int8)[..., ::2]
    device = "cuda" if CUDA else "cpu"
    with on_triton(), pytest.raises(ValueError, match=r"^pool.v_codes: got strides"):
        quantize_(k.to(device), k.to(device), to_device(pool), torch.arange(4, device=device))
    with pytest.raises(ValueError, match=r"^pool.v_codes: got strides"):
        decode_triton(q[:1], pool, table, lengths)


def test_no_tokens() -> None:
    layout = StoreLayout(2, 64, 64)
    assert_same_bytes(layout, torch.zeros(0, 2, 64), torch.zeros(0, 2, 64))


def observe(layout: ObservatoryLayout, given: list[torch.Tensor], triton: bool) -> ObservatoryPool:
    """An observatory with the tokens at shuffled slots, some pages left as they were."""
    n, g = len(given[0]), torch.Generator().manual_seed(6)
    calibration = random_calibration(g, layout.kv_heads, layout.head_dim, layout.sketch, 0)
    device = "cuda" if triton and CUDA else "cpu"
    pool = ObservatoryPool(layout, 2 + 2 * n // layout.page_size, calibration=calibration, device=device)
    slots = torch.randperm(pool.num_pages * layout.page_size, generator=g)[:n]
    with on_triton() if triton else on_cpu():
        observe_(*(x.to(device) for x in given), pool, slots.to(device))
    return pool


def assert_same_observatory(layout: ObservatoryLayout, given: list[torch.Tensor]) -> None:
    """The same bytes, but for norms that end next to each other in fp16: both are upper bounds."""
    expected, got = (observe(layout, given, triton) for triton in (False, True))
    for name in expected.page_tensors:
        mine, wanted = getattr(got, name).cpu(), getattr(expected, name)
        if name in ("witness", "sketch_scale", "v_error"):
            assert bool(((mine.view(torch.int16) - wanted.view(torch.int16)).abs() <= 1).all()), name
            assert (mine != wanted).sum() <= wanted.numel() // 100, name
        elif name == "v_norm":
            torch.testing.assert_close(mine, wanted, rtol=2.0**-10, atol=0, msg=name)
        else:
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("dtype", "new", "d", "d_v", "options"),
    [
        (torch.float32, torch.float32, 64, 48, {"sketch": 2, "witness_bands": 4}),
        (torch.bfloat16, torch.float32, 80, 64, {"sketch": 1, "witness_bands": 5}),
        (torch.float16, torch.bfloat16, 64, 64, {"witness_bands": 32}),
        (torch.bfloat16, torch.bfloat16, 576, 512, {"sketch": 1}),
    ],
)
def test_same_observatory(dtype: torch.dtype, new: torch.dtype, d: int, d_v: int, options: dict[str, int]) -> None:
    layout = ObservatoryLayout(2, d, d_v, dtype=dtype, page_size=4, **options)
    g = torch.Generator().manual_seed(7)
    scale = torch.logspace(-3, 2, 37)[:, None, None]
    exact = [torch.randn(37, 2, width, generator=g) * scale for width in (d, d_v)]
    noisy = [x * (1 + 0.02 * torch.randn(x.shape, generator=g)) for x in exact]
    assert_same_observatory(layout, [*(x.to(dtype) for x in exact), *(x.to(new) for x in noisy)])


def test_same_observatory_at_the_edges() -> None:
    """NaN and infinities on either side, zeros, subnormal numbers, reconstructions and norms beyond fp16's range."""
    layout = ObservatoryLayout(1, 16, 16, page_size=2, witness_bands=2, sketch=2)
    edges = [math.nan, math.inf, -math.inf, 0.0, 1e-45, 1e-30, 3e38, 65504.0, 65520.0, 6e-8, 60000.0]
    k = torch.linspace(-1, 1, 16).repeat(2 * len(edges), 1, 1)
    given = [k.clone() for _ in range(4)]
    for i, x in enumerate(edges):
        given[0][i, 0, i], given[1][-1 - i, 0, i] = x, x
        given[2][len(edges) + i, 0, i], given[3][i, 0, i] = x, x
    assert_same_observatory(layout, given)
