"""The command line as a user meets it, in a process of its own where the exit code matters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from witcert import __version__, schemes
from witcert.cli import app, main

runner = CliRunner()


def witcert(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "witcert.cli", *arguments], capture_output=True, text=True, check=False, timeout=600
    )


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0 and result.stdout.strip() == f"witcert {__version__}"


def test_every_command_has_help_with_an_example() -> None:
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]
    assert set(commands) == {
        "demo", "generate", "calibrate", "capture", "meter", "schemes", "conformance", "release-check",
    }  # fmt: skip
    for name in commands:
        result = runner.invoke(app, [name, "--help"])
        assert result.exit_code == 0 and f"Example: witcert {name}" in " ".join(result.stdout.split())


def test_schemes_lists_all() -> None:
    result = runner.invoke(app, ["schemes"])
    assert all(name in result.stdout for name in schemes.names())


def test_spec_is_mounted() -> None:
    assert "tv_tilt_le_meter" in runner.invoke(app, ["spec"]).stdout


def test_a_mistake_ends_with_1_and_no_traceback() -> None:
    result = witcert("meter", __file__)
    assert result.returncode == 1 and not result.stdout
    assert result.stderr.startswith("witcert: ") and "Traceback" not in result.stderr


def test_a_mistake_is_said_in_one_line_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, captured, text = (str(tmp_path / name) for name in ("wrong.safetensors", "c.safetensors", "text.txt"))
    tensors = {f"layers.0.{name}": torch.zeros(2, 1, 2) for name in "qkv"}
    save_file(tensors, wrong, metadata={"sm_scale": "-1"})
    save_file(tensors, captured, metadata={"sm_scale": "1"})
    Path(text).write_bytes(b"\xff\xfe")
    for arguments, said in (
        (("generate", "hello", "--model", "/nonexistent"), "nonexistent"),
        (("demo", "--json", "/nonexistent/demo.json"), "folder does not exist"),
        (("meter", __file__), "test_cli.py"),
        (("meter", wrong), "sm_scale: got '-1'"),
        (("meter", captured, "--json", "/nonexistent/cells.json"), "folder does not exist"),
        (("meter", captured, "--json", str(tmp_path)), "is a folder"),
        (("meter", captured, "--tau", "nan"), "tau: got nan"),
        (("meter", captured, "--scheme", "int8", "--scheme", "int7"), "scheme: got 'int7'"),
        (("capture", "--text", text, "-o", "/nonexistent/x"), "folder does not exist"),
        (("calibrate", "--text", text, "-o", "/nonexistent/x"), "folder does not exist"),
        (("capture", "--text", text, "-o", captured), "text.txt, wants UTF-8"),
        (("calibrate", "--text", text, "-o", captured), "text.txt, wants UTF-8"),
        (("conformance", "--impl", "ref", "--profile", "none"), "profile: got 'none'"),
    ):
        monkeypatch.setattr(sys, "argv", ["witcert", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert ended.value.code == 1 and not out, arguments
        assert err.startswith("witcert: ") and said in err and err.count("\n") == 1


@pytest.mark.model
def test_capture_meter_and_generate(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The ferry to the island leaves at nine, and the captain counts the passengers twice. " * 30)
    captured, cells = tmp_path / "captured.safetensors", tmp_path / "cells.json"
    done = runner.invoke(app, ["capture", "--text", str(text), "--length", "300", "--steps", "4", "-o", str(captured)])
    assert done.exit_code == 0 and "30 layers, 300 tokens, 4 query rows" in done.stdout
    done = runner.invoke(app, ["meter", str(captured), "--scheme", "int8", "--json", str(cells)])
    assert done.exit_code == 0 and "any_query" in done.stdout
    document = json.loads(cells.read_text())
    assert len(document["cells"]) == 30 * 9 * 4
    assert all(cell["meter"] >= cell["true_tv"] for cell in document["cells"])
    done = runner.invoke(app, ["generate", "Say yes.", "--max-new-tokens", "4", "--tau", "0.2"])
    assert done.exit_code == 0 and "coverage 1.0000" in done.stdout and "pages repaired" in done.stdout
    for prompt, said in (("", "empty text"), ("word " * 9000, "the model's window of 8192")):
        result = runner.invoke(app, ["generate", prompt])
        assert result.exit_code != 0 and said in str(result.exception)
