"""The suite as pytest sees it: a test for each implementation and property that it offers."""

from __future__ import annotations

import pytest

from .plugin import session
from .registry import Property
from .runner import run_property


def test_property(conformance_impl: str, conformance_property: Property, request: pytest.FixtureRequest) -> None:
    state = session(request.config)
    outcome = run_property(
        conformance_property,
        state.adapters[conformance_impl],
        conformance_impl,
        profile=state.profile,
        root_seed=state.seed,
    )
    state.outcomes[conformance_impl].append(outcome)
    if outcome.verdict != "passed":
        pytest.fail(
            f"{conformance_property.summary}\n\n{outcome.message}\n\nTo reproduce:\n\n{outcome.reproduction}",
            pytrace=False,
        )
