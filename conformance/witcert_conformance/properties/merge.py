"""Split-KV: partial results merge to what one pass gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import checks
from ..adapter import Adapter, Layout
from ..case import Case, build
from ..checks import require, run
from ..registry import prop
from ..strategies import plain
from .nonfinite import BAD, spoiled

ONE_TOKEN_PAGES = Layout(page_size=1, head_dim=8)
UNEVEN = Case(layout=ONE_TOKEN_PAGES, lengths=(9,), keys="massive", queries="after", splits=3)


@prop(
    "splits_merge_by_their_weights",
    plain(on=("splits",), lengths=(2, 16), keys=("normal", "massive", "one_huge", "edge")),
    theorems=("merge_splits",),
    needs=("splits",),
    pinned=(UNEVEN, replace(UNEVEN, splits=2, seed=3), replace(UNEVEN, keys="one_huge", scale=0.1)),
)
def _splits(adapter: Adapter, case: Case) -> None:
    """Any number of splits keeps every contract."""
    run(build(adapter, case), checks.everything(adapter.info))


@prop(
    "empty_splits",
    plain(on=("splits",), lengths=(0, 3), maybe=("sinks",)),
    theorems=("merge_splits",),
    needs=("splits",),
    pinned=(replace(UNEVEN, lengths=(1,), splits=6), replace(UNEVEN, lengths=(0, 2), splits=4)),
)
def _empty(adapter: Adapter, case: Case) -> None:
    """More splits than pages: an empty one has weight 0, never −∞ − −∞."""
    run(build(adapter, replace(case, splits=8)), checks.ALL)


@prop(
    "flags_survive_the_merge",
    plain(on=("splits",), lengths=(4, 12), batch=(1, 2), keys=("normal", "edge")),
    theorems=("merge_splits",),
    needs=("splits",),
    pinned=tuple(replace(UNEVEN, keys="normal", seed=s) for s in range(4)),
)
def _flags(adapter: Adapter, case: Case) -> None:
    """A key or value that is not finite in any split reaches the report."""
    for bad in BAD[:2]:
        scene, _, h = spoiled(adapter, case, key=bad)
        decoded = run(scene, (checks.meter_is_a_probability,))
        group = slice(h * case.group_heads, (h + 1) * case.group_heads)
        require(
            (decoded.meter[0, group] == 1).all(),
            f"meter: got {decoded.meter[0, group].tolist()}, wants 1: a key is {bad}",
        )
        if "value_error" in adapter.info.offers:
            scene, _, h = spoiled(adapter, case, value=bad)
            decoded = scene.decode()
            assert decoded.value_error is not None
            require(np.isinf(decoded.value_error[0, group]).all(), f"value_error: finite although a value is {bad}")
