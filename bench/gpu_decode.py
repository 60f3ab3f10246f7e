"""Certified INT8 decode on a GPU against torch's SDPA over bf16 keys, at serving shapes.

    python bench/gpu_decode.py

Prints one row a shape: SDPA, the certified kernel, their ratio, and the floor from the measured copy bandwidth; writes
``gpu_decode.json``. Needs a CUDA device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from common import write

from witcert_kernels import LayerCalibration, PackedPool, StoreLayout, certified_decode, quantize_

DIM, PAGE = 128, 64
SHAPES = ((8, 32, 8, 32768), (32, 28, 4, 8192), (4, 32, 8, 4096), (1, 32, 8, 131072), (64, 8, 8, 2048))


def milliseconds(function: object) -> float:
    """Median of a CUDA-graph replay, so that launches are not what is measured."""
    return float(triton.testing.do_bench_cudagraph(function, rep=50, return_mode="median"))


def copy_bandwidth() -> float:
    """Bytes a millisecond that a device copy reads and writes."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source))


def measure(batch: int, heads: int, kv_heads: int, length: int, bandwidth: float) -> dict[str, float]:
    """One shape, sketch r = 1 as in the default store."""
    g = torch.Generator(device="cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda", dtype=torch.bfloat16)

    layout = StoreLayout(kv_heads, DIM, DIM, torch.bfloat16, PAGE, sketch=1)
    u = F.normalize(torch.randn(kv_heads, 1, DIM, generator=g, device="cuda"), dim=-1)
    ones = torch.ones(kv_heads, DIM, device="cuda")
    calibration = LayerCalibration(ones * 0, ones, u, torch.empty(kv_heads, 0, dtype=torch.int64, device="cuda"))
    pages = length // PAGE
    pool = PackedPool(layout, batch * pages, calibration=calibration, device="cuda")
    q, k, v = randn(batch, heads, DIM), randn(batch, kv_heads, length, DIM), randn(batch, kv_heads, length, DIM)
    for b in range(batch):
        slots = torch.arange(length, device="cuda") + b * length
        quantize_(k[b].transpose(0, 1).contiguous(), v[b].transpose(0, 1).contiguous(), pool, slots)
    table = torch.arange(batch * pages, dtype=torch.int32, device="cuda").view(batch, pages)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    sdpa = milliseconds(lambda: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True))
    certified = milliseconds(lambda: certified_decode(q, pool, table, lengths))
    out, _, certificate = certified_decode(q, pool, table, lengths)
    exact = F.scaled_dot_product_attention(q[:1, :, None].float(), k[:1].float(), v[:1].float(), enable_gqa=True)[
        :, :, 0
    ]
    error = (out[:1].float() - exact).norm(dim=-1)
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "length": length,
        "sdpa_ms": sdpa,
        "certified_ms": certified,
        "ratio": certified / sdpa,
        "floor_ms": batch * length * kv_heads * layout.bytes_per_token / bandwidth,
        "meter_max": float(certificate.meter.max()),
        "value_error_holds": bool((error <= certificate.value_error[:1]).all()),
    }


def main() -> None:
    """Measure all shapes."""
    bandwidth = copy_bandwidth()
    rows = []
    for shape in SHAPES:
        rows.append(row := measure(*shape, bandwidth))
        print(
            "({batch}, {heads}, {kv_heads}, {length}): sdpa {sdpa_ms:.3f} ms, certified {certified_ms:.3f} ms, "
            "ratio {ratio:.2f}, floor {floor_ms:.3f} ms".format(**row),
            flush=True,
        )
    print(write("gpu_decode", {"head_dim": DIM, "bandwidth_bytes_per_ms": bandwidth, "rows": rows}))


if __name__ == "__main__":
    main()
