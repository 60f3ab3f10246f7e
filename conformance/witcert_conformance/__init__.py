"""What an implementation of certified attention over a compressed KV cache must keep, as properties that can fail."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import (
        CAPABILITIES,
        Account,
        Adapter,
        Budget,
        Calibration,
        Counts,
        Decoded,
        Gated,
        Info,
        Layout,
        Observed,
        Read,
        Stored,
        load,
    )
    from .case import Case
    from .release import release_check
    from .runner import check, run_suite

# loaded on first use, so that the pytest plugin costs other tests nothing
_HOMES = {
    **dict.fromkeys(
        (
            "CAPABILITIES", "Account", "Adapter", "Budget", "Calibration", "Counts", "Decoded", "Gated", "Info",
            "Layout", "Observed", "Read", "Stored", "load",
        ),
        "adapter",
    ),
    "Case": "case",
    "check": "runner",
    "release_check": "release",
    "run_suite": "runner",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


__all__ = [
    "CAPABILITIES",
    "Account",
    "Adapter",
    "Budget",
    "Calibration",
    "Case",
    "Counts",
    "Decoded",
    "Gated",
    "Info",
    "Layout",
    "Observed",
    "Read",
    "Stored",
    "check",
    "load",
    "release_check",
    "run_suite",
]
