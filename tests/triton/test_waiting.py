"""What runs on a device never makes the host wait for it: on meta tensors, in place of a device, that have no data."""

from __future__ import annotations

import contextlib
import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from aot_report import KERNELS, Recorder, meta
from torch.utils._python_dispatch import TorchDispatchMode

from witcert_kernels import (
    Budget,
    LayerCalibration,
    ObservatoryLayout,
    ObservatoryPool,
    PackedPool,
    Plan,
    StoreLayout,
    Telemetry,
    certified_decode,
    observe_,
    ops,
    quantize_,
    triton_writer,
)

from .backends import on_triton

BF16, I32 = torch.bfloat16, torch.int32
BATCH, KV_HEADS, HEADS, DIM, PAGES = 3, 2, 8, 64, 20
OPS = ("quantize_packed_", "observe_", "decode_packed", "decode_observatory")
# they would read data to know a number or a shape
READING = {
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default,
}  # fmt: skip


class NoWaiting(TorchDispatchMode):
    """Fails at an op that reads data of the device, or that copies to or from it; counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        on_device = any(isinstance(x, torch.Tensor) and x.device.type == "meta" for x in given)
        out = func(*args, **kwargs)
        made = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        places = {x.device.type for x in (*given, *made) if isinstance(x, torch.Tensor) and x.dim()}
        assert not (on_device and func in READING), f"{func} reads the device"
        assert len(places) < 2, f"{func} copies between host and device"
        self.counts[str(func)] += on_device or any(x.device.type == "meta" for x in made)
        return out


@contextlib.contextmanager
def on_device() -> Iterator[NoWaiting]:
    """The ops' own functions on meta tensors; kernels are recorded in place of launched."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_triton())
        stack.enter_context(mock.patch.object(ops, "full_precision", lambda device: contextlib.nullcontext()))
        for name in OPS:
            stack.enter_context(mock.patch.object(torch.ops.witcert, name, getattr(ops, f"_{name.rstrip('_')}")))
        for module, name in KERNELS:
            stack.enter_context(mock.patch.object(module, name, Recorder(getattr(module, name))))
        yield stack.enter_context(NoWaiting())


def moved(pool: Any) -> Any:
    """The pool without its data."""
    other = copy.copy(pool)
    own = (*pool.page_tensors, "band_of_channel", *(("bypass_channels",) if isinstance(pool, PackedPool) else ()))
    for name in own:
        setattr(other, name, getattr(pool, name).to("meta"))
    other._calibration = SimpleNamespace(**{n: getattr(pool.calibration, n).to("meta") for n in ("mu", "f", "u")})
    other.exact = SimpleNamespace(k=pool.exact.k.to("meta"), v=pool.exact.v.to("meta"))
    return other


def packed(**options: Any) -> Any:
    layout = StoreLayout(KV_HEADS, DIM, DIM, dtype=BF16, page_size=16, **options)
    pairs = torch.arange(layout.bypass).expand(KV_HEADS, -1).contiguous()
    plain = LayerCalibration.identity(KV_HEADS, DIM, bypass=pairs)
    given = LayerCalibration(plain.mu, plain.f, torch.zeros(KV_HEADS, layout.sketch, DIM), pairs)
    return moved(PackedPool(layout, 2, calibration=given, seed=1))


def observatory() -> Any:
    given = LayerCalibration.identity(KV_HEADS, DIM)
    given = LayerCalibration(given.mu, given.f, torch.zeros(KV_HEADS, 2, DIM), given.bypass)
    layout = ObservatoryLayout(KV_HEADS, DIM, DIM, dtype=BF16, page_size=16, sketch=2)
    return moved(ObservatoryPool(layout, 2, calibration=given))


def tokens(n: int, heads: int) -> torch.Tensor:
    return meta(n, heads, DIM, dtype=BF16)


def decode(pool: Any, rows: int | None = None, planned: bool = False, **options: Any) -> None:
    given: dict[str, Any] = {}
    if rows is not None:
        given = {
            "qo_indptr": meta(BATCH + 1, dtype=I32), "k_new": tokens(rows, KV_HEADS), "v_new": tokens(rows, KV_HEADS),
            "exact_pages": meta(BATCH, KV_HEADS, PAGES, dtype=I32), "sinks": meta(HEADS, dtype=BF16),
            "logits_soft_cap": 30.0, "window_left": 100, "bias": meta(rows, HEADS, 16 * PAGES, dtype=torch.float32),
        }  # fmt: skip
    if planned:
        options["plan"] = Plan(pool, HEADS, BATCH, PAGES, rows=rows, exact=rows is not None)
    telemetry = Telemetry()
    telemetry.buffer, telemetry.device = telemetry.buffer.to("meta"), torch.device("meta")
    with on_device():
        certified_decode(
            tokens(BATCH if rows is None else rows, HEADS), pool, meta(BATCH, PAGES, dtype=I32),
            meta(BATCH, dtype=I32), **given, **options, telemetry=telemetry,
        )  # fmt: skip


DECODES: dict[str, Callable[[], None]] = {
    "packed": lambda: decode(packed(sketch=1)),
    "packed-planned": lambda: decode(packed(sketch=1), planned=True),
    "packed-all": lambda: decode(
        packed(sketch=2, witness_bands=2, bypass=2, group=32, dither=True), rows=20, budget=Budget(1e-3, 2, HEADS, 100)
    ),
    "packed-extend-planned": lambda: decode(packed(sketch=1), rows=20, planned=True),
    "observatory": lambda: decode(observatory()),
    "observatory-extend-planned": lambda: decode(observatory(), rows=20, planned=True),
}


@pytest.mark.parametrize("name", DECODES)
def test_a_decode_waits_for_nothing(name: str) -> None:
    before = os.environ.get("WITCERT_BACKEND")
    with on_triton():
        DECODES[name]()
    assert os.environ.get("WITCERT_BACKEND") == before


def test_a_write_is_one_launch(n: int = 5) -> None:
    pool = packed(sketch=2, witness_bands=2, bypass=2, dither=True)
    k, v, slots = tokens(n, KV_HEADS), tokens(n, KV_HEADS), meta(n, dtype=torch.int64)
    with on_device() as seen:
        quantize_(k, v, pool, slots, slots)
        assert len(triton_writer._write_kernel.calls) == 1 and sum(seen.counts.values()) == 0


def test_an_observation_is_one_launch(n: int = 5) -> None:
    pool, slots, given = observatory(), meta(n, dtype=torch.int64), [tokens(n, KV_HEADS) for _ in range(4)]
    with on_device() as seen:
        observe_(*given, pool, slots)
        assert len(triton_writer._observe_kernel.calls) == 1 and sum(seen.counts.values()) == 0


def test_counting_with_torchs_ops_waits_for_nothing() -> None:
    telemetry = Telemetry()
    telemetry.buffer = telemetry.buffer.to("meta")
    numbers = [meta(3, HEADS, dtype=torch.float32) for _ in range(3)]
    with on_device():
        telemetry.add(*numbers, meta(3, HEADS, dtype=I32), 1)


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x + torch.tensor([1.0, 2.0]).to(x.device),
    ],
)
def test_waiting_is_seen(waiting: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((AssertionError, NotImplementedError, RuntimeError)), on_device():
        waiting(meta(2, dtype=torch.float32))
