"""No function of the reference claims a theorem that it does not follow from."""

import functools
import importlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from mpmath import mp

from witcert_ref.spec import claims

from . import basic, certificate, keys, reading, writer
from .table import DIGITS, TABLE, Claim, halved

assert all((basic, certificate, keys, reading, writer))  # imported for their entries in the table

CHECKS = [pytest.param(claim, id=f"{claim.theorem}-{claim.check.__name__}") for claim in TABLE]
CASES = [pytest.param(c, function, id=f"{c.theorem}-{function}") for c in TABLE for function in c.functions]


def run(claim: Claim, **options: Any) -> None:
    """Check the claim on drawn inputs, the same ones each time."""

    @settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck), **options)
    @given(claim.inputs)
    def follow(case: object) -> None:
        with mp.workdps(DIGITS):
            claim.check(case)

    follow()


def test_every_claim_has_its_check() -> None:
    claimed = Counter((name, function) for name, functions in claims().items() for function in functions)
    checked = Counter((claim.theorem, f"witcert_ref.{f}") for claim in TABLE for f in claim.functions)
    assert claimed == checked


@pytest.mark.parametrize("claim", CHECKS)
def test_the_reference_follows(claim: Claim) -> None:
    run(claim, max_examples=claim.examples)


@pytest.mark.parametrize("claim,function", CASES)
def test_a_halved_function_does_not_follow(claim: Claim, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = f"witcert_ref.{function}".rsplit(".", 1)
    original = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(f"{module}.{name}", functools.wraps(original)(lambda *a, **k: halved(original(*a, **k))))
    with pytest.raises(AssertionError):
        run(claim, max_examples=claim.examples, phases=[Phase.generate], report_multiple_bugs=False)
