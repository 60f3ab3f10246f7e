"""The reported meter against the formula from the stored bytes, 50 digits, tolerance 0 below and 1 % above."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.kernels.oracle import Case, exact_logits, make_case, softmax, stored_logits
from witcert_kernels import Budget, PackedPool, StoreLayout
from witcert_kernels.query import group_rows, packed_query
from witcert_ref import bounds, golden

from .backends import Result, decode_torch, decode_triton, slack, stored_bounds

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, under the interpreter

SM_SCALE = 0.25
LAYOUTS = {
    "half-step": {},
    "groups": {"group": 8, "bypass": 1},
    "every-source": {"dither": True, "dither_period": 32, "sketch": 2, "witness_bands": 4, "bypass": 1},
    "witness-groups": {"group": 16, "sketch": 1, "witness_bands": 3},
}


def adversarial_queries(case: Case, rows: int) -> torch.Tensor:
    """From next to nothing to logits in the thousands; some along one channel, some along the keys themselves."""
    g = torch.Generator().manual_seed(4)
    q = torch.randn(rows, case.heads, case.pool.layout.head_dim, generator=g)
    q[::4] = 0.0
    q[::4, :, 3] = 1.0
    q[1::4] = case.keys[0][-1:].repeat_interleave(case.heads // case.pool.layout.kv_heads, 1)
    return q * torch.logspace(-4, 2, rows)[:, None, None]


@pytest.mark.parametrize("name", LAYOUTS)
def test_meter_is_between_the_formula_and_its_allowance(name: str) -> None:
    layout = StoreLayout(2, 32, 32, page_size=16, **LAYOUTS[name])
    case = make_case(21, layout, [40], heads=4)
    rows = 12
    q = adversarial_queries(case, rows)
    budget = Budget(1e-3, 2, 4, 10) if layout.dither else None
    cert = decode_triton(
        q, case.pool, case.page_table.expand(rows, -1), case.seq_lens.expand(rows), sm_scale=SM_SCALE, budget=budget
    )[2]
    for row in range(rows):
        y = stored_logits(case, 0, q[row], SM_SCALE)
        c = stored_bounds(case, 0, q[row], SM_SCALE, budget.delta_local if budget else 0.0)
        error = np.abs(y - exact_logits(case, 0, q[row], SM_SCALE))
        if not budget:
            assert bool((error <= c * (1 + 2.0**-12) + 2.0**-40 * np.abs(y)).all())
        room = slack(case, 0, q[row], SM_SCALE)
        for head in range(case.heads):
            reported = float(cert.meter[row, head])
            formula = golden.meter(golden.softmax(y[head]), c[head])
            assert reported >= formula
            assert reported <= 1.01 * float(formula) + room[head]
            assert reported >= bounds.worst_case_relaxed(softmax(y[head]), error[head])


def test_query_in_digits() -> None:
    """The digits and coefficients of the Triton read are those of the torch path's query, rounded up."""
    from witcert_kernels.triton_common import Workspace
    from witcert_kernels.triton_query import LOG2E, PackedDigits, packed_digits

    layout = StoreLayout(2, 48, 48, group=16, sketch=2, witness_bands=3, bypass=2)
    case = make_case(22, layout, [2], heads=6)
    q = adversarial_queries(case, 5)
    cal, pool = case.pool.calibration, case.pool
    arguments = (cal.mu, cal.f, cal.u, pool.bypass_channels, pool.band_of_channel, 3, 3)
    want = packed_query(group_rows(q, 2), *arguments, SM_SCALE)
    for digits in (2, 3):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        got = PackedDigits.take(
            Workspace(device), 5, 6, 48, r=2, bands=3, groups=3, kept=4, digits=digits, with_radius=True
        )
        packed_digits(got, *(x.to(device) for x in (q, *arguments[:5])), SM_SCALE)
        share = (pool.band_of_channel == torch.arange(3)[:, None]).unflatten(1, (3, 16)).sum(-1)
        assert torch.equal(got.band_share.cpu().long(), share)

        def grouped(x: torch.Tensor) -> torch.Tensor:
            return group_rows(x.cpu().double().reshape(5, 6, -1), 2).reshape(2, 15, *x.shape[2:])

        number = (grouped(got.digits) * 256.0 ** torch.arange(digits)[:, None]).sum(2)
        exact = SM_SCALE * LOG2E * (group_rows(q, 2).double() * cal.f.double()[:, None])
        exact = exact.masked_fill(cal.bypass_mask[:, None], 0.0)
        lost = (exact - number * grouped(got.unit)[..., None]).abs().unflatten(-1, (3, 16)).sum(-1)
        assert bool((lost * 127.5 <= grouped(got.dot)).all())
        assert bool((number.abs() <= 256**digits / 2).all()) and (number.abs().amax() > 256**digits / 2.1)
        torch.testing.assert_close(grouped(got.sketch), want.a_unit.double() * LOG2E, rtol=1e-6, atol=0)
        torch.testing.assert_close(grouped(got.shift), want.shift * LOG2E, rtol=1e-12, atol=1e-12)
        for mine, theirs in (
            (grouped(got.half), want.half),
            (grouped(got.fixed) - grouped(got.dot), want.sketch_error),
            (grouped(got.witness), want.witness),
            (grouped(got.radius_bias), want.radius_bias),
            (grouped(got.radius_square) / LOG2E, want.radius_square),
        ):
            torch.testing.assert_close(mine, theirs.double() * LOG2E, rtol=3e-5, atol=1e-12)


@pytest.mark.parametrize("size", [2.0**-80, 1.0, 2.0**126])
@pytest.mark.parametrize("decode", [decode_torch, decode_triton])
def test_value_error_covers_exact_values_of_any_size(decode: Callable[..., Result], size: float) -> None:
    """Squares of the small ones are below float32's range, a sum of the large ones is above it."""
    g = torch.Generator().manual_seed(5)
    pool = PackedPool(StoreLayout(1, 8, 4), 1)
    q, k = (torch.randn(9, 1, 8, generator=g) for _ in range(2))
    v = size * (1 + torch.rand(9, 1, 4, generator=g))
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    out, _, cert = decode(q, pool, table, lengths, torch.tensor([0, 9], dtype=torch.int32), k, v)
    logits = (q[:, 0].double() @ k[:, 0].double().T * 8**-0.5).masked_fill(torch.ones(9, 9).triu(1) > 0, -torch.inf)
    error = (logits.softmax(-1) @ v[:, 0].double() - out[:, 0].double()).norm(dim=-1)
    assert bool((error <= cert.value_error[:, 0]).all()) and bool((error > 0).any())
