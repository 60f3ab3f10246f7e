"""What can be told about the Lean development without Lean.

Every check takes the root of a checkout and returns the problems that it found, one sentence each.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AXIOMS = frozenset({"propext", "Classical.choice", "Quot.sound"})
BLIND_SPOT = (
    "Not seen by this check: sources and spec.json edited together so that they agree. Only Lean sees that: "
    "`witcert spec check --lean`, or the formal workflow."
)

_SPEC, _EXPORTER = "formal/spec.json", "formal/Export.lean"
_BUILD_FILES = ("lakefile.lean", "lean-toolchain", "lake-manifest.json")
_CITING = (
    *("witcert", "witcert_ref", "witcert_kernels", "conformance"),
    *("bench", "docs", "examples", "experiments", "tests"),
)
_FIELDS = {"axioms", "doc", "line", "module", "name", "paper", "sha256", "statement"}
_CITATION = re.compile(r"\bWitCert\.(?!lean\b)(\w+)")
_IMPORT = re.compile(r"^import (WitCert(?:\.\w+)*)", re.M)
_DEFINITION = re.compile(r"^(?:noncomputable )?(?:def|abbrev|structure|inductive|class) (\w+)", re.M)
_THEOREM = re.compile(r"^theorem (\w+)", re.M)


def is_checkout(root: Path) -> bool:
    """Whether the Lean sources are here."""
    return (root / "formal" / "WitCert.lean").is_file()


def module_path(module: str) -> str:
    """`WitCert.Basic` -> `formal/WitCert/Basic.lean`."""
    return f"formal/{module.replace('.', '/')}.lean"


def import_closure(root: Path, module: str) -> set[str]:
    """Paths of the module and of every module of ours that it imports: all the definitions that it can use."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        path = module_path(waiting.pop())
        if path not in found and (root / path).is_file():
            found.add(path)
            waiting += _IMPORT.findall(_read(root / path))
    return found


def check(root: Path) -> list[str]:
    """Sources, proofs, export and citations."""
    text = _read(root / _SPEC)
    try:
        spec = json.loads(text)
        whole = set(spec) >= {"lean", "sources", "theorems"} and all(set(t) >= _FIELDS for t in spec["theorems"])
    except (ValueError, TypeError):
        whole = False
    if not whole or json.dumps(spec, indent=1, ensure_ascii=False, sort_keys=True) + "\n" != text:
        return [f"{_SPEC}: not as formal/check.py writes it"]
    lean = {_relative(f, root): _read(f) for f in sorted((root / "formal").rglob("*.lean"))}
    reached = import_closure(root, "WitCert")
    return [
        *_sources(root, spec, [*lean, *_BUILD_FILES], reached),
        *_proofs(spec, lean),
        *_export(spec, lean, reached),
        *_citations(root, spec, {path: lean[path] for path in reached}),
    ]


def _sources(root: Path, spec: dict[str, Any], paths: list[str], reached: set[str]) -> Iterator[str]:
    """The sources are those of the export, and the export covers each of them."""
    sealed = spec["sources"]
    for path in sorted({*sealed, *paths}):
        if not (root / path).is_file():
            yield f"{path}: missing"
        elif path not in sealed or path not in reached | {_EXPORTER, *_BUILD_FILES}:
            yield f"{path}: no export covers this file"
        elif hashlib.sha256((root / path).read_bytes()).hexdigest() != sealed[path]:
            yield f"{path}: edited since the export"
    toolchain = root / "lean-toolchain"
    if toolchain.is_file() and _read(toolchain).strip() != f"leanprover/lean4:v{spec['lean']}":
        yield f"lean-toolchain: the export was made with Lean {spec['lean']}"


def _proofs(spec: dict[str, Any], lean: dict[str, str]) -> Iterator[str]:
    """No `sorry`, no axiom beyond Lean's three."""
    for path, text in lean.items():
        if re.search(r"\bsorry\b", text):
            yield f"{path}: contains sorry"
    for theorem in spec["theorems"]:
        for axiom in sorted(set(theorem["axioms"]) - AXIOMS):
            yield f"{theorem['name']}: depends on the axiom {axiom}"


def _export(spec: dict[str, Any], lean: dict[str, str], reached: set[str]) -> Iterator[str]:
    """Statements carry their seals; names, places, docstrings and paper numbers are those of the sources."""
    index = re.findall(r'\("([^"]+)", ``(\w+)\)', lean.get(_EXPORTER, ""))
    exported = [t["name"] for t in spec["theorems"]]
    if exported != sorted(set(exported)):
        yield f"{_SPEC}: theorems out of order, or exported twice"
    for theorem in spec["theorems"]:
        name, short = theorem["name"], theorem["name"].removeprefix("WitCert.")
        if hashlib.sha256(theorem["statement"].encode()).hexdigest() != theorem["sha256"]:
            yield f"{name}: the statement is not the one that was sealed"
        text = lean.get(module_path(theorem["module"]), "")
        from_line = "\n".join(text.split("\n")[theorem["line"] - 1 :])
        declared = _THEOREM.search(from_line)
        if declared is None or declared[1] != short or not from_line.startswith(("/-- ", "theorem ")):
            yield f"{name}: not declared at {theorem['module']}:{theorem['line']}"
        elif not from_line.startswith(f"/-- {theorem['doc']} -/" if theorem["doc"] else "theorem "):
            yield f"{name}: the docstring is not that of the source"
        if theorem["paper"] != [label for label, target in index if target == short]:
            yield f"{name}: the paper numbers are not those of {_EXPORTER}"
    for path in sorted(reached):
        for short in _THEOREM.findall(lean[path]):
            # the exporter takes names that begin with `eq_` for generated ones
            if f"WitCert.{short}" not in exported and not short.startswith("eq_"):
                yield f"WitCert.{short}: declared in {path}, but not exported"


def _citations(root: Path, spec: dict[str, Any], lean: dict[str, str]) -> Iterator[str]:
    """Every Lean name that the project's text cites is a theorem, proved or pending, a module or a definition."""
    known = {t["name"].removeprefix("WitCert.") for t in spec["theorems"]}
    known |= set(_CITATION.findall(_read(root / "witcert_ref" / "pending.json")))
    for path, text in lean.items():
        known |= {Path(path).stem, *_DEFINITION.findall(text)}
    texts = [f for folder in _CITING for f in sorted((root / folder).rglob("*")) if f.suffix in {".py", ".md"}]
    for file in [*sorted(root.glob("*.md")), *texts]:
        for short in sorted(set(_CITATION.findall(_read(file))) - known):
            yield f"{_relative(file, root)}: cites WitCert.{short}, which does not exist"


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _relative(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix()
