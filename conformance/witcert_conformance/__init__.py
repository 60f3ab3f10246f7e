"""What an implementation of certified attention over a compressed KV cache must keep, as properties that can fail."""

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
from .runner import check

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
]
