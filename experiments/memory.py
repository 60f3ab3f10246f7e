"""The bytes of the paper's key store, counted and allocated (paper, section 5)."""

from __future__ import annotations

import tracemalloc

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.result import Result, Row, Table, Violations
from experiments.synthetic import BLOCK, DITHER_LEVELS, gaussian, token_dither
from witcert_ref.dither import dequantize, quantize, scale_of
from witcert_ref.rope import pairs
from witcert_ref.store import Layout, block_bytes, bypass_channels, bytes_per_token, select_bypass

NAME = "memory"
TOKENS, HEAD_DIM, PAIRS, SEED = 32768, 128, 4, 0


def pack(k: np.ndarray, xi: np.ndarray) -> dict[str, np.ndarray]:
    """What is stored of keys [tokens, d]: codes, scales, bypass channels and their values; the dither is redrawn."""
    blocks = k.reshape(-1, BLOCK, HEAD_DIM)
    scale = scale_of(np.swapaxes(blocks, 1, 2), BLOCK, levels=DITHER_LEVELS)[..., 0]
    selected = select_bypass(scale, PAIRS, "half")
    exact = bypass_channels(selected, HEAD_DIM, "half")
    channels = pairs(HEAD_DIM, "half")[selected].reshape(len(blocks), -1).astype(np.int16)
    return {
        "codes": quantize(blocks, scale[:, None], xi.reshape(blocks.shape), exact[:, None]),
        "scales": scale,
        "channels": channels,
        "values": np.take_along_axis(blocks, channels[:, None].astype(np.intp), -1).astype(np.float16),
    }


def unpack(store: dict[str, np.ndarray], xi: np.ndarray) -> np.ndarray:
    """Keys [tokens, d] from the stored bytes and the dither."""
    codes = store["codes"]
    k = dequantize(codes, store["scales"][:, None], xi.reshape(codes.shape))
    np.put_along_axis(k, store["channels"][:, None].astype(np.intp), store["values"].astype(np.float64), -1)
    return k.reshape(-1, HEAD_DIM)


def copied_bytes(arrays: list[np.ndarray]) -> int:
    """What NumPy allocates for the data of copies of these arrays."""
    domain = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    tracemalloc.start()
    try:
        copies = [array.copy() for array in arrays]
        traced = tracemalloc.take_snapshot().filter_traces([domain])
        del copies  # held until the snapshot
    finally:
        tracemalloc.stop()
    return sum(trace.size for trace in traced.traces)


def run(quick: bool = False) -> Result:
    """Pack real keys, and measure what NumPy and torch hold; `quick` changes nothing."""
    k, xi = gaussian(np.random.default_rng(SEED), TOKENS, HEAD_DIM), token_dither(SEED, TOKENS, HEAD_DIM)
    store = pack(k, xi)
    tensors = [torch.from_numpy(array).clone() for array in store.values()]
    simulated = torch.from_numpy(unpack(store, xi)).to(torch.bfloat16)
    step = np.repeat(store["scales"].astype(np.float64), BLOCK, axis=0)
    beyond = np.abs(unpack(store, xi) - k) > step / 2
    formula, allocated = block_bytes(TOKENS, HEAD_DIM, PAIRS), copied_bytes(list(store.values()))
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    half = 2 * TOKENS * HEAD_DIM

    def saved(stored: float, of: float = half) -> float:
        return 100 * (1 - stored / of)

    lengths = (8192, 32768, 131072)
    layouts = {
        "token scale": Layout(HEAD_DIM),
        "token scale, sketch 4, witness 1": Layout(HEAD_DIM, sketch=4, witness_bands=1),
        "token × 32-channel groups": Layout(HEAD_DIM, group=32),
        "token × 32-channel groups, bypass 4": Layout(HEAD_DIM, group=32, bypass=4),
    }
    ours = [(name, *bytes_per_token(layout)) for name, layout in layouts.items()]
    return Result(
        NAME,
        "Bytes of a packed store",
        "section 5",
        {"tokens": TOKENS, "head_dim": HEAD_DIM, "kv_heads": 1, "bypass_pairs": PAIRS, "block": BLOCK},
        unit="key store of one kv head",
        samples=1,
        seed=SEED,
        rows=[
            Row("bytes, by formula", 4753408, formula),
            Row("bytes, NumPy allocations", 4753408, allocated),
            Row("bytes, torch storages", 4753408, held),
            Row("bytes, float16 keys", 8388608, np.empty((TOKENS, HEAD_DIM), np.float16).nbytes),
            Row("saved, %", 43.3, saved(held)),
            Row("saved by codes dequantised back to bfloat16, %", 0.0, saved(simulated.untyped_storage().nbytes())),
            *(
                Row(f"saved at {n} tokens, %", 43.3, saved(block_bytes(n, HEAD_DIM, PAIRS), 2 * n * 128))
                for n in lengths
            ),
        ],
        violations=[
            Violations("formula = NumPy allocations = torch storages", int(len({formula, allocated, held}) > 1), 1),
            Violations("keys read back within half a step", int(beyond.sum()), beyond.size),
        ],
        tables=[
            Table(
                "Stores that a page table can use, bytes a token and kv head (float16: 256)",
                ("store", "keys", "values", "saved of keys, %"),
                [(name, at_k, at_v, saved(at_k, 2 * HEAD_DIM)) for name, at_k, at_v in ours],
            )
        ],
        quick=quick,
    )


def plot(result: Result) -> Figure:
    """Bytes a token of keys."""
    rows = [("float16", 2 * HEAD_DIM), ("paper: block × channel, bypass 4", result.rows[2].ours / TOKENS)]
    rows += [(str(row[0]), float(row[1] or 0)) for row in result.tables[0].rows]
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.barh([name for name, _ in rows], [size for _, size in rows])
    axes.set_xlabel("bytes a token of keys")
    axes.invert_yaxis()
    return figure
