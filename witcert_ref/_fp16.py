"""Directed rounding to float16."""

import numpy as np
from numpy.typing import NDArray

from witcert_ref._checks import Array

TINY = np.float64(2.0**-24)  # the smallest positive float16


def round_up(x: Array) -> NDArray[np.float16]:
    """The smallest float16 that is at least x; +Inf above 65504 and for NaN."""
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
        half = np.where(half.astype(np.float64) < x, np.nextafter(half, np.float16(np.inf)), half)
    return np.where(np.isnan(x), np.float16(np.inf), half)


def round_down(x: Array) -> NDArray[np.float16]:
    """The largest float16 that is at most x; -Inf below -65504 and for NaN."""
    return -round_up(-x)
