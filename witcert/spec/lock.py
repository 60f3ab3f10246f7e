"""`witcert_ref/spec.lock`: the statements that the reference was written from, pinned by a person.

For each claimed theorem the lock holds the statement and the Lean modules behind it (its own and those that it imports,
hence every definition that it can use), and for each of these modules the SHA-256. A later export or another claim
shows up as a difference until it is pinned again.
"""

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from witcert.spec.guard import import_closure
from witcert_ref.spec import PACKAGE, Spec

PATH = PACKAGE / "spec.lock"


def build(spec: Spec, claimed: Iterable[str], root: Path) -> dict[str, Any]:
    """The lock that the export and the claims of today call for. `root` is a checkout."""
    theorems: dict[str, Any] = {}
    modules: set[str] = set()
    for name in sorted(claimed):
        theorem = spec.theorems.get(name) or spec.pending[name]
        behind = sorted(import_closure(root, theorem.module)) if not theorem.pending else []
        modules.update(behind)
        theorems[name] = {
            "status": "pending" if theorem.pending else "proved",
            "statement": theorem.statement.split("\n"),
            "modules": behind,
        }
    return {"modules": {path: spec.sources.get(path, "") for path in sorted(modules)}, "theorems": theorems}


def dump(lock: dict[str, Any]) -> str:
    """The text of a lock file."""
    return json.dumps(lock, indent=1, ensure_ascii=False) + "\n"


def difference(old: str, new: str) -> list[str]:
    """Unified diff of two lock files, without context beyond the lines that name what changed."""
    return list(difflib.unified_diff(old.splitlines(), new.splitlines(), "pinned", "now", lineterm="", n=3))


def check(pinned: str, wanted: dict[str, Any]) -> list[str]:
    """The problems of a lock file, one sentence each."""
    if pinned == dump(wanted):
        return []
    old = json.loads(pinned) if pinned else {"modules": {}, "theorems": {}}
    problems = []
    for name in sorted(old["theorems"].keys() | wanted["theorems"].keys()):
        was, now = old["theorems"].get(name), wanted["theorems"].get(name)
        if was is None or now is None:
            problems.append(f"{name}: {'claimed, but not pinned' if was is None else 'pinned, but no longer claimed'}")
            continue
        problems += [f"{name}: the {key} differs from its pin" for key in now if was.get(key) != now[key]]
    for path, seal in wanted["modules"].items():
        if old["modules"].get(path, seal) != seal:
            problems.append(f"{path}: changed since it was pinned")
    return problems or ["spec.lock: not as `witcert spec pin` writes it"]
