"""Certificates that look right and are false: no implementation may report one where it fails."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from .. import exact
from ..adapter import Adapter, Array, Info, Layout
from ..case import Case, build
from ..checks import require
from ..model import Block, blocks
from ..registry import prop


@dataclass(frozen=True)
class Equal:
    """``tokens`` equal keys, so that attention is uniform, and a query that makes every bound ``c``."""

    tokens: int = 2
    c: float = 0.1


@dataclass(frozen=True)
class Rare:
    """A token of mass e^−c whose bound is ``c``, beside one whose bound is nothing."""

    c: float = 20.0


def dispersion(p: Array, c: Array) -> float:
    """The paper's equation (1): ½ e^(2 max c) (E|c − c̄| + c̄ (e^(max c) − 1)). Not a bound."""
    mean, top = float(p @ c), float(c.max())
    return 0.5 * np.exp(2 * top) * (float(p @ np.abs(c - mean)) + mean * np.expm1(top))


def variance_averaged(p: Array, c: Array) -> float:
    """½ (e^(2 √(Σ p c²)) − 1): variances averaged before the exponential. Not a bound."""
    return float(np.expm1(2 * np.sqrt(p @ np.square(c))) / 2)


def attained(p: Array, c: Array) -> float:
    """Total variation at the errors +c on the second half of the tokens, −c on the first."""
    q = p * np.exp(np.where(np.arange(len(p)) < len(p) // 2, -c, c))
    return float(exact.total_variation(p, q / q.sum()))


def put(adapter: Adapter, case: Case, k: Array, q: Array) -> tuple[Block, float]:
    """One sequence of these keys, read with this query: its block, and the meter that is reported."""
    scene = build(adapter, case)
    k, q = (np.asarray(x, np.float32).astype(np.float64) for x in (k, q))
    adapter.quantize(scene.store, k[:, None], scene.v, scene.slots, scene.positions)
    scene = replace(scene, k=k[:, None], read=replace(scene.read, q=q[None, None]))
    decoded = scene.decode()
    (block,) = blocks(scene)
    return block, float(decoded.meter[0, 0])


def refuted(name: str, claimed: float, block: Block, meter: float) -> None:
    """The false certificate is below what errors within c attain, and the reported meter is not."""
    p, c = exact.softmax(block.y)[0], block.c[0]
    moved = attained(p, c)
    require(claimed < moved, f"{name}: {claimed} covers {moved}: the guard no longer bites")
    require(meter >= moved, f"meter: got {meter!r}, but errors within c move attention by {moved!r}")
    require(float(exact.meter(p, c)) >= moved, "the suite's own meter does not cover the guard's example")
    require(float(exact.worst_case(p, c)) >= moved * (1 - 1e-12), "the suite's worst case is below an attained one")


def _equal(info: Info) -> st.SearchStrategy[Equal]:
    """Small bounds, all alike: where the dispersion vanishes and the error does not."""
    return st.builds(Equal, st.sampled_from((2, 8, 200)), st.floats(0.01, 0.15))


@prop(
    "dispersion_form_is_refuted",
    _equal,
    theorems=("dispersion_unsound",),
    pinned=(Equal(), Equal(tokens=200)),
)
def _dispersion(adapter: Adapter, case: Equal) -> None:
    """Equal bounds have no dispersion, yet errors within them move attention: 0.049834 at c = 0.1, not 0.006423."""
    one = Case(layout=Layout(head_dim=2, head_dim_v=2), lengths=(case.tokens,))
    k, q = np.tile([1.0, -1.0], (case.tokens, 1)), np.asarray([1.0, 1.0])
    block, _ = put(adapter, one, k, q)
    block, meter = put(adapter, one, k, q * case.c / block.c[0, 0])
    p, c = exact.softmax(block.y)[0], block.c[0]
    refuted("dispersion form", dispersion(p, c), block, meter)
    if case == Equal():
        paper = abs(dispersion(p, c) - 0.006423) < 5e-7 and abs(attained(p, c) - 0.049834) < 5e-7
        require(paper, f"guard: {dispersion(p, c)}, {attained(p, c)}")


def _rare(info: Info) -> st.SearchStrategy[Rare]:
    return st.builds(Rare, st.floats(9.0, 22.0))


@prop(
    "variance_averaged_form_is_refuted",
    _rare,
    theorems=("variance_averaged_unsound",),
    pinned=(Rare(), Rare(10.0)),
)
def _variance(adapter: Adapter, case: Rare) -> None:
    """A rare token's variance averages away, its exponential does not."""
    step = 2.0**-7
    one = Case(layout=Layout(head_dim=2, head_dim_v=2), lengths=(2,))
    # codes 126 and −127: a logit of one step down, and a bound of one step
    k = np.asarray([[0.0, 0.0], [126 * step, -127 * step]])
    q = np.full(2, case.c / step) / float(np.float32(2**-0.5))
    block, meter = put(adapter, one, k, q)
    p, c = exact.softmax(block.y)[0], block.c[0]
    refuted("variance-averaged form", variance_averaged(p, c), block, meter)
