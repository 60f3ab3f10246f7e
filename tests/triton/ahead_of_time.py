"""Compile the kernels of some calls for Hopper without a device, and print what came out as JSON.

The calls run on meta tensors, which have shapes and no data: a host path that read a value would raise. Run as a
process of its own, since a process either interprets kernels or compiles them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from witcert_kernels import (
    LayerCalibration,
    ObservatoryLayout,
    ObservatoryPool,
    PackedPool,
    StoreLayout,
    triton_exact,
    triton_observatory,
    triton_query,
    triton_reader,
    triton_state,
    triton_writer,
)

BF16, F32 = torch.bfloat16, torch.float32
KERNELS = [
    (triton_writer, "_write_kernel"),
    (triton_query, "_query_kernel"),
    (triton_reader, "_packed_kernel"),
    (triton_exact, "_exact_kernel"),
    (triton_observatory, "_query_kernel"),
    (triton_observatory, "_observatory_kernel"),
    (triton_state, "_merge_kernel"),
]
TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip


class Recorder:
    """Stands for a kernel and keeps the arguments of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(isinstance(n, int) and n > 0 for n in grid)
        return lambda *args, **options: self.calls.append((args, options))


def compile_call(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Specialise a launch as the runtime would, compile it for sm_90, and report on the result."""
    names = kernel.arg_names
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in options.items() if k in names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        free = not parameter.do_not_specialize
        if parameter.is_constexpr or (type(value) is int and value == 1 and free):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(i,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
            if value % 16 == 0 and free:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    settings = {k: v for k, v in options.items() if k not in names}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=settings)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    resources = {name.lower(): int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    instructions = sorted(set(re.findall(r"^\s+(?:@\S+ )?([a-z]\S+)", compiled.asm["ptx"], re.M)))
    return {"kernel": kernel.__name__, "shared": compiled.metadata.shared, "ptx": instructions, **resources}


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def calibration(kv_heads: int, d: int, sketch: int, bypass: int) -> LayerCalibration:
    pairs = torch.arange(bypass).expand(kv_heads, -1).contiguous()
    plain = LayerCalibration.identity(kv_heads, d, bypass=pairs)
    return LayerCalibration(plain.mu, plain.f, torch.zeros(kv_heads, sketch, d), pairs)


def arguments(layout: StoreLayout | ObservatoryLayout, rows: int, heads: int, batch: int, extend: bool) -> list[Any]:
    """The op's tensors before those of the pool: decode over long sequences, or a ragged batch with everything."""
    pages, kv, dtype = 512, layout.kv_heads, layout.dtype
    exact = [meta(3, layout.page_size, d, dtype=dtype) for d in (layout.head_dim, layout.head_dim_v)]
    head = [meta(rows, heads, layout.head_dim, dtype=dtype), meta(batch, pages, dtype=torch.int32)]
    head.append(meta(batch, dtype=torch.int32))
    if not extend:
        return [*head, None, None, None, None, *exact, None, None]
    new = [meta(rows, kv, d, dtype=dtype) for d in (layout.head_dim, layout.head_dim_v)]
    slots, sinks = meta(batch, kv, pages, dtype=torch.int32), meta(heads, dtype=dtype)
    bias = meta(rows, heads, 1000, dtype=torch.float32)
    return [*head, meta(batch + 1, dtype=torch.int32), *new, slots, *exact, sinks, bias]


def packed(layout: StoreLayout, rows: int, heads: int, batch: int, extend: bool = False, radius: bool = False) -> None:
    """Write one token and decode."""
    pool = PackedPool(
        layout, 1, calibration=calibration(layout.kv_heads, layout.head_dim, layout.sketch, layout.bypass), seed=2**63
    )
    names = (*pool.page_tensors, "bypass_channels", "band_of_channel")
    tensors = {n: getattr(pool, n).to("meta") for n in names}
    tensors |= {n: getattr(pool.calibration, n).to("meta") for n in ("mu", "f", "u")}
    k, v = (meta(batch, layout.kv_heads, d, dtype=layout.dtype) for d in (layout.head_dim, layout.head_dim_v))
    slots = meta(batch, dtype=torch.int64)
    triton_writer.write_packed(
        k, v, slots, slots, *(tensors[n] for n in pool.page_tensors), *(tensors[n] for n in ("mu", "f", "u")),
        tensors["bypass_channels"], tensors["band_of_channel"], layout.dither, layout.dither_period, 2**63, 2**31,
    )  # fmt: skip
    triton_reader.decode_packed(
        *arguments(layout, rows, heads, batch, extend), tensors=tensors, causal=True, sm_scale=0.1,
        scalars={"dither": int(layout.dither), "dither_period": layout.dither_period, "seed": 2**63, "layer": 2**31},
        cap=30.0 if extend else 0.0, window_left=4096 if extend else -1, delta_local=0.1 if radius else 0.0,
        splits=16,
    )  # fmt: skip


def observatory(layout: ObservatoryLayout, rows: int, heads: int, batch: int) -> None:
    """Decode from an observatory."""
    pool = ObservatoryPool(layout, 1, calibration=calibration(layout.kv_heads, layout.head_dim, layout.sketch, 0))
    tensors = {n: getattr(pool, n).to("meta") for n in (*pool.page_tensors, "band_of_channel")}
    tensors |= {n: getattr(pool.calibration, n).to("meta") for n in ("f", "u")}
    triton_reader.decode_observatory(
        *arguments(layout, rows, heads, batch, False), tensors=tensors, causal=True, sm_scale=0.1, cap=0.0,
        window_left=-1, splits=16,
    )  # fmt: skip


CALLS = {
    "decode": lambda: packed(StoreLayout(8, 128, 128, dtype=BF16, sketch=1), 8, 32, 8),
    "decode-dithered": lambda: packed(
        StoreLayout(2, 64, 64, dtype=BF16, dither=True, bypass=2, witness_bands=1), 8, 8, 8, radius=True
    ),
    "extend": lambda: packed(StoreLayout(2, 64, 64, dtype=BF16, sketch=1), 200, 8, 4, extend=True),
    "float32-groups": lambda: packed(StoreLayout(1, 80, 48, page_size=16, group=16, witness_bands=2), 2, 3, 2),
    "observatory": lambda: observatory(ObservatoryLayout(2, 64, 64, dtype=BF16, witness_bands=4, sketch=2), 4, 8, 4),
}

if __name__ == "__main__":
    reports: dict[str, list[dict[str, Any]]] = {}
    for call in sys.argv[1:]:
        recorders = [Recorder(getattr(module, name)) for module, name in KERNELS]
        with ExitStack() as stack:
            for (module, name), recorder in zip(KERNELS, recorders, strict=True):
                stack.enter_context(mock.patch.object(module, name, recorder))
            CALLS[call]()
        reports[call] = [compile_call(r.kernel, *launch) for r in recorders for launch in r.calls]
    json.dump(reports, sys.stdout)
