"""What a caller may have set elsewhere in the process."""

from __future__ import annotations

import numpy as np

from ..adapter import Adapter, Layout, optional
from ..case import Case, build
from ..checks import require, same
from ..registry import prop
from ..strategies import plain


@prop(
    "settings_change_nothing",
    plain(maybe=("groups", "sketch", "witness", "equaliser", "bypass", "dither"), kv_heads=2, batch=(1, 2)),
    theorems=("tv_softmax_le_meter_of_rounding",),
    needs=("settings",),
    pinned=(Case(layout=Layout(kv_heads=2, head_dim=64, sketch=2, witness_bands=2), lengths=(30, 9), group_heads=2),),
    examples=15,
)
def _settings(adapter: Adapter, case: Case) -> None:
    """Autocast, a reduced precision of products, another default dtype: the same bytes, the same report."""
    scene = build(adapter, case)
    bytes_, decoded = adapter.stored(scene.store), scene.decode()
    for name, context in optional(adapter).settings().items():
        with context:
            other = build(adapter, case)
            again = other.decode()
        for field, x in vars(bytes_).items():
            y = getattr(adapter.stored(other.store), field)
            require(x is None or np.array_equal(x, y, equal_nan=True), f"{field}: other bytes under {name}")
        same(decoded, again, what=f"{name} was on")
