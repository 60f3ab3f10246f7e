"""Every planted edit of the formal layer is seen without Lean."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from witcert.spec import guard
from witcert_ref.spec import load

from .copies import ROOT, copy_checkout

SPEC = "formal/spec.json"


def edit_spec(root: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the export and write it as formal/check.py would."""
    spec = json.loads((root / SPEC).read_text(encoding="utf-8"))
    edit(spec)
    text = json.dumps(spec, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    (root / SPEC).write_text(text, encoding="utf-8")


def seal(root: Path, path: str) -> None:
    """Make the export agree with an edited source."""
    seal = hashlib.sha256((root / path).read_bytes()).hexdigest()
    edit_spec(root, lambda spec: spec["sources"].update({path: seal}))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("guard"))


@contextmanager
def replaced(file: Path, text: str) -> Iterator[None]:
    original = file.read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(original, encoding="utf-8")


def test_the_checkout_is_clean() -> None:
    assert guard.check(ROOT) == []


@pytest.mark.parametrize("path", sorted(load().sources))
def test_one_character_of_any_lean_source(shared: Path, path: str) -> None:
    text = (shared / path).read_text(encoding="utf-8")
    for at in (0, len(text) // 3, len(text) // 2, len(text) - 1):
        with replaced(shared / path, text[:at] + ("x" if text[at] != "x" else "y") + text[at + 1 :]):
            assert any(path in problem for problem in guard.check(shared))


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, len((ROOT / SPEC).read_text(encoding="utf-8")) - 1), new=st.sampled_from('xt1 "\n,]'))
def test_one_character_of_the_export(shared: Path, at: int, new: str) -> None:
    text = (shared / SPEC).read_text(encoding="utf-8")
    edited = text[:at] + new + text[at + 1 :]
    with replaced(shared / SPEC, edited):
        assert bool(guard.check(shared)) == (edited != text)


@pytest.mark.parametrize("theorem", sorted(load().theorems))
def test_one_character_of_any_theorem(shared: Path, theorem: str) -> None:
    text = (shared / SPEC).read_text(encoding="utf-8")
    for old in (f'"name": "{theorem}"', json.dumps(load().theorems[theorem].statement, ensure_ascii=False)):
        at = text.index(old) + len(old) // 2
        with replaced(shared / SPEC, text[:at] + "¿" + text[at + 1 :]):
            assert any(theorem in problem for problem in guard.check(shared)) or "name" in old


def test_an_axiom_outside_the_three(checkout: Path) -> None:
    edit_spec(checkout, lambda spec: spec["theorems"][3]["axioms"].append("Lean.ofReduceBool"))
    assert guard.check(checkout) == ["WitCert.abs_dot_le_sum_bandNorm: depends on the axiom Lean.ofReduceBool"]


def test_a_sorry_that_was_sealed(checkout: Path) -> None:
    path = "formal/WitCert/Budget.lean"
    with (checkout / path).open("a", encoding="utf-8") as file:
        file.write("\n-- sorry\n")
    seal(checkout, path)
    assert guard.check(checkout) == [f"{path}: contains sorry"]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_lean_file_that_no_export_covers(checkout: Path, sealed: bool) -> None:
    path = "formal/WitCert/Orphan.lean"
    (checkout / path).write_text("namespace WitCert\nend WitCert\n", encoding="utf-8")
    if sealed:
        seal(checkout, path)
    assert guard.check(checkout) == [f"{path}: no export covers this file"]


@pytest.mark.parametrize("path", ["formal/WitCert/Rigidity.lean", "lake-manifest.json"])
def test_a_missing_source(checkout: Path, path: str) -> None:
    (checkout / path).unlink()
    assert f"{path}: missing" in guard.check(checkout)


def test_a_theorem_dropped_from_the_export(checkout: Path) -> None:
    def drop(spec: dict[str, Any]) -> None:
        spec["theorems"] = [t for t in spec["theorems"] if t["name"] != "WitCert.bias_nonneg"]

    edit_spec(checkout, drop)
    assert guard.check(checkout) == ["WitCert.bias_nonneg: declared in formal/WitCert/TierB.lean, but not exported"]


@pytest.mark.parametrize(
    "field,value", [("line", 17), ("doc", "Another."), ("paper", ["Theorem 9"]), ("module", "WitCert.Rope")]
)
def test_a_wrong_place_docstring_or_number(checkout: Path, field: str, value: object) -> None:
    edit_spec(checkout, lambda spec: spec["theorems"][0].update({field: value}))
    assert [p.split(":")[0] for p in guard.check(checkout)] == ["WitCert.abs_add_le_of_rounding"]


@pytest.mark.parametrize("file", ["README.md", "docs/guide.md", "witcert_ref/extra.py", "conformance/suite/extra.py"])
def test_a_cited_name_that_does_not_exist(checkout: Path, file: str) -> None:
    known, unknown = "WitCert." + "tv_tilt_le_phi", "WitCert." + "tv_tilt_le_psi"
    (checkout / file).parent.mkdir(parents=True, exist_ok=True)
    (checkout / file).write_text(f"`{known}`, `{'WitCert.' + 'tv_comm'}`, `{'WitCert.' + 'meter'}`\n", encoding="utf-8")
    assert guard.check(checkout) == []
    (checkout / file).write_text(f"`{unknown}`\n", encoding="utf-8")
    assert guard.check(checkout) == [f"{file}: cites {unknown}, which does not exist"]
