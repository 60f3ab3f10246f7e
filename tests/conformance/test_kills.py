"""Every property has a planted bug that it alone rejects, by the matrix in ``kills.json``; a sample of it is run."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from witcert_conformance import kills
from witcert_conformance.mutants import IMPLIED, mutants

from witcert.spec import links

MUTANTS = mutants()


def test_every_property_rejects_a_planted_bug_that_no_other_does() -> None:
    """By the matrix that is kept; IMPLIED holds the reasons of the few that do not."""
    matrix, asked = kills.load(), kills.asked()
    without = {name for name in asked if not matrix.sole(name)}
    assert without == set(IMPLIED)
    assert {name for name, by in matrix.rejected_by.items() if MUTANTS[name].killed_by not in by} == set()


def test_the_kept_matrix_is_of_these_bugs_and_properties() -> None:
    matrix = kills.load()
    assert {prop for _, prop in matrix.stale()} == set(), "run python -m witcert_conformance.kills"
    assert matrix.mutants.keys() == MUTANTS.keys() == matrix.rejected_by.keys()
    assert matrix.properties.keys() == kills.asked().keys()


def test_a_sample_of_the_matrix_is_true() -> None:
    """Other bugs and other properties whenever the matrix changes."""
    matrix, asked = kills.load(), kills.asked()
    rng = np.random.default_rng(zlib.crc32(kills.FILE.read_bytes()))
    alone = [name for name, by in matrix.rejected_by.items() if len(by) == 1 and MUTANTS[name].path is not None]
    for name in rng.choice(alone, 5, replace=False).tolist():
        mutant = MUTANTS[name]
        group = {p.name for p in asked.values() if p.group == asked[mutant.killed_by].group}
        some = group | set(rng.choice(list(asked), 6, replace=False).tolist())
        assert kills.row(mutant, among=[asked[p] for p in sorted(some)]) == [mutant.killed_by], name


def test_a_claim_that_is_not_so_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("budget_divides_by_layers_heads_and_steps", "zero_groups_have_a_scale")
    few, bug = {name: kills.asked()[name] for name in names}, "cells_wrap_in_int32"
    monkeypatch.setattr(kills, "asked", lambda: few)
    monkeypatch.setattr(kills, "mutants", lambda: {bug: MUTANTS[bug]})
    assert kills.broken(kills.Matrix(rejected_by={bug: [names[0]]})) == []
    assert kills.broken(kills.Matrix(rejected_by={bug: [names[1]]})) == [names[1]]
    monkeypatch.setattr(kills, "rejects", lambda prop, mutant, seed: False)
    assert kills.broken(kills.Matrix(rejected_by={bug: [names[0]]})) == [bug, names[0]]


def test_every_core_theorem_has_a_property_with_a_planted_bug_of_its_own() -> None:
    """But those that no implementation can be asked for, with their reasons."""
    matrix, exempt = kills.load(), {*links.PROOF_ONLY, *links.REFERENCE_ONLY}
    without = [
        row.theorem.name
        for row in links.rows()
        if row.theorem.core and row.theorem.name not in exempt and not any(map(matrix.sole, row.properties))
    ]
    assert without == []


def test_the_table_says_which_property_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    kills.main(["--show"])
    shown = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{shown}")
    assert "only by   " in shown and "killed by " in shown
    assert shown.splitlines()[-1].startswith(f"{len(MUTANTS)} planted bugs")
