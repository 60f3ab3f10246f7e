"""Is the certificate's polynomial an upper bound of 2^c − 1 at every float32 from 0 to one nat?

    python bench/rise_bound.py

Tries all of them, with and without fused multiply-adds, against float64's expm1; writes ``rise_bound.json``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from common import write
from numpy.typing import NDArray

from witcert_kernels import rounding

CHUNK = 2**22
ULP64 = 2.0**-50  # of expm1, generously

Float32 = NDArray[np.float32]


def rise(c: Float32) -> Float32:
    """The polynomial as it is written, each operation rounded."""
    total = np.full_like(c, rounding.RISE[-1])
    for coefficient in rounding.RISE[-2::-1]:
        total = np.float32(coefficient) + c * total
    return c * total


def rise_fused(c: Float32) -> Float32:
    """With each product and sum rounded once."""
    wide = c.astype(np.float64)
    total = np.full_like(c, rounding.RISE[-1])
    for coefficient in rounding.RISE[-2::-1]:
        total = (np.float32(coefficient).astype(np.float64) + wide * total).astype(np.float32)
    return c * total


def check(stride: int) -> dict[str, Any]:
    """Relative excess over 2^c − 1 of every ``stride``-th float32, and how often there was none; zero and results below
    2^-125 are only checked not to be negative.
    """
    stop = int(np.float32(rounding.RISE_LIMIT).view(np.uint32)) + 1
    report: dict[str, Any] = {"coefficients": list(rounding.RISE), "limit": rounding.RISE_LIMIT, "stride": stride}
    least, most, checked, below = math.inf, 0.0, 0, 0
    for begin in range(0, stop, CHUNK * stride):
        c = np.arange(begin, min(begin + CHUNK * stride, stop), stride, dtype=np.uint32).view(np.float32)
        truth = np.expm1(c.astype(np.float64) * math.log(2.0))
        normal = truth >= 2.0**-125
        for evaluate in (rise, rise_fused):
            got = evaluate(c)
            assert bool((got >= 0).all())
            if normal.any():
                excess = got[normal].astype(np.float64) / truth[normal] - 1.0
                least, most = min(least, float(excess.min())), max(most, float(excess.max()))
                below += int((excess < ULP64).sum())
            checked += len(c)
    return report | {"checked": checked, "below": below, "least_excess": least, "largest_excess": most}


def main() -> None:
    """Every float32."""
    report = check(1)
    print(report)
    print(write("rise_bound", report))


if __name__ == "__main__":
    main()
