"""The packed writer on a CPU, compiled and with torch's own ops, against a copy of the same numbers: SmolLM2's shape.

    python bench/cpu_write.py

Prints, for each number of tokens, microseconds of each and both ratios to the copy, and writes ``cpu_write.json``. All
run on the same threads, taking turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from common import interleaved, median_ms, table, write

from witcert_kernels import LayerCalibration, PackedPool, StoreLayout, quantize_

KV_HEADS, DIM = 3, 64
TOKENS = (1, 16, 256, 4096)
REPEATS = 100


def measure(tokens: int) -> dict[str, float]:
    """Median microseconds at one number of tokens."""
    g = torch.Generator().manual_seed(tokens)
    k, v = (torch.randn(tokens, KV_HEADS, DIM, generator=g) for _ in range(2))
    u = torch.nn.functional.normalize(torch.randn(KV_HEADS, 1, DIM, generator=g), dim=-1)
    calibration = LayerCalibration(
        torch.zeros(KV_HEADS, DIM), torch.ones(KV_HEADS, DIM), u, torch.empty(KV_HEADS, 0, dtype=torch.int64)
    )
    pool = PackedPool(StoreLayout(KV_HEADS, DIM, DIM, sketch=1), -(-tokens // 64), calibration=calibration)
    slots, target = torch.arange(tokens), torch.empty(2, tokens, KV_HEADS, DIM)

    def by(backend: str) -> Callable[[], None]:
        def run() -> None:
            os.environ["WITCERT_BACKEND"] = backend
            quantize_(k, v, pool, slots)

        return run

    def copy() -> None:
        target[0].copy_(k)
        target[1].copy_(v)

    with torch.no_grad():
        times = interleaved({"copy": copy, "compiled": by(""), "torch": by("torch")}, REPEATS)
    us = {name: 1e3 * median_ms(seconds) for name, seconds in times.items()}
    ratios = {f"{name} / copy": us[name] / us["copy"] for name in ("compiled", "torch")}
    return {"tokens": tokens, **{f"{name}_us": value for name, value in us.items()}, **ratios}


def main() -> None:
    """Measure all numbers of tokens."""
    rows = [measure(tokens) for tokens in TOKENS]
    print(table(rows))
    print(write("cpu_write", {"shape": {"kv_heads": KV_HEADS, "head_dim": DIM}, "rows": rows}))


if __name__ == "__main__":
    main()
