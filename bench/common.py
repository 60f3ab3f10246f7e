"""What every benchmark shares: machine, inputs, times, files and plots.

The scripts for a GPU take ``--smoke``: tiny shapes on the interpreter, which shows that a script runs, and no speed.
Import this module before anything that imports Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMOKE = "--smoke" in sys.argv
if SMOKE:  # Triton reads the first when it is imported
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["WITCERT_BACKEND"] = "triton"

import torch  # noqa: E402

HERE = Path(__file__).parent


def environment() -> dict[str, Any]:
    """Machine, versions and commit of a run, the commit empty where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    except OSError:
        commit = ""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        import triton

        return {"device": torch.cuda.get_device_name(), "commit": commit, "triton": triton.__version__, **versions}
    return {
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "commit": commit,
        **versions,
    }


def device() -> str:
    """Where a benchmark for a GPU runs.

    Raises:
        SystemExit: there is no CUDA device, and this is no smoke run.
    """
    if SMOKE:
        return "cpu"
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device; --smoke runs tiny shapes without one")
    return "cuda"


def arguments(description: str | None) -> argparse.Namespace:
    """The command line of a benchmark for a GPU."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on Triton's interpreter, no GPU")
    return parser.parse_args()


def interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, the functions taking turns, so that a slow spell of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - began)
    return times


def median_ms(times: list[float]) -> float:
    """Median in milliseconds."""
    return statistics.median(times) * 1e3


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """A replay of the function as a CUDA graph; the function itself in a smoke run."""
    if SMOKE:
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles the kernels outside of the capture
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()

    def replay(outputs: object = kept) -> object:
        graph.replay()
        return outputs

    return replay


def device_ms(functions: dict[str, Callable[[], object]], rep_ms: int = 40) -> dict[str, float]:
    """Median milliseconds on the device of each function's graph; the L2 cache is cold at each call.

    They take two turns each, and the lower median counts, so that a clock still rising hits no one alone.
    """
    if SMOKE:
        return {name: median_ms(times) for name, times in interleaved(functions, 1).items()}
    from triton.testing import do_bench

    replays = {name: captured(function) for name, function in functions.items()}
    turns = [
        {name: do_bench(replay, warmup=10, rep=rep_ms // 2, return_mode="median") for name, replay in replays.items()}
        for _ in range(2)
    ]
    return {name: float(min(turn[name] for turn in turns)) for name in functions}


def copy_bandwidth() -> float:
    """Bytes a millisecond that a device copy reads and writes."""
    source = torch.empty(2**12 if SMOKE else 2**30, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return 2 * source.numel() / device_ms({"copy": lambda: target.copy_(source)})["copy"]


@dataclass(frozen=True)
class Shape:
    """A decode: one query row for each of ``batch`` sequences of ``length`` tokens."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int = 128
    page: int = 64


class Problem:
    """Random queries, keys and values of a shape, bf16, as tensors and in a packed pool with one sketch direction.

    Attributes:
        q ``[batch, heads, d]``; k, v ``[batch, kv_heads, length, d]``; pool, table, lengths: of the op; plan: for it.
    """

    def __init__(self, shape: Shape, **layout: Any) -> None:
        from witcert_kernels import LayerCalibration, PackedPool, StoreLayout, quantize_

        on, d, kv = device(), shape.dim, shape.kv_heads
        g = torch.Generator(device=on).manual_seed(0)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=g, device=on, dtype=torch.bfloat16)

        self.shape = shape
        self.q = randn(shape.batch, shape.heads, d)
        self.k, self.v = (randn(shape.batch, kv, shape.length, d) for _ in range(2))
        self.layout = StoreLayout(kv, d, d, torch.bfloat16, shape.page, **{"sketch": 1, **layout})
        u = torch.nn.functional.normalize(torch.randn(kv, self.layout.sketch, d, generator=g, device=on), dim=-1)
        ones, none = torch.ones(kv, d, device=on), torch.empty(kv, 0, dtype=torch.int64, device=on)
        pages = shape.length // shape.page
        self.pool = PackedPool(
            self.layout, shape.batch * pages, calibration=LayerCalibration(ones * 0, ones, u, none), device=on
        )
        for b in range(shape.batch):
            slots = torch.arange(shape.length, device=on) + b * shape.length
            quantize_(self.k[b].transpose(0, 1).contiguous(), self.v[b].transpose(0, 1).contiguous(), self.pool, slots)
        self.table = torch.arange(shape.batch * pages, dtype=torch.int32, device=on).view(shape.batch, pages)
        self.lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=on)
        self.plan = self.make_plan()

    def make_plan(self, **options: Any) -> Any:
        """A plan for this shape."""
        from witcert_kernels import Plan

        return Plan(self.pool, self.shape.heads, self.shape.batch, self.table.shape[1], **options)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the codes, scales and sketch that a decode must read."""
        return self.shape.batch * self.shape.length * self.shape.kv_heads * self.layout.bytes_per_token

    def decode(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The certified decode."""
        from witcert_kernels import certified_decode

        return certified_decode(self.q, self.pool, self.table, self.lengths, **{"plan": self.plan, **options})

    def kernels(self, **options: Any) -> tuple[torch.Tensor, ...]:
        """The same without the op around it, for options that the op has not."""
        from witcert_kernels import triton_reader

        names = (*self.pool.page_tensors, "bypass_channels", "band_of_channel")
        tensors = {name: getattr(self.pool, name) for name in names}
        tensors |= {name: getattr(self.pool.calibration, name) for name in ("mu", "f", "u")}
        return triton_reader.decode_packed(
            self.q, self.table, self.lengths, None, None, None, None, self.pool.exact.k, self.pool.exact.v, None, None,
            tensors=tensors, scalars={"dither": 0, "dither_period": 64, "seed": 0, "layer": 0}, causal=True,
            sm_scale=self.shape.dim**-0.5, cap=0.0, window_left=-1, delta_local=0.0,
            **{"splits": self.plan.splits, "workspace": self.plan.workspace, **options},
        )  # fmt: skip

    def sdpa(self) -> torch.Tensor:
        """The baseline: torch's attention over the bf16 keys and values."""
        return torch.nn.functional.scaled_dot_product_attention(self.q[:, :, None], self.k, self.v, enable_gqa=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as text, a column a key."""
    if not rows:
        return ""
    cells = [list(rows[0])] + [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in cells)


def folder() -> Path:
    """Where results go: ``$OUT``, or ``bench/results``."""
    path = Path(os.environ.get("OUT") or HERE / "results")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write(name: str, document: dict[str, Any]) -> Path:
    """Write ``NAME.json`` to :func:`folder`."""
    path = folder() / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **document}, indent=1) + "\n", encoding="utf-8")
    return path


def collect(
    name: str, cases: Sequence[Any], measure: Callable[[Any], dict[str, Any]], **document: Any
) -> list[dict[str, Any]]:
    """Rows that ``measure`` makes of the cases. ``NAME.json`` is written after each: a run that is stopped leaves what
    it has, and a case that fails leaves its error there and does not stop the others.

    Raises:
        SystemExit: no case succeeded.
    """
    rows: list[dict[str, Any]] = []
    errors: list[dict[str, str]] = []
    path = None
    for case in cases:
        try:
            rows.append(measure(case))
            print(".", end="", flush=True)
        except Exception as error:
            errors.append({"case": repr(case), "error": repr(error)})
            print(f"\n{case}: failed", flush=True)
            traceback.print_exc(file=sys.stdout)
        path = write(name, {**document, "rows": rows, "errors": errors})
    print(f"\n{table(rows)}\n{path}", flush=True)
    if not rows:
        raise SystemExit(f"{name}: every case failed")
    return rows


def plot(name: str, title: str, lines: dict[str, list[tuple[float, float]]], xlabel: str, ylabel: str) -> Path | None:
    """``NAME.svg`` in :func:`folder`, both axes logarithmic; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel, title=title)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    path = folder() / f"{name}.svg"
    figure.savefig(path)
    pyplot.close(figure)
    return path
