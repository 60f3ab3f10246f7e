"""What ptxas makes of the kernels on Hopper: registers, spills, shared memory and instruction mix. No GPU is needed.

    python bench/aot_report.py [CALL ...] [--json]

Compiles every kernel of each call (all of ``CALLS`` by default) to a cubin, disassembles it with the tools that Triton
ships, prints a table and writes ``aot_report.json``; with ``--json`` prints the report instead. The calls run on meta
tensors, which have shapes and no data: a host path that read a value would raise. A process of its own, since a process
either interprets kernels or compiles them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from common import write
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from witcert_kernels import (
    LayerCalibration,
    ObservatoryLayout,
    ObservatoryPool,
    PackedPool,
    StoreLayout,
    Telemetry,
    triton_exact,
    triton_observatory,
    triton_query,
    triton_reader,
    triton_state,
    triton_writer,
)

BF16 = torch.bfloat16
KERNELS = [
    (triton_writer, "_write_kernel"),
    (triton_writer, "_observe_kernel"),
    (triton_query, "_query_kernel"),
    (triton_reader, "_packed_kernel"),
    (triton_exact, "_exact_kernel"),
    (triton_observatory, "_query_kernel"),
    (triton_observatory, "_observatory_kernel"),
    (triton_state, "_merge_kernel"),
]
TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# SASS opcodes by what they occupy
GROUPS = {
    "int8 mma": ("IMMA", "IGMMA"), "half mma": ("HMMA", "HGMMA"), "permute": ("PRMT",), "special": ("MUFU",),
    "fma": ("FFMA", "FMUL", "FADD"), "half fma": ("HFMA2", "HADD2", "HMUL2"), "convert": ("I2F", "I2FP", "F2F", "F2I"),
    "double": ("DFMA", "DMUL", "DADD", "DSETP"), "shuffle": ("SHFL",), "barrier": ("BAR", "WARPSYNC"),
    "async copy": ("LDGSTS",), "global load": ("LDG",), "shared load": ("LDS", "LDSM"), "shared store": ("STS",),
    "atomic": ("ATOM", "ATOMG", "RED", "REDG"), "local": ("LDL", "STL"),
}  # fmt: skip


class Recorder:
    """Stands for a kernel and keeps the arguments of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(isinstance(n, int) and n > 0 for n in grid)
        return lambda *args, **options: self.calls.append((args, options))


def specialise(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Signature, constants and attributes of a launch, as the runtime would choose them."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
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
    return signature, constants, attributes


def compile_call(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Specialise a launch, compile it for sm_90, and report on the result."""
    signature, constants, attributes = specialise(kernel, args, options)
    settings = {k: v for k, v in options.items() if k not in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=settings)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = _run("cuobjdump", "-res-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name)
    resources = {name.lower(): int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    instructions = sorted(set(re.findall(r"^\s+(?:@\S+ )?([a-z]\S+)", compiled.asm["ptx"], re.M)))
    warps = compiled.metadata.num_warps
    return {
        "kernel": kernel.__name__,
        "warps": warps,
        "shared": compiled.metadata.shared,
        **resources,
        "blocks_by_registers": 65536 // (-(-resources["reg"] // 8) * 8 * 32 * warps),
        "instructions": mix(opcodes(sass)),
        "loop": mix(main_loop(sass)),
        "ptx": instructions,
    }


def _run(tool: str, *args: str) -> str:
    return subprocess.run([TOOLS / tool, *args], capture_output=True, text=True, check=True).stdout


def opcodes(sass: str) -> list[str]:
    """Opcodes of a disassembly, modifiers dropped, without padding."""
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", sass, re.M)
    return [name for name in found if name != "NOP"]


def main_loop(sass: str) -> list[str]:
    """Opcodes between a label and the last branch back to it: of the shortest such span with the most kinds of mma."""
    lines = sass.splitlines()
    at = {m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"(\.L_x_\d+):", line))}
    best: tuple[int, int, list[str]] = (0, 0, [])
    for i, line in enumerate(lines):
        branch = re.search(r"\bBRA\b.*?`\((\.L_x_\d+)\)", line)
        if branch and at.get(branch.group(1), i) < i:
            names = opcodes("\n".join(lines[at[branch.group(1)] : i + 1]))
            kinds = sum(any(name in names for name in GROUPS[group]) for group in ("int8 mma", "half mma"))
            best = max(best, (kinds, -len(names), names)) if kinds else best
    return best[2]


def mix(names: list[str]) -> dict[str, int]:
    """Instructions in all and by group; the rest is integer arithmetic, logic, moves and control."""
    counts = Counter(names)
    groups = {group: sum(counts[name] for name in members) for group, members in GROUPS.items()}
    return {"all": len(names), **groups, "other": len(names) - sum(groups.values())}


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def calibration(kv_heads: int, d: int, sketch: int, bypass: int) -> LayerCalibration:
    """No equaliser; r directions."""
    pairs = torch.arange(bypass).expand(kv_heads, -1).contiguous()
    plain = LayerCalibration.identity(kv_heads, d, bypass=pairs)
    return LayerCalibration(plain.mu, plain.f, torch.zeros(kv_heads, sketch, d), pairs)


def arguments(
    layout: StoreLayout | ObservatoryLayout, rows: int, heads: int, batch: int, extend: bool, repaired: bool = False
) -> list[Any]:
    """The op's tensors before those of the pool: decode over long sequences, or a ragged batch with everything."""
    pages, kv, dtype = 512, layout.kv_heads, layout.dtype
    exact = [meta(3, layout.page_size, d, dtype=dtype) for d in (layout.head_dim, layout.head_dim_v)]
    head = [meta(rows, heads, layout.head_dim, dtype=dtype), meta(batch, pages, dtype=torch.int32)]
    head.append(meta(batch, dtype=torch.int32))
    slots = meta(batch, kv, pages, dtype=torch.int32)
    if not extend:
        return [*head, None, None, None, slots if repaired else None, *exact, None, None]
    new = [meta(rows, kv, d, dtype=dtype) for d in (layout.head_dim, layout.head_dim_v)]
    sinks = meta(heads, dtype=dtype)
    bias = meta(rows, heads, 1000, dtype=torch.float32)
    return [*head, meta(batch + 1, dtype=torch.int32), *new, slots, *exact, sinks, bias]


def packed(
    layout: StoreLayout,
    heads: int,
    batch: int,
    *,
    rows: int | None = None,
    radius: bool = False,
    telemetry: bool = False,
    repaired: bool = False,
    **options: Any,
) -> None:
    """Write one token and decode, ``repaired`` with exact pages; with ``rows``, a ragged batch of them."""
    extend = rows is not None
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
        *arguments(layout, rows or batch, heads, batch, extend, repaired), tensors=tensors, causal=True, sm_scale=0.1,
        scalars={"dither": int(layout.dither), "dither_period": layout.dither_period, "seed": 2**63, "layer": 2**31},
        cap=30.0 if extend else 0.0, window_left=4096 if extend else -1, delta_local=0.1 if radius else 0.0,
        **{"splits": 16, **options}, telemetry=Telemetry().buffer.to("meta") if telemetry else None,
    )  # fmt: skip


def observatory(layout: ObservatoryLayout, heads: int, batch: int) -> None:
    """Write one token and decode from an observatory."""
    pool = ObservatoryPool(layout, 1, calibration=calibration(layout.kv_heads, layout.head_dim, layout.sketch, 0))
    tensors = {n: getattr(pool, n).to("meta") for n in (*pool.page_tensors, "band_of_channel")}
    tensors |= {n: getattr(pool.calibration, n).to("meta") for n in ("f", "u")}
    k, v = (meta(batch, layout.kv_heads, d, dtype=layout.dtype) for d in (layout.head_dim, layout.head_dim_v))
    triton_writer.write_observatory(
        k, v, k, v, meta(batch, dtype=torch.int64), *(tensors[n] for n in pool.page_tensors), tensors["f"],
        tensors["u"], tensors["band_of_channel"],
    )  # fmt: skip
    triton_observatory.decode_observatory(
        *arguments(layout, batch, heads, batch, False), tensors=tensors, causal=True, sm_scale=0.1, cap=0.0,
        window_left=-1, splits=16,
    )  # fmt: skip


def _llama(heads: int, kv_heads: int, d: int = 128, **options: Any) -> Any:
    layout = StoreLayout(kv_heads, d, d, dtype=BF16, sketch=options.pop("sketch", 1), **options.pop("layout", {}))
    return partial(packed, layout, heads, 8, **options)


CALLS = {
    "decode": _llama(32, 8),
    "decode-two-digits": _llama(32, 8, digits=2),
    "decode-no-certificate": _llama(32, 8, certificate=False),
    "decode-telemetry": _llama(32, 8, telemetry=True),
    "decode-gqa-1": _llama(8, 8),
    "decode-gqa-7": _llama(28, 4),
    "decode-gqa-8": _llama(64, 8),
    "decode-gqa-8-two-digits": _llama(64, 8, digits=2),
    "decode-d-64": _llama(9, 3, 64),
    "decode-d-256": _llama(4, 1, 256, sketch=8, layout={"witness_bands": 4}),
    "decode-mqa": _llama(32, 1),
    "decode-repaired": _llama(32, 8, repaired=True),
    "decode-sources": _llama(32, 8, sketch=4, layout={"witness_bands": 1, "bypass": 4}),
    "decode-groups": _llama(32, 8, layout={"group": 32}),
    "decode-dithered": partial(
        packed, StoreLayout(2, 64, 64, dtype=BF16, dither=True, bypass=2, witness_bands=1), 8, 8, radius=True
    ),
    "extend": partial(packed, StoreLayout(2, 64, 64, dtype=BF16, sketch=1), 8, 4, rows=200),
    "extend-d-128": _llama(32, 8, rows=200),
    "float32": partial(packed, StoreLayout(3, 64, 64, sketch=1), 9, 2),
    "float32-extend": partial(packed, StoreLayout(3, 64, 64, sketch=1), 9, 4, rows=100),
    "float32-groups": partial(packed, StoreLayout(1, 80, 48, page_size=16, group=16, witness_bands=2), 3, 2),
    "observatory": partial(observatory, ObservatoryLayout(2, 64, 64, dtype=BF16, witness_bands=4, sketch=2), 8, 4),
}
COLUMNS = ("int8 mma", "half mma", "permute", "special", "fma", "convert", "double", "shuffle", "barrier")


def launches(call: Callable[[], object]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Kernel, arguments and options of every launch that a call makes, none of which happens."""
    recorders = [Recorder(getattr(module, name)) for module, name in KERNELS]
    with ExitStack() as stack:
        for (module, name), recorder in zip(KERNELS, recorders, strict=True):
            stack.enter_context(mock.patch.object(module, name, recorder))
        call()
    return [(recorder.kernel, *launch) for recorder in recorders for launch in recorder.calls]


def report(calls: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Every kernel of some calls."""
    return {call: [compile_call(*launch) for launch in launches(CALLS[call])] for call in calls}


def table(reports: dict[str, list[dict[str, Any]]]) -> str:
    """A line a kernel: resources, and the instructions of its main loop, or of all of it where none has an mma."""
    lines = [f"{'call':24} {'kernel':20} {'regs':>4} {'stack':>5} {'shared':>6} {'all':>5} " + " ".join(
        f"{name:>8}" for name in COLUMNS
    )]  # fmt: skip
    for call, kernels in reports.items():
        for one in kernels:
            counts = one["loop"] if one["loop"]["all"] else one["instructions"]
            lines.append(
                f"{call:24} {one['kernel']:20} {one['reg']:4} {one['stack']:5} {one['shared']:6} {counts['all']:5} "
                + " ".join(f"{counts[name]:8}" for name in COLUMNS)
            )
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Registers, spills and instructions of the kernels on Hopper")
    parser.add_argument("calls", nargs="*", metavar="CALL", help=", ".join(CALLS))
    parser.add_argument("--json", action="store_true", help="print the report as JSON and write no file")
    options = parser.parse_args()
    unknown = [call for call in options.calls if call not in CALLS]
    if unknown:
        parser.error(f"CALL: got {', '.join(unknown)}, wants some of {', '.join(CALLS)}")
    reports = report(options.calls or list(CALLS))
    if options.json:
        print(json.dumps(reports))
        return
    print(table(reports))
    kept = {
        call: [{k: v for k, v in one.items() if k != "ptx"} for one in kernels] for call, kernels in reports.items()
    }
    print(write("aot_report", {"target": "sm_90", "triton": triton.__version__, "calls": kept}))


if __name__ == "__main__":
    main()
