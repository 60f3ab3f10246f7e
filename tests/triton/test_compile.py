"""The kernels compile for Hopper, with the instructions and the registers that they were written for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import aot_report
import pytest
import triton

Report = dict[str, list[dict[str, Any]]]


CALLS = (
    "decode", "decode-gqa-8", "decode-gqa-8-two-digits", "decode-telemetry", "decode-repaired", "decode-dithered",
    "decode-groups", "extend", "extend-d-128", "float32-groups", "observatory",
)  # fmt: skip
# bytes a thread, outside the main loop but for a few: what Triton before 3.9 makes of the same source is larger
SPILLED = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 32
DECODES = [call for call in CALLS if call.startswith("decode")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What ``bench/aot_report.py`` reports of some of its calls."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "WITCERT_BACKEND")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-W", "ignore", aot_report.__file__, *CALLS, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: Report = json.loads(done.stdout)
    return report


def kernel(reports: Report, call: str, name: str) -> dict[str, Any]:
    (found,) = (r for r in reports[call] if r["kernel"] == name)
    return found


def uses(report: dict[str, Any], *parts: str) -> bool:
    return any(all(part in instruction for part in parts) for instruction in report["ptx"])


def test_every_kernel_of_every_call_compiles(reports: Report) -> None:
    read = ["_write_kernel", "_query_kernel", "_packed_kernel"]
    assert [r["kernel"] for r in reports["decode"]] == [*read, "_merge_kernel"]
    assert [r["kernel"] for r in reports["extend"]] == [*read, "_exact_kernel", "_merge_kernel"]
    assert [r["kernel"] for r in reports["observatory"]] == [
        "_observe_kernel",
        "_query_kernel",
        "_observatory_kernel",
        "_merge_kernel",
    ]
    for call in reports.values():
        for report in call:
            assert report["reg"] <= 255 and report["shared"] <= 100 * 1024
            assert report["local"] == 0 and report["stack"] <= 32


def test_the_packed_read_does_not_spill(reports: Report) -> None:
    for call in (*DECODES, "extend", "extend-d-128"):
        packed = kernel(reports, call, "_packed_kernel")
        assert packed["stack"] <= SPILLED and packed["loop"]["local"] <= SPILLED // 4


def test_a_multiprocessor_holds_the_programs_that_splits_are_planned_for(reports: Report) -> None:
    for call in DECODES:
        packed = kernel(reports, call, "_packed_kernel")
        assert packed["blocks_by_registers"] >= (3 if call in ("decode-dithered", "decode-groups") else 4)
    assert kernel(reports, "observatory", "_observatory_kernel")["blocks_by_registers"] >= 2


def test_decode_multiplies_on_tensor_cores(reports: Report) -> None:
    """Keys as int8, values as float16 that a byte permute made of int8."""
    for call in ("decode", "decode-dithered", "extend"):
        report = kernel(reports, call, "_packed_kernel")
        assert (
            uses(report, "mma", ".s32.s8.s8.s32") and uses(report, "mma", ".f32.f16.f16.f32") and uses(report, "prmt")
        )
        assert uses(report, "cp.async") and not uses(report, "cvt", ".f16.s")
    assert uses(kernel(reports, "float32-groups", "_packed_kernel"), "mma", ".s32.s8.s8.s32")
    assert uses(kernel(reports, "extend", "_exact_kernel"), "mma", ".bf16.bf16.")


def test_two_digits_are_half_the_products(reports: Report) -> None:
    """Eight heads have 24 rows of digits in two tiles of 16, or 16 rows in one."""
    three, two = (kernel(reports, f"decode-gqa-8{s}", "_packed_kernel")["loop"] for s in ("", "-two-digits"))
    assert two["int8 mma"] * 2 == three["int8 mma"]


def test_telemetry_is_atomics_in_the_merge(reports: Report) -> None:
    plain, counting = (kernel(reports, call, "_merge_kernel") for call in ("decode", "decode-telemetry"))
    assert plain["instructions"]["atomic"] == 0 < counting["instructions"]["atomic"]
    assert all("relaxed" in name for name in counting["ptx"] if name.startswith("atom"))


def test_the_writer_divides_as_ieee_says(reports: Report) -> None:
    for call in ("decode", "decode-dithered", "extend", "float32-groups"):
        report = kernel(reports, call, "_write_kernel")
        assert uses(report, "div.rn.f32")
        assert not uses(report, "div.full") and not uses(report, "div.approx") and not uses(report, "rcp.approx")


def test_sizes_compile_nothing_anew() -> None:
    """One kernel for all batches, lengths and split counts, of the merge one for each power of two of splits."""
    code = """
import aot_report, torch
from functools import partial
from witcert_kernels import StoreLayout
layout, seen = StoreLayout(8, 128, 128, dtype=torch.bfloat16, sketch=1), {}
for batch, splits in ((1, 16), (2, 9), (3, 11), (16, 16), (48, 12)):
    for kernel, args, options in aot_report.launches(partial(aot_report.packed, layout, 32, batch, splits=splits)):
        seen.setdefault(kernel.__name__, set()).add(str(aot_report.specialise(kernel, args, options)))
assert len(seen) == 4 and all(len(kinds) == 1 for kinds in seen.values()), {k: len(v) for k, v in seen.items()}
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(aot_report.__file__), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_cpu_tensors_need_the_interpreter() -> None:
    code = (
        "import torch; from witcert_kernels import *; pool = PackedPool(StoreLayout(1, 16, 16), 1); "
        "x = torch.zeros(1, 1, 16); quantize_(x, x, pool, torch.zeros(1, dtype=torch.int64))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"WITCERT_BACKEND": "triton"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ValueError: WITCERT_BACKEND: got triton for CPU tensors, wants TRITON_INTERPRET=1" in done.stderr
