"""What only a GPU can show. Listed as not run elsewhere."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from ..adapter import Adapter, Layout, optional
from ..case import Case, build
from ..checks import require, same
from ..registry import prop
from ..strategies import plain

GRAPHED = Case(layout=Layout(kv_heads=2, head_dim=64, head_dim_v=64, page_size=16), lengths=(40, 17), group_heads=4)


@prop(
    "graph_replay_is_eager",
    plain(kv_heads=2, batch=(2, 2)),
    needs=("cuda_graphs",),
    pinned=(GRAPHED,),
    examples=4,
    cuda=True,
)
def _replay(adapter: Adapter, case: Case) -> None:
    """A captured graph's replays, five interleaved ones of two graphs, are bit-identical to eager."""
    scene = build(adapter, case)
    reads = [scene.read, replace(scene.read, q=-scene.read.q)]
    eager = [adapter.decode(scene.store, read) for read in reads]
    order = [0, 1, 0, 0, 1]
    for step, (i, got) in enumerate(zip(order, optional(adapter).replay(scene.store, reads, order), strict=True)):
        same(eager[i], got, what=f"replay {step} of a captured graph")


@prop(
    "no_host_synchronisation",
    plain(kv_heads=2, batch=(2, 2)),
    needs=("cuda_graphs",),
    pinned=(GRAPHED,),
    examples=2,
    cuda=True,
)
def _sync(adapter: Adapter, case: Case) -> None:
    """A decode never makes the host wait for the device."""
    scene = build(adapter, case)
    count = optional(adapter).synchronisations(scene.store, scene.read)
    require(count == 0, f"synchronisations: got {count} in one decode, wants 0")


_MEMCHECK = """
from witcert_conformance import Case, Layout, load
from witcert_conformance.case import build
build(load({name!r}), {case!r}).decode()
"""


@prop(
    "memory_is_clean",
    plain(batch=(1, 1)),
    needs=("cuda_graphs",),
    pinned=(GRAPHED,),
    examples=1,
    cuda=True,
    tool="compute-sanitizer",
)
def _memcheck(adapter: Adapter, case: Case) -> None:
    """``compute-sanitizer`` finds no fault in a small write and read."""
    program = _MEMCHECK.format(name=adapter.info.name, case=case)
    command = ["compute-sanitizer", "--error-exitcode", "9", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    require(done.returncode == 0, f"compute-sanitizer: {(done.stdout + done.stderr)[-1500:]}")
