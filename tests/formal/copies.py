"""Temporary copies of the checkout, to plant edits in."""

import shutil
from pathlib import Path

from witcert.spec import guard

ROOT = Path(__file__).resolve().parents[2]


def copy_checkout(target: Path) -> Path:
    """What `witcert spec` reads, without the rest of the project."""
    keep = shutil.ignore_patterns("__pycache__")
    for folder in ("formal", "witcert_ref", "witcert/spec"):
        shutil.copytree(ROOT / folder, target / folder, ignore=keep)
    for name in ("lakefile.lean", "lean-toolchain", "lake-manifest.json"):
        shutil.copy(ROOT / name, target)
    (target / "witcert" / "__init__.py").touch()
    assert guard.check(target) == []
    return target
