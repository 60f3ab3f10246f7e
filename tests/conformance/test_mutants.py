"""Every planted bug is rejected by an assertion of the property that is meant to, and its twin passes."""

from __future__ import annotations

import numpy as np
import pytest
from witcert_conformance import checks
from witcert_conformance.exact import meter
from witcert_conformance.mutants import mutants
from witcert_conformance.properties import guards
from witcert_conformance.registry import properties
from witcert_conformance.runner import Outcome, run_property

MUTANTS = mutants()
TWINS = sorted({m.twin for m in MUTANTS.values()}, key=lambda kind: kind.__name__)


def killed(name: str) -> Outcome:
    mutant = MUTANTS[name]
    return run_property(properties()[mutant.killed_by], mutant.kind(), name, profile="mutants", shrink=False)


def test_every_mutant_is_killed_by_an_assertion_of_its_property() -> None:
    outcomes = {name: killed(name) for name in MUTANTS}
    assert {name: o.message for name, o in outcomes.items() if o.verdict != "failed"} == {}


@pytest.mark.parametrize("twin", TWINS, ids=lambda kind: kind.__name__)
def test_the_unmutated_twin_passes_every_property(twin: type) -> None:
    adapter = twin()
    outcomes = [run_property(p, adapter, twin.__name__, profile="mutants") for p in properties().values() if not p.cuda]
    assert [(o.name, o.verdict, o.message, o.reproduction) for o in outcomes if o.verdict != "passed"] == []


def test_there_are_enough_planted_bugs_and_each_is_one_change() -> None:
    assert len(MUTANTS) >= 50
    for mutant in MUTANTS.values():
        own = [n for n in vars(mutant.kind) if not n.startswith("__")]
        assert mutant.mistake, mutant.name
        assert 1 <= len(own) <= 4, (mutant.name, own)


def test_properties_name_their_theorems_and_say_what_holds() -> None:
    for prop in properties().values():
        assert prop.summary.endswith("."), prop.name
        assert all(t.startswith("WitCert.") for t in prop.theorems)


@pytest.mark.parametrize(
    ("form", "name"),
    [("dispersion", "dispersion_form_is_refuted"), ("variance_averaged", "variance_averaged_form_is_refuted")],
)
def test_a_guard_that_stops_biting_fails_the_suite(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, form, lambda p, c: float(meter(p, c)))
    outcome = run_property(properties()[name], TWINS[0](), "twin", profile="quick", shrink=False)
    assert outcome.verdict == "failed"
    assert "no longer bites" in outcome.message


def test_a_meter_below_the_worst_case_by_one_rounding_is_rejected() -> None:
    """Tolerance 0: the largest float32 below the worst case fails, the smallest above it passes."""
    from dataclasses import replace

    from witcert_conformance import Case, Layout, exact, load
    from witcert_conformance.case import build
    from witcert_conformance.model import blocks

    scene = build(load("twin"), Case(layout=Layout(head_dim=8), lengths=(5,), queries="after"))
    (block,) = blocks(scene)
    worst = exact.worst_case_mp(exact.softmax_mp(block.logits_mp(0)), block.bounds_mp(0))
    below = np.float32(float(worst))
    below = below if float(below) < worst else np.nextafter(below, np.float32(0))
    decoded = scene.decode()
    with pytest.raises(checks.Violation, match="meter"):
        checks.meter_covers_worst_case(block, replace(decoded, meter=np.full_like(decoded.meter, float(below))))
    above = float(np.nextafter(below, np.float32(1)))
    checks.meter_covers_worst_case(block, replace(decoded, meter=np.full_like(decoded.meter, above)))
