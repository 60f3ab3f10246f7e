"""How fast is the packed writer, against a device copy of the same bytes?

    python bench/gpu_write.py [--smoke]

A row a number of tokens: milliseconds of the write with a sketch, of a copy that reads and writes as many bytes as the
write does (bf16 in, codes and scales out), and their ratio. Writes ``gpu_write.json`` and ``gpu_write.svg``.
"""

from __future__ import annotations

from typing import Any

import torch
from common import SMOKE, Problem, Shape, arguments, collect, device, device_ms, plot

from witcert_kernels import quantize_


def measure(tokens: int, dim: int) -> dict[str, Any]:
    """One number of tokens, 8 kv heads."""
    shape = Shape(1, 8, 8, tokens, dim=dim, page=16)
    problem = Problem(shape)
    k, v = (x[0].transpose(0, 1).contiguous() for x in (problem.k, problem.v))
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).to(device())
    moved = 2 * k.nbytes + problem.packed_bytes
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    times = device_ms(
        {
            "copy": lambda: target.copy_(source),
            "write": lambda: quantize_(k, v, problem.pool, slots, slots),
        }
    )
    return {"tokens": tokens, "dim": dim, "bytes": moved, **times, "ratio": times["write"] / times["copy"]}


def main() -> None:
    """Measure all numbers of tokens."""
    arguments(__doc__)
    cases = [(16, 32)] if SMOKE else [(64, 128), (1024, 128), (8192, 128), (65536, 128)]
    rows = collect("gpu_write", cases, lambda case: measure(*case), kv_heads=8)
    lines = {name: [(float(r["tokens"]), r[name]) for r in rows] for name in ("copy", "write")}
    plot("gpu_write", "Write of 8 kv heads of 128", lines, "tokens", "ms")


if __name__ == "__main__":
    main()
