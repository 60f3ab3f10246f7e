"""Certified decode on a CPU against torch's SDPA over uncompressed keys: SmolLM2's shape, float32, one sequence.

    python bench/cpu_decode.py

Prints the ratio of medians for each length and writes ``cpu_decode.json``. Both run on the same threads, taking turns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import interleaved, median_ms, write

from witcert_kernels import LayerCalibration, PackedPool, StoreLayout, certified_decode, quantize_

HEADS, KV_HEADS, DIM = 9, 3, 64
LENGTHS = (1024, 2048, 4096, 8192)
REPEATS = 200


def measure(length: int) -> dict[str, float]:
    """Median milliseconds of both, and their ratio, at one length."""
    g = torch.Generator().manual_seed(length)
    k, v = (torch.randn(length, KV_HEADS, DIM, generator=g) for _ in range(2))
    q = torch.randn(1, HEADS, DIM, generator=g)
    u = F.normalize(torch.randn(KV_HEADS, 1, DIM, generator=g), dim=-1)
    calibration = LayerCalibration(
        torch.zeros(KV_HEADS, DIM), torch.ones(KV_HEADS, DIM), u, torch.empty(KV_HEADS, 0, dtype=torch.int64)
    )
    pool = PackedPool(StoreLayout(KV_HEADS, DIM, DIM, sketch=1), length // 64, calibration=calibration)
    quantize_(k, v, pool, torch.arange(length))
    pages = torch.arange(length // 64, dtype=torch.int32)[None]
    lengths = torch.tensor([length], dtype=torch.int32)
    keys, values, query = (x.transpose(0, 1)[None].contiguous() for x in (k, v, q))
    with torch.no_grad():
        times = interleaved(
            {
                "sdpa": lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True),
                "certified": lambda: certified_decode(q, pool, pages, lengths),
            },
            REPEATS,
        )
    sdpa, certified = median_ms(times["sdpa"]), median_ms(times["certified"])
    return {"length": length, "sdpa_ms": sdpa, "certified_ms": certified, "ratio": certified / sdpa}


def main() -> None:
    """Measure all lengths."""
    rows = [measure(length) for length in LENGTHS]
    for row in rows:
        print(
            "S = {length:5.0f}: sdpa {sdpa_ms:7.3f} ms, certified {certified_ms:7.3f} ms, ratio {ratio:.1f}".format(
                **row
            )
        )
    print(write("cpu_decode", {"shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}, "rows": rows}))


if __name__ == "__main__":
    main()
