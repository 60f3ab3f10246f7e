"""`witcert spec` as a user runs it, in a copy of the checkout."""

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from witcert_ref.spec import load

from .copies import ROOT

Run = Callable[..., subprocess.CompletedProcess[str]]

FAKE_LAKE = """#!/bin/sh
echo "lake $*" >> lake.log
case "$1" in env) cat exported.json ;; esac
"""


def test_check_passes_and_says_what_it_cannot_see(checkout: Path, spec_command: Run) -> None:
    done = spec_command(checkout, "check")
    assert done.returncode == 0, done.stderr
    assert "Only Lean sees that" in done.stdout


def test_check_fails_on_an_edited_citation(checkout: Path, spec_command: Run) -> None:
    file = checkout / "witcert_ref" / "bounds.py"
    text = file.read_text(encoding="utf-8")
    cited = '@implements("WitCert.' + "tv_tilt_le_phi"
    assert cited in text
    file.write_text(text.replace(cited, cited[:-1] + "y"), encoding="utf-8")
    done = spec_command(checkout, "check")
    assert done.returncode == 1
    assert "tv_tilt_le_phy" in done.stderr and "Traceback" not in done.stderr


def test_check_fails_on_an_edited_source(checkout: Path, spec_command: Run) -> None:
    with (checkout / "formal/WitCert/Basic.lean").open("a", encoding="utf-8") as file:
        file.write(" ")
    done = spec_command(checkout, "check")
    assert done.returncode == 1 and "formal/WitCert/Basic.lean: edited since the export" in done.stderr


def test_check_fails_on_an_export_that_does_not_load(checkout: Path, spec_command: Run) -> None:
    file = checkout / "formal/spec.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"statement"', '"statements"', 1), encoding="utf-8")
    done = spec_command(checkout, "check")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "formal/spec.json: not as formal/check.py writes it" in done.stderr


def test_installed_without_sources(checkout: Path, spec_command: Run) -> None:
    shutil.move(checkout / "formal/spec.json", checkout / "witcert_ref/spec.json")
    shutil.rmtree(checkout / "formal")
    done = spec_command(checkout, "check")
    assert done.returncode == 2 and "is for a checkout" in done.stderr
    assert spec_command(checkout, "show", "rigidity").returncode == 0
    assert spec_command(checkout, "pin").returncode == 2


def test_lean_needs_lake(checkout: Path, spec_command: Run) -> None:
    done = spec_command(checkout, "check", "--lean", path="/nonexistent")
    assert done.returncode == 2 and "lake is not on the PATH" in done.stderr


@pytest.mark.parametrize("changed", [False, True])
def test_lean_builds_and_compares(checkout: Path, spec_command: Run, tmp_path: Path, changed: bool) -> None:
    lake = tmp_path / "bin" / "lake"
    lake.parent.mkdir()
    lake.write_text(FAKE_LAKE, encoding="utf-8")
    lake.chmod(lake.stat().st_mode | stat.S_IXUSR)
    exported = (checkout / "formal/spec.json").read_text(encoding="utf-8")
    if changed:
        exported = exported.replace("a certificate.", "no certificate.")
    (checkout / "exported.json").write_text(exported, encoding="utf-8")
    done = spec_command(checkout, "check", "--lean", path=f"{lake.parent}:{os.environ['PATH']}")
    assert (checkout / "lake.log").read_text(encoding="utf-8").splitlines() == [
        "lake exe cache get",
        "lake build",
        "lake env lean --run formal/Export.lean",
    ]
    assert done.returncode == int(changed)
    assert ("spec.json is what it exports" in done.stdout) != changed


def test_pin_shows_the_difference_and_asks(checkout: Path, spec_command: Run) -> None:
    file = checkout / "witcert_ref" / "spec.lock"
    original = file.read_text(encoding="utf-8")
    assert "Nothing has changed" in spec_command(checkout, "pin").stdout
    file.write_text(original.replace("WitCert.phi", "WitCert." + "psi"), encoding="utf-8")
    edited = file.read_text(encoding="utf-8")
    refused = spec_command(checkout, "pin", answer="n\n")
    assert refused.returncode == 1 and file.read_text(encoding="utf-8") == edited
    assert any(line.startswith("-") and "psi" in line for line in refused.stdout.splitlines())
    assert any(line.startswith("+") and "phi" in line for line in refused.stdout.splitlines())
    assert spec_command(checkout, "pin", answer="y\n").returncode == 0
    assert file.read_text(encoding="utf-8") == original


def test_list_has_every_statement(checkout: Path, spec_command: Run) -> None:
    done = spec_command(checkout)
    assert done.returncode == 0, done.stderr
    for name in [*load().theorems, *load().pending]:
        assert name in done.stdout


def test_show(checkout: Path, spec_command: Run) -> None:
    done = spec_command(checkout, "show", "tv_tilt_le_phi")
    theorem = load().theorems["WitCert." + "tv_tilt_le_phi"]
    assert theorem.statement in done.stdout and theorem.doc in done.stdout and "witcert_ref.bounds.phi" in done.stdout
    near = spec_command(checkout, "show", "tv_tilt_le_phy")
    assert near.returncode == 1 and theorem.name in near.stderr


def test_docs_writes_the_page(checkout: Path, spec_command: Run) -> None:
    assert spec_command(checkout, "docs").returncode == 0
    assert (checkout / "docs/statements.md").read_text(encoding="utf-8").startswith("# Statements")


def test_the_workflow_is_the_real_check() -> None:
    workflow = (ROOT / ".github/workflows/formal.yml").read_text(encoding="utf-8")
    steps = ("actions/checkout", "elan-init.sh", "lake exe cache get", "lake build", "formal/check.py --verify")
    places = [workflow.index(step) for step in steps]
    assert places == sorted(places)
