"""Theorem names that the properties cite are in the Lean export, or announced for the next one."""

from __future__ import annotations

from witcert_conformance.registry import properties

from witcert_ref import spec


def test_every_cited_theorem_exists() -> None:
    known = spec.load()
    names = known.theorems.keys() | known.pending.keys()
    cited = {t for p in properties().values() for t in p.theorems}
    assert cited <= names, sorted(cited - names)
