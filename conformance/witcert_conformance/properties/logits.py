"""What shifts a logit without changing its bound: sinks, soft cap, bias."""

from __future__ import annotations

from dataclasses import replace

from .. import checks
from ..adapter import Adapter
from ..case import Case, build
from ..checks import run
from ..registry import prop
from ..strategies import plain

SEEN = Case(lengths=(5, 7), group_heads=2)


@prop(
    "sinks_are_in_the_denominator",
    plain(on=("sinks",), lengths=(0, 10)),
    theorems=("read_certificate", "tv_tilt_le_meter_of_repaired"),
    needs=("sinks",),
    pinned=(replace(SEEN, sinks=True), replace(SEEN, sinks=True, lengths=(0, 2))),
)
def _sinks(adapter: Adapter, case: Case) -> None:
    """A sink is a token with value 0 and c = 0 in the denominator."""
    kinds = [*checks.ALL]
    if "value_error" in adapter.info.offers:
        kinds.append(checks.value_error_covers)
    run(build(adapter, case), kinds)


@prop(
    "sinks_count_once",
    plain(on=("sinks", "splits"), lengths=(2, 12)),
    theorems=("merge_splits",),
    needs=("sinks", "splits"),
    pinned=(replace(SEEN, sinks=True, splits=3),),
)
def _once(adapter: Adapter, case: Case) -> None:
    """A sink counts once, never once a split."""
    run(build(adapter, case), checks.ALL)


@prop(
    "soft_cap_is_on_the_logit",
    plain(on=("soft_cap",), scales=(1.0, 4.0)),
    theorems=("abs_softcap_sub_le", "abs_tanh_sub_le"),
    needs=("soft_cap",),
    pinned=(
        replace(SEEN, soft_cap=2.0, scale=4.0),
        replace(SEEN, soft_cap=30.0),
        *(
            replace(SEEN, soft_cap=2.0, keys="edge", lengths=(2,), queries="signs", scale=s)
            for s in (64.0, 128.0, 256.0)
        ),
    ),
)
def _cap(adapter: Adapter, case: Case) -> None:
    """κ tanh(x/κ) is taken of the whole logit and never of its bound."""
    run(build(adapter, case), checks.ALL)


@prop(
    "bias_is_inside_the_cap",
    plain(on=("bias",), maybe=("soft_cap",)),
    theorems=("abs_softcap_sub_le",),
    needs=("bias",),
    pinned=(replace(SEEN, bias=True), replace(SEEN, bias=True, soft_cap=2.0)),
)
def _bias(adapter: Adapter, case: Case) -> None:
    """A bias is added before the cap and changes no bound."""
    run(build(adapter, case), checks.ALL)


@prop(
    "minus_infinity_masks",
    plain(on=("bias", "masked"), maybe=("soft_cap", "splits"), lengths=(1, 10)),
    theorems=("softmax_isProb",),
    needs=("bias",),
    pinned=(
        replace(SEEN, masked=True),
        replace(SEEN, masked=True, soft_cap=2.0),
        replace(SEEN, masked=True, lengths=(1,)),
    ),
)
def _masked(adapter: Adapter, case: Case) -> None:
    """A bias of −Inf masks a token, under a cap too; where it masks all, the row is empty."""
    run(build(adapter, case), checks.ALL)
