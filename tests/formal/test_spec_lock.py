"""The pins of the reference."""

import dataclasses
import hashlib
import json

import pytest

from witcert.spec import guard, lock
from witcert_ref.spec import Spec, claims, load

from .copies import ROOT

NOW = lock.build(load(), claims(), ROOT)


def changed(name: str, statement: str) -> Spec:
    """A later export in which one statement is another."""
    theorem = dataclasses.replace(load().theorems[name], statement=statement)
    return dataclasses.replace(load(), theorems={**load().theorems, name: theorem})


def test_every_claim_is_pinned_as_it_is_now() -> None:
    assert lock.check(lock.PATH.read_text(encoding="utf-8"), NOW) == []


def test_a_pin_holds_the_statement_and_its_modules() -> None:
    assert set(NOW["theorems"]) == set(claims())
    for name, entry in NOW["theorems"].items():
        theorem = load().theorems.get(name) or load().pending[name]
        assert "\n".join(entry["statement"]) == theorem.statement
        assert entry["status"] == ("pending" if theorem.pending else "proved")
        assert theorem.pending or guard.module_path(theorem.module) in entry["modules"]
    tier_b = NOW["theorems"]["WitCert.tierB_certificate"]["modules"]
    assert {path.rsplit("/", 1)[1] for path in tier_b} == {
        "Basic.lean",
        "Certificate.lean",
        "Dither.lean",
        "TierB.lean",
    }
    for path, seal in NOW["modules"].items():
        assert hashlib.sha256((ROOT / path).read_bytes()).hexdigest() == seal


@pytest.mark.parametrize("name", sorted(claims()))
def test_one_character_of_a_pinned_statement(name: str) -> None:
    edited = json.loads(lock.dump(NOW))
    line = edited["theorems"][name]["statement"][-1]
    edited["theorems"][name]["statement"][-1] = line[:-1] + "¿"
    assert lock.check(lock.dump(edited), NOW) == [f"{name}: the statement differs from its pin"]


@pytest.mark.parametrize("name", sorted(set(claims()) & set(load().theorems)))
def test_a_statement_that_a_new_export_changes(name: str) -> None:
    wanted = lock.build(changed(name, load().theorems[name].statement + "¿"), claims(), ROOT)
    assert lock.check(lock.dump(NOW), wanted) == [f"{name}: the statement differs from its pin"]


def test_a_module_that_a_new_export_changes() -> None:
    path = "formal/WitCert/Basic.lean"
    later = dataclasses.replace(load(), sources={**load().sources, path: "0" * 64})
    problems = lock.check(lock.dump(NOW), lock.build(later, claims(), ROOT))
    assert problems == [f"{path}: changed since it was pinned"]


def test_another_set_of_claims() -> None:
    first, *rest = sorted(claims())
    fewer = lock.build(load(), rest, ROOT)
    assert f"{first}: pinned, but no longer claimed" in lock.check(lock.dump(NOW), fewer)
    assert f"{first}: claimed, but not pinned" in lock.check(lock.dump(fewer), NOW)
    assert len(lock.check("", NOW)) == len(claims())


def test_a_pending_statement_that_was_proved() -> None:
    name = "WitCert.tv_triangle"
    pending = lock.build(load(), [name], ROOT)
    proved = dataclasses.replace(load().pending[name], pending=False, module="WitCert.Basic")
    later = dataclasses.replace(load(), theorems={**load().theorems, name: proved})
    problems = lock.check(lock.dump(pending), lock.build(later, [name], ROOT))
    assert f"{name}: the status differs from its pin" in problems


def test_the_difference_names_the_lines() -> None:
    lines = lock.difference("a\nb\n", "a\nc\n")
    assert "-b" in lines and "+c" in lines
