"""``witcert_kernels`` behind the suite's protocol: the torch path, numba, Triton's interpreter, Triton on a GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata, util
from typing import Any

import numpy as np
import torch
from torch import Tensor

import witcert_kernels as wk

from ..adapter import (
    Account,
    Array,
    Budget,
    Calibration,
    Counts,
    Decoded,
    Gated,
    Info,
    Ints,
    Layout,
    Observed,
    Read,
    Stored,
)

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which the first call of a kernel does
    os.environ.setdefault("TRITON_INTERPRET", "1")

_OFFERS = frozenset({
    "groups", "witness", "sketch", "equaliser", "bypass", "dither", "value_error", "risk", "splits", "extend", "sinks",
    "soft_cap", "window", "bias", "repair", "page_reuse", "reorder", "binding", "observatory", "settings", "refusals",
    "telemetry",
})  # fmt: skip


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _package_offers() -> frozenset[str]:
    """The groups that ``witcert`` keeps, where it and what it imports are installed."""
    try:
        from .package import OFFERS
    except ImportError:
        return frozenset()
    return OFFERS


@cache
def _info(name: str, device: str, slow: bool) -> Info:
    return Info(
        name=name,
        version=_version("witcert"),
        device=device,
        offers=_OFFERS | _package_offers(),
        head_dims=(2, 4, 8, 16, 64),
        head_dims_v=(2, 4, 8, 64),
        page_sizes=(1, 2, 4, 8, 16, 64),
        dtypes=("float32", "float16", "bfloat16"),
        slow=slow,
        cell_share=1 / 1000 if slow else 1.0,
        versions={"torch": torch.__version__, "triton": _version("triton"), "numba": _version("numba")},
    )


@dataclass
class _Store:
    pool: wk.PackedPool | wk.ObservatoryPool
    layout: Layout
    k: Tensor  # the backing store: every slot's exact key and value
    v: Tensor
    exact: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    telemetry: wk.Telemetry | None = None


def _numpy(x: Tensor) -> Array:
    return np.asarray(x.detach().to("cpu", torch.float64).numpy())


class Kernels:
    """What they have in common."""

    device = "cpu"
    backend = ""
    name = "torch-cpu"
    slow = False

    @property
    def info(self) -> Info:
        return _info(self.name, self.device, self.slow)

    @contextmanager
    def _on(self) -> Iterator[None]:
        """Select the backend for one call."""
        before = os.environ.get("WITCERT_BACKEND")
        os.environ["WITCERT_BACKEND"] = self.backend
        try:
            yield
        finally:
            if before is None:
                del os.environ["WITCERT_BACKEND"]
            else:
                os.environ["WITCERT_BACKEND"] = before

    def _tensor(self, x: Array, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.device, dtype)

    def _calibration(self, calibration: Calibration | None, layout: Layout) -> wk.LayerCalibration | None:
        if calibration is None:
            return None
        return wk.LayerCalibration(
            mu=self._tensor(calibration.mu, torch.float32),
            f=self._tensor(calibration.f, torch.float32),
            u=self._tensor(calibration.u, torch.float32),
            bypass=self._tensor(calibration.bypass, torch.int64),
            rope_layout=layout.rope_layout,
            rotary_dim=layout.rotary_dim,
        )

    def create(
        self, layout: Layout, pages: int, calibration: Calibration | None = None, layer: int = 0, seed: int = 0
    ) -> _Store:
        pool = wk.PackedPool(
            wk.StoreLayout(
                layout.kv_heads, layout.head_dim, layout.head_dim_v, getattr(torch, layout.dtype), layout.page_size,
                layout.group, layout.sketch, layout.witness_bands, layout.bypass, layout.dither, layout.dither_period,
                layout.rope_layout, layout.rotary_dim,
            ),
            pages,
            layer=layer,
            calibration=self._calibration(calibration, layout),
            seed=seed,
            device=self.device,
        )  # fmt: skip
        return self._store(pool, layout, pages)

    def _store(self, pool: wk.PackedPool | wk.ObservatoryPool, layout: Layout, pages: int) -> _Store:
        shape = (pages * layout.page_size, layout.kv_heads)
        k, v = (torch.zeros(*shape, d, dtype=pool.layout.dtype) for d in (layout.head_dim, layout.head_dim_v))
        return _Store(pool, layout, k.to(self.device), v.to(self.device))

    def _keep(self, store: _Store, k: Array, v: Array, slots: Ints) -> tuple[Tensor, Tensor, Tensor]:
        dtype = store.pool.layout.dtype
        keys, values, at = self._tensor(k, dtype), self._tensor(v, dtype), self._tensor(slots, torch.int64)
        return keys, values, at

    def quantize(self, store: _Store, k: Array, v: Array, slots: Ints, positions: Ints) -> None:
        keys, values, at = self._keep(store, k, v, slots)
        assert isinstance(store.pool, wk.PackedPool)
        with self._on():
            wk.quantize_(keys, values, store.pool, at, self._tensor(positions, torch.int64))
        store.k[at], store.v[at] = keys, values

    def stored(self, store: _Store) -> Stored:
        pool = store.pool
        assert isinstance(pool, wk.PackedPool)
        return Stored(
            codes=_numpy(pool.k_codes), scale=_numpy(pool.k_scale), v_codes=_numpy(pool.v_codes),
            v_scale=_numpy(pool.v_scale), sketch=_numpy(pool.sketch), witness=_numpy(pool.witness),
            bypass=_numpy(pool.bypass),
        )  # fmt: skip

    def dequantize(self, store: _Store) -> tuple[Array, Array]:
        pool = store.pool
        assert isinstance(pool, wk.PackedPool)
        width, width_v = (store.layout.head_dim // pool.layout.groups, store.layout.head_dim_v // pool.layout.groups_v)
        x = pool.k_codes.double() * pool.k_scale.double().repeat_interleave(width, -1)
        k = x * pool.calibration.f.double() + pool.calibration.mu.double()
        if store.layout.bypass:
            k.scatter_(-1, pool.bypass_channels.expand(*k.shape[:3], -1), pool.bypass.double())
        return _numpy(k), _numpy(pool.v_codes.double() * pool.v_scale.double().repeat_interleave(width_v, -1))

    def _arguments(self, store: _Store, read: Read) -> dict[str, Any]:
        """The op's arguments, as tensors on the device."""
        dtype, b = store.pool.layout.dtype, read.budget

        def ints(x: Ints | None) -> Tensor | None:
            return None if x is None else self._tensor(x, torch.int32)

        def floats(x: Array | None, kind: torch.dtype) -> Tensor | None:
            return None if x is None else self._tensor(x, kind)

        return {
            "q": self._tensor(read.q, dtype),
            "pool": store.pool,
            "page_table": ints(read.page_table),
            "seq_lens": ints(read.seq_lens),
            "qo_indptr": ints(read.qo_indptr),
            "k_new": floats(read.k_new, dtype),
            "v_new": floats(read.v_new, dtype),
            "causal": read.causal,
            "exact_pages": ints(read.exact_pages),
            "sm_scale": read.sm_scale,
            "sinks": floats(read.sinks, torch.float32),
            "logits_soft_cap": read.soft_cap,
            "window_left": read.window_left,
            "bias": floats(read.bias, torch.float32),
            "budget": None if b is None else wk.Budget(b.delta, b.layers, b.heads, b.steps),
            "splits": read.splits,
        }

    def decode(self, store: _Store, read: Read) -> Decoded:
        store.telemetry = store.telemetry or wk.Telemetry(device=self.device)
        with self._on():
            out, lse, cert = wk.certified_decode(**self._arguments(store, read), telemetry=store.telemetry)
        return self._report(out, lse, cert)

    def _report(self, out: Tensor, lse: Tensor, cert: wk.Certificate) -> Decoded:
        return Decoded(
            out=_numpy(out), lse=_numpy(lse), meter=_numpy(cert.meter), guarantee=cert.guarantee,
            eform=_numpy(cert.eform), risk=_numpy(cert.risk), value_error=_numpy(cert.value_error),
        )  # fmt: skip

    def account(self, store: _Store) -> Account:
        layout = store.pool.layout
        value = (
            layout.head_dim_v + 2 * layout.groups_v if isinstance(layout, wk.StoreLayout) else 2 * layout.head_dim_v + 2
        )
        page = layout.bytes_per_page // layout.kv_heads - layout.page_size * layout.bytes_per_token
        return Account(key=layout.bytes_per_token - value, value=value, page=page)

    def allocated(self, store: _Store) -> int:
        return store.pool.nbytes

    def bands(self, layout: Layout) -> Ints:
        pool = wk.StoreLayout(
            1, layout.head_dim, layout.head_dim_v, witness_bands=layout.witness_bands, rope_layout=layout.rope_layout,
            rotary_dim=layout.rotary_dim,
        )  # fmt: skip
        return np.asarray(pool.band_of_channel.numpy())

    def delta_local(self, budget: Budget) -> float:
        return wk.Budget(budget.delta, budget.layers, budget.heads, budget.steps).delta_local

    def page_in(self, store: _Store, page: int, kv_head: int) -> int:
        part = slice(page * store.layout.page_size, (page + 1) * store.layout.page_size)
        store.exact.append((store.k[part, kv_head], store.v[part, kv_head]))
        pool = store.pool
        pool.exact = wk.ExactPages(pool.layout, len(store.exact), self.device)
        for i, (k, v) in enumerate(store.exact):
            pool.exact.k[i], pool.exact.v[i] = k, v
        return len(store.exact) - 1

    def gate(self, store: _Store, read: Read, tau: float) -> Gated:
        from .package import GatedStore, gate

        table = self._tensor(read.page_table, torch.int32)
        exact = torch.full(
            (len(table), store.layout.kv_heads, table.shape[1]), -1, dtype=torch.int32, device=self.device
        )
        gated = GatedStore(
            store.pool, table, read.seq_lens.tolist(), exact, lambda page, kv_head: self.page_in(store, page, kv_head)
        )
        with self._on():
            reading = gate(gated, self._tensor(read.q, store.pool.layout.dtype), read.sm_scale, tau)
        report = self._report(reading.out, reading.lse, reading.certificate)
        return Gated(report, np.asarray((exact >= 0).cpu().numpy()), tuple(gated.page_ins))

    def fit(self, keys: Array, layout: Layout) -> tuple[Array, Array]:
        from .package import fit_equaliser

        return fit_equaliser(keys, layout)

    def read_with(self, store: _Store, calibration: Calibration, read: Read) -> Decoded:
        own = self._calibration(calibration, store.layout)
        assert own is not None
        store.pool.calibration = replace(own, u=own.u[:, : store.layout.sketch].contiguous())
        return self.decode(store, read)

    def settings(self) -> dict[str, AbstractContextManager[Any]]:
        return {
            "autocast": torch.autocast(self.device, dtype=torch.bfloat16),
            "products in bfloat16": self._matmul("bf16"),
            "default dtype float64": self._default(torch.float64),
        }

    @contextmanager
    def _matmul(self, precision: str) -> Iterator[None]:
        """Float32 products in another precision, as ``torch.set_float32_matmul_precision`` allows."""
        backend = torch.backends.cuda if self.device == "cuda" else torch.backends.mkldnn
        matmul: Any = backend.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "tf32" if self.device == "cuda" else precision
        try:
            yield
        finally:
            matmul.fp32_precision = before

    @contextmanager
    def _default(self, dtype: torch.dtype) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def telemetry(self, store: _Store) -> Counts:
        assert store.telemetry is not None
        counters = store.telemetry.read()
        return Counts(cells=counters.cells, nonfinite=counters.non_finite, max_meter=counters.max_meter)

    def free(self, store: _Store, pages: Ints) -> None:
        store.pool.v_norm[self._tensor(pages, torch.int64)] = 0

    def poison(self, store: _Store, slots: Ints) -> None:
        at = self._tensor(slots, torch.int64)
        page, offset = at // store.layout.page_size, at % store.layout.page_size
        for name in store.pool.page_tensors[:-1]:
            tensor: Tensor = getattr(store.pool, name)
            tensor[page, offset] = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max

    def take_pages(self, store: _Store, pages: Ints) -> None:
        at = self._tensor(pages, torch.int64)
        store.pool.take_pages(at)
        for name in ("k", "v"):
            kept = getattr(store, name).unflatten(0, (-1, store.layout.page_size))[at].flatten(0, 1)
            setattr(store, name, kept)

    def create_observatory(self, layout: Layout, pages: int, calibration: Calibration | None = None) -> _Store:
        pool = wk.ObservatoryPool(
            wk.ObservatoryLayout(
                layout.kv_heads, layout.head_dim, layout.head_dim_v, getattr(torch, layout.dtype), layout.page_size,
                layout.witness_bands, layout.sketch, layout.rope_layout, layout.rotary_dim,
            ),
            pages,
            calibration=self._calibration(calibration, layout),
            device=self.device,
        )  # fmt: skip
        return self._store(pool, layout, pages)

    def observe(self, store: _Store, k: Array, v: Array, k_hat: Array, v_hat: Array, slots: Ints) -> None:
        keys, values, at = self._keep(store, k, v, slots)
        assert isinstance(store.pool, wk.ObservatoryPool)
        with self._on():
            new_k, new_v = (self._tensor(x, torch.float32) for x in (k_hat, v_hat))
            wk.observe_(keys, values, new_k, new_v, store.pool, at)
        store.k[at], store.v[at] = keys, values

    def observed(self, store: _Store) -> Observed:
        pool = store.pool
        assert isinstance(pool, wk.ObservatoryPool)
        scale = _numpy(pool.sketch_scale)
        return Observed(
            k_hat=_numpy(pool.k_hat), v_hat=_numpy(pool.v_hat), witness=_numpy(pool.witness),
            sketch=_numpy(pool.sketch), sketch_scale=scale[..., 0] if scale.shape[-1] else np.zeros(scale.shape[:-1]),
            v_error=_numpy(pool.v_error)[..., 0],
        )  # fmt: skip


class TorchCpu(Kernels):
    """The vectorised torch path."""

    backend = "torch"


class NumbaCpu(Kernels):
    """What CPU tensors take where numba is installed: writes and plain decodes compiled, the rest of the torch path."""

    name = "numba-cpu"

    def __init__(self) -> None:
        if util.find_spec("numba") is None:
            raise ImportError("numba is not installed")


class TritonInterpret(Kernels):
    """The Triton source under Triton's interpreter, on CPU tensors."""

    name = "triton-interpret"
    backend = "triton"
    slow = True

    def __init__(self) -> None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ImportError("the interpreter needs a process of its own: set TRITON_INTERPRET=1 before it starts")


class TritonCuda(Kernels):
    """Triton on a GPU."""

    name = "triton-cuda"
    device = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ImportError("no CUDA device on this machine")
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise ImportError("TRITON_INTERPRET=1 is set: Triton would not compile")

    @property
    def info(self) -> Info:
        shared = super().info
        return replace(shared, device=torch.cuda.get_device_name(), offers=shared.offers | {"cuda_graphs"})

    def replay(self, store: _Store, reads: list[Read], order: list[int]) -> list[Decoded]:
        graphs = []
        for read in reads:
            arguments = self._arguments(store, read) | {"telemetry": store.telemetry}
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compiles the kernels outside of the capture
                wk.certified_decode(**arguments)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = wk.certified_decode(**arguments)
            graphs.append((graph, results))
        reports = []
        for i in order:
            graph, (out, lse, cert) = graphs[i]
            graph.replay()
            reports.append(self._report(out, lse, cert))
        return reports

    def synchronisations(self, store: _Store, read: Read) -> int:
        arguments = self._arguments(store, read)
        wk.certified_decode(**arguments)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                wk.certified_decode(**arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(w.message) for w in caught)
