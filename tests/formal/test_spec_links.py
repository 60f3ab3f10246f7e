"""From each statement to functions, kernels and properties; and the rules of citing."""

import pytest

from witcert.spec import links, render
from witcert_ref.spec import claims, implements, load, theorem

from .copies import ROOT

CORE = sorted(t.name for t in load().theorems.values() if t.core)


@pytest.mark.parametrize("name", CORE)
def test_every_core_theorem_is_implemented(name: str) -> None:
    row = next(row for row in links.rows() if row.theorem.name == name)
    if name in links.PROOF_ONLY:
        assert links.PROOF_ONLY[name] and not row.functions
        return
    assert row.functions, f"{name}: no function of witcert_ref implements it"
    if name in links.REFERENCE_ONLY:
        assert links.REFERENCE_ONLY[name] and not row.properties and not row.kernels
        return
    if links.properties():  # the suite is importable
        assert row.properties, f"{name}: no conformance property names it"


def test_proof_only_names_core_theorems() -> None:
    assert set(links.PROOF_ONLY) | set(links.REFERENCE_ONLY) <= set(CORE)
    assert not set(links.PROOF_ONLY) & set(links.REFERENCE_ONLY)


def test_every_linked_kernel_exists() -> None:
    for name, kernels in links.KERNELS.items():
        assert theorem(name) and kernels
        for kernel in kernels:
            assert links.defined(kernel, ROOT), f"{name}: {kernel} does not exist"
    for missing in (
        "witcert.spec.links.no_such_function",
        "witcert.spec.links.Row.no_such_method",
        "no_such_package.x",
    ):
        assert not links.defined(missing, ROOT)


def test_every_linked_theorem_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    assert links.unknown() == []
    monkeypatch.setattr(links, "properties", lambda: {"WitCert." + "tv_tilt_le_psi": ("some_property",)})
    assert links.unknown() == ["WitCert." + "tv_tilt_le_psi"]


def test_pending_is_never_counted_as_proved() -> None:
    assert not set(load().pending) & set(load().theorems)
    assert {row.theorem.name for row in links.rows() if row.status == "proved"} == set(load().theorems)


def test_citing() -> None:
    proved, coming, neither = (f"WitCert.{s}" for s in ("tv_tilt_le_phi", "tv_triangle", "no_such_theorem"))
    for name, pending in [(neither, False), (neither, True), (proved, True), (coming, False)]:
        with pytest.raises(ValueError, match=name):
            implements(name, pending=pending)


def test_stacked_claims_return_the_function() -> None:
    for functions in claims().values():
        for qualified, function in functions.items():
            assert qualified == f"{function.__module__}.{function.__qualname__}"
            assert links.defined(qualified, ROOT)


def test_the_page_is_fresh() -> None:
    page = (ROOT / "docs" / "statements.md").read_text(encoding="utf-8")
    assert page == render.markdown(links.rows()), "stale: run `witcert spec docs`"
