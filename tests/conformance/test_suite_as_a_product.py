"""The suite as a stranger meets it: options, what is not offered, the report, a reproduction, the release check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from witcert_conformance import CAPABILITIES, Case, Info, Layout, load, release, release_check
from witcert_conformance.adapters import OURS
from witcert_conformance.mutants import mutants
from witcert_conformance.registry import properties
from witcert_conformance.runner import run_property

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "my_int8_adapter:MyInt8"


def run_pytest(*arguments: str, target: str = "conformance") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "conformance"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", "pytest", target, "-p", "no:cacheprovider", "-q", "--profile", "quick", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )


def test_the_example_adapter_passes_what_it_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    adapter = load(EXAMPLE)
    outcomes = [run_property(p, adapter, EXAMPLE, profile="quick") for p in properties().values()]
    assert [(o.name, o.message) for o in outcomes if o.verdict in ("failed", "error")] == []
    assert sum(o.verdict == "passed" for o in outcomes) > 15
    assert all("needs" in o.message for o in outcomes if o.verdict == "not offered")
    assert any(o.verdict == "not offered" for o in outcomes)


def test_what_is_not_offered_is_listed_and_never_passed(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run_pytest("--impl", EXAMPLE, "-k", "scale or sketch", "--conformance-report", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not offered: sketch_is_subtracted (needs sketch)" in done.stdout
    (run,) = json.loads(report.read_text())["implementations"]
    verdicts = {p["name"]: p["verdict"] for p in run["properties"]}
    assert verdicts["scale_covers_amax"] == "passed"
    assert verdicts["sketch_is_subtracted"] == "not offered"
    assert verdicts["graph_replay_is_eager"] == "not run"


def test_the_report_says_who_was_tested_with_what(tmp_path: Path) -> None:
    report = tmp_path / "deep" / "report.json"
    assert run_pytest("--impl", "twin", "-k", "zero_groups", "--conformance-report", str(report)).returncode == 0
    data = json.loads(report.read_text())
    (run,) = data["implementations"]
    assert run["impl"] == "twin" and run["device"] == "cpu" and run["passed"] and run["seed"] == 0
    assert len(data["commit"]) >= 7 and len(data["spec_sha256"]) == 64
    (zero,) = [p for p in run["properties"] if p["name"] == "zero_groups_have_a_scale"]
    assert zero["examples"] > 2 and zero["seconds"] > 0 and zero["theorems"] == ["WitCert.abs_residual_le"]
    page = report.with_suffix(".html").read_text()
    assert "zero_groups_have_a_scale" in page and "<script" not in page and "http" not in page


@pytest.mark.parametrize("command", ["pytest --pyargs witcert_conformance -p no:cacheprovider", "witcert conformance"])
def test_a_stranger_runs_it_from_the_adapters_folder(command: str, tmp_path: Path) -> None:
    """The installed commands, without a path set."""
    module = (ROOT / "examples" / "my_int8_adapter.py").read_text().replace("scales[at] / 2 ", "scales[at] / 3 ")
    (tmp_path / "theirs.py").write_text(module)
    only = ["-k", "meter_covers_worst_case"] if command.startswith("pytest") else []
    program, *arguments = command.split()
    done = subprocess.run(
        [Path(sys.executable).parent / program, *arguments, "--impl", "theirs:MyInt8", "--profile", "quick", *only],
        cwd=tmp_path, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "check('meter_covers_worst_case', 'theirs:MyInt8', Case())" in done.stdout


def test_the_header_names_the_target() -> None:
    done = run_pytest("--impl", "twin", "-k", "zero_groups", "-v")
    assert "twin: twin 1 on cpu (numpy" in done.stdout
    assert "not offered: cuda_graphs" in done.stdout


def test_an_unknown_implementation_is_a_usage_error() -> None:
    done = run_pytest("--impl", "nonsense")
    assert done.returncode == 4
    assert "wants one of ref, torch-cpu" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["os:path", "json:JSONDecoder", "json:nothing"])
def test_what_is_no_adapter_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^impl: .*{name}"):
        load(name)


def test_a_failure_prints_a_minimal_program_that_fails(tmp_path: Path) -> None:
    name = mutants()["clips_at126"].target
    done = run_pytest("--impl", name, "-k", "residual_within_half_step")
    assert done.returncode == 1
    program = "\n".join(
        line for line in done.stdout.splitlines() if line.startswith(("from witcert_conformance", "check("))
    )
    assert "check('residual_within_half_step'" in program
    path = os.pathsep.join([str(ROOT), str(ROOT / "conformance")])
    again = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert again.returncode == 1
    assert "Violation: residual" in again.stderr


def test_a_minimal_case_is_small() -> None:
    mutant = mutants()["lse_in_base2"]
    outcome = run_property(properties()[mutant.killed_by], mutant.kind(), "mutant", profile="ci")
    assert outcome.reproduction.count("Case(") == 1
    assert len(outcome.reproduction) < 300


def test_a_pinned_case_is_made_small_too() -> None:
    """Hypothesis does not shrink the cases that are given to it."""
    mutant = mutants()["split_reads_the_first_unit"]
    prop = properties()[mutant.killed_by]
    given = run_property(prop, mutant.kind(), mutant.target, profile="quick", shrink=False).reproduction
    small = run_property(prop, mutant.kind(), mutant.target, profile="quick").reproduction
    assert "sinks" in given and "sinks" not in small and "sketch" in small and "group" in small
    with pytest.raises(AssertionError):
        exec(small, {})


def test_release_check_fails_unless_everything_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    lines: list[str] = []
    report = tmp_path / "release.json"
    assert release_check([EXAMPLE], profile="quick", report=report, write=lines.append) == 0
    assert lines[-1] == "conformance: passed" and report.is_file() and report.with_suffix(".html").is_file()
    assert release_check([mutants()["clips_at126"].target], profile="quick", write=lines.append) == 1
    assert lines[-1] == "conformance: FAILED"
    assert release_check([EXAMPLE, "no.such.module:Adapter"], profile="quick", write=lines.append) == 1


def test_a_shipped_implementation_that_does_not_load_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(release, "SHIPPED", (EXAMPLE, "torch-cpu"))
    monkeypatch.setitem(OURS, "torch-cpu", "no.such.module:Adapter")
    monkeypatch.setattr(release.kills, "broken", lambda matrix, progress: [])
    lines: list[str] = []
    assert release_check(profile="quick", write=lines.append) == 1
    assert any(line.startswith("torch-cpu: not run") for line in lines) and lines[-1] == "conformance: FAILED"


def test_a_shipped_implementation_cannot_drop_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setitem(release.OPTIONAL, EXAMPLE, frozenset(CAPABILITIES) - {"sketch"})
    lines: list[str] = []
    assert release_check([EXAMPLE], profile="quick", write=lines.append) == 1
    assert any("no longer offers sketch" in line for line in lines)


def test_capabilities_are_names() -> None:
    with pytest.raises(ValueError, match=r"offers: got \['speed'\]"):
        Info(name="x", offers=frozenset({"speed"}))


def test_a_case_prints_as_python() -> None:
    case = Case(layout=Layout(head_dim=8, sketch=2), lengths=(3, 1), soft_cap=2.0)
    assert eval(repr(case), {"Case": Case, "Layout": Layout}) == case
    assert "soft_cap=2.0" in repr(case) and "seed" not in repr(case)
