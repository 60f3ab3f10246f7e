"""How fast is the certified INT8 decode, against torch's SDPA over bf16 and against its own parts?

    python bench/gpu_decode.py [--smoke]

A row a shape, milliseconds of a CUDA graph's replay with a cold L2: ``sdpa`` (bf16, torch), ``bf16`` (our pages and
splits, no compression), ``int8`` (no certificate), ``two_digits`` and ``certified``; ``floor`` is what the bytes take
at the measured copy bandwidth. ``ratio`` is certified over sdpa, ``certificate`` what the certificate adds to int8.
Checks beside the times: outputs agree, the certificate changes no output, and the value bound holds. Writes
``gpu_decode.json`` and ``gpu_decode.svg``.
"""

from __future__ import annotations

from typing import Any

import torch
from bf16_decode import Bf16Decode
from common import SMOKE, Problem, Shape, arguments, collect, copy_bandwidth, device_ms, plot

# the targets' shapes first; few kernels to compile: every G is compiled once, lengths and batches share it
TARGETS = [Shape(8, 32, 8, 32768), Shape(32, 28, 4, 8192)]
LENGTHS = [Shape(8, 32, 8, length) for length in (1024, 4096, 8192)] + [Shape(1, 32, 8, 131072)]
BATCHES = [Shape(batch, 32, 8, 4096) for batch in (1, 16, 64)]
GROUPS = [Shape(8, 64, 8, 16384), Shape(8, 8, 8, 16384)]
TINY = [Shape(2, 4, 2, 32, dim=32, page=16)]


def measure(shape: Shape, bandwidth: float) -> dict[str, Any]:
    """One shape."""
    problem = Problem(shape)
    bf16 = Bf16Decode(problem)
    two = problem.make_plan(digits=2)
    times = device_ms(
        {
            "sdpa": problem.sdpa,
            "bf16": bf16,
            "int8": lambda: problem.kernels(certificate=False),
            "two_digits": lambda: problem.decode(plan=two),
            "certified": problem.decode,
        }
    )
    out, _, certificate = problem.decode()
    plain = problem.kernels(certificate=False)
    q, k, v = (x[:1].float() for x in (problem.q, problem.k, problem.v))
    exact = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    error = (out[:1].float() - exact).norm(dim=-1)
    return {
        "batch": shape.batch, "heads": shape.heads, "kv_heads": shape.kv_heads, "length": shape.length,
        "splits": problem.plan.splits, **times, "floor": problem.packed_bytes / bandwidth,
        "ratio": times["certified"] / times["sdpa"], "certificate": times["certified"] / times["int8"] - 1,
        "meter_max": float(certificate.meter.max()),
        "value_error_holds": bool((error <= certificate.value_error[:1]).all()),
        "bf16_agrees": bool((bf16()[:1].float() - exact).abs().max() < 0.02 * exact.abs().max()),
        "same_output": bool(torch.equal(out, plain[0]) and (plain[2] == 1).all()),
    }  # fmt: skip


def main() -> None:
    """Measure all shapes."""
    arguments(__doc__)
    bandwidth = copy_bandwidth()
    rows = collect(
        "gpu_decode",
        TINY if SMOKE else [*TARGETS, *LENGTHS, *BATCHES, *GROUPS],
        lambda shape: measure(shape, bandwidth),
        bandwidth_bytes_per_ms=bandwidth,
    )
    names = ("sdpa", "bf16", "int8", "certified", "floor")
    along = [row for row in rows if (row["batch"], row["heads"]) == (rows[0]["batch"], rows[0]["heads"])]
    lines = {name: [(float(row["length"]), row[name]) for row in along] for name in names}
    plot("gpu_decode", "Decode, 32 heads of 128 over 8 kv heads, batch 8", lines, "tokens a sequence", "ms")


if __name__ == "__main__":
    main()
