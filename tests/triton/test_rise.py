"""The polynomial upper bound of e^c − 1: what the kernel evaluates, and that every float32 was tried."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import rise_bound
import torch
import triton
import triton.language as tl

from witcert_kernels import rounding
from witcert_kernels.triton_state import rise_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _kernel(C, Out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(Out + at, rise_of(tl.load(C + at)))


def test_the_kernel_evaluates_that_polynomial() -> None:
    c = torch.linspace(0.0, rounding.RISE_LIMIT, 2**14, device=DEVICE)
    out = torch.empty_like(c)
    _kernel[(1,)](c, out, N=len(c))
    evaluate = rise_bound.rise_fused if DEVICE == "cuda" else rise_bound.rise
    np.testing.assert_array_equal(out.cpu().numpy(), evaluate(c.cpu().numpy()))


def test_a_sample_is_above() -> None:
    report = rise_bound.check(4099)
    assert report["below"] == 0 and report["least_excess"] > 0 and report["largest_excess"] < 2.0**-17
    assert report["checked"] > 500_000


def test_every_float_was_tried() -> None:
    report = json.loads((Path(rise_bound.__file__).parent / "results" / "rise_bound.json").read_text(encoding="utf-8"))
    assert report["coefficients"] == list(rounding.RISE) and report["limit"] == rounding.RISE_LIMIT
    assert report["stride"] == 1 and report["below"] == 0 and report["least_excess"] > 0
    assert report["checked"] == 2 * (int(np.float32(rounding.RISE_LIMIT).view(np.uint32)) + 1)
