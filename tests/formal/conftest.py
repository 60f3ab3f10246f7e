import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .copies import copy_checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path / "checkout")


@pytest.fixture
def spec_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `witcert spec …` of a copy."""

    def run(root: Path, *arguments: str, path: str | None = None, answer: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        if path is not None:
            environment["PATH"] = path
        command = [sys.executable, "-m", "witcert.spec", *arguments]
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, input=answer)

    return run
