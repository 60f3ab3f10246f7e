"""Which planted bug is rejected by which property: the kill matrix, kept in ``kills.json``.

python -m witcert_conformance.kills              # recompute what changed, and write
python -m witcert_conformance.kills --all        # recompute everything: a quarter of an hour on one core
python -m witcert_conformance.kills --show       # print the table

A cell puts the cases of one property, those of the profile ``mutants`` and seed 0, to one planted bug. A bug that only
one property rejects shows that this property asks for something that the others do not.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import inspect
import json
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import numpy as np

from .adapter import Array, Decoded, Ints, Read
from .mutants import Mutant, mutants
from .mutants.registry import options
from .registry import Property, properties
from .report import spec_hash
from .runner import sample, survives
from .twin import Twin
from .twin.writer import TwinStore

PROFILE = "mutants"
SEED = 0
FILE = Path(__file__).with_name("kills.json")


def asked() -> dict[str, Property]:
    """Properties that a planted bug can be put to: all that need no GPU."""
    return {name: p for name, p in properties().items() if not p.cuda}


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def digest_of_mutant(mutant: Mutant) -> str:
    """Of its source and its ancestors' up to the twin."""
    own = [kind for kind in mutant.kind.__mro__ if kind.__module__.startswith(f"{__package__}.mutants.")]
    paths = [] if mutant.path is None else [inspect.getsource(options)]
    return _digest(*(inspect.getsource(kind) for kind in own), *paths)


def digest_of_property(prop: Property) -> str:
    """Of its registration and check, and its pinned cases."""
    return _digest(inspect.getsource(prop.check), *map(repr, prop.pinned))


@dataclass
class Matrix:
    """Rows by planted bug: the properties that reject it, in the order of the registry.

    ``mutants`` and ``properties`` map names to the digests of what was run.
    """

    mutants: dict[str, str] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    rejected_by: dict[str, list[str]] = field(default_factory=dict)

    def sole(self, prop: str) -> list[str]:
        """Planted bugs that only this property rejects."""
        return [name for name, by in self.rejected_by.items() if by == [prop]]

    def stale(self) -> set[tuple[str, str]]:
        """Cells ``(planted bug, property)`` that are missing or of another source."""
        bugs = {name: self.mutants.get(name) == digest_of_mutant(m) for name, m in mutants().items()}
        props = {name: self.properties.get(name) == digest_of_property(p) for name, p in asked().items()}
        return {(bug, prop) for bug, kept in bugs.items() for prop, same in props.items() if not (kept and same)}


def load(path: Path = FILE) -> Matrix:
    """The matrix that is kept."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Matrix(data["mutants"], data["properties"], data["rejected_by"])


def save(matrix: Matrix, path: Path = FILE) -> None:
    """Write it, one row a line."""
    versions = {
        "hypothesis": hypothesis.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    about = {"profile": PROFILE, "seed": SEED, "spec_sha256": spec_hash(), "versions": versions}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in about.items()]
    for name in ("properties", "mutants", "rejected_by"):
        rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in getattr(matrix, name).items())
        lines.append(f' "{name}": {{\n{rows}\n }}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


class _Seen(Twin):
    """The twin, keeping which paths and which methods a property takes."""

    def __init__(self) -> None:
        self.paths: set[frozenset[str]] = set()
        self.methods: set[str] = set()

    def quantize(self, store: TwinStore, k: Array, v: Array, slots: Ints, positions: Ints) -> None:
        self.paths.add(options(store))
        super().quantize(store, k, v, slots, positions)

    def decode_with_shares(self, store: TwinStore, read: Read) -> tuple[Decoded, Array]:
        self.paths.add(options(store, read))
        return super().decode_with_shares(store, read)

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """For ``sys.setprofile``."""
        if event == "call" and isinstance(frame.f_locals.get("self"), _Seen):
            self.methods.add(frame.f_code.co_name)


@dataclass(frozen=True)
class _Tried:
    """A case of a property, and what of the twin it reaches."""

    case: Any
    paths: frozenset[frozenset[str]]
    methods: frozenset[str]


@functools.cache
def _tried(prop: str, seed: int) -> tuple[_Tried, ...]:
    one, tried = properties()[prop], []
    for case in sample(one, Twin(), profile=PROFILE, root_seed=seed):
        seen = _Seen()
        sys.setprofile(seen.note)
        try:
            fine = survives(one, seen, [case], profile=PROFILE)
        finally:
            sys.setprofile(None)
        if not fine:
            raise ValueError(f"prop: got {prop!r}, which the twin itself does not pass, with {case!r}")
        tried.append(_Tried(case, frozenset(seen.paths), frozenset(seen.methods)))
    return tuple(tried)


def rejects(prop: Property, mutant: Mutant, seed: int = SEED) -> bool:
    """Whether the property fails on the planted bug, or cannot be finished on it.

    Cases that do not reach a changed method, or its path, are left out: nothing in them differs from the twin.
    """
    changed = {name for kind in mutant.kind.__mro__ if kind not in Twin.__mro__ for name in vars(kind)}
    cases = [
        t.case
        for t in _tried(prop.name, seed)
        if changed & t.methods and (mutant.path is None or mutant.path in t.paths)
    ]
    return not survives(prop, mutant.kind(), cases, profile=PROFILE)


def row(mutant: Mutant, seed: int = SEED, among: Iterable[Property] | None = None) -> list[str]:
    """Properties that reject a planted bug, all or ``among`` some."""
    return [p.name for p in (asked().values() if among is None else among) if rejects(p, mutant, seed)]


def update(matrix: Matrix, progress: Callable[[Matrix, str], None] = lambda matrix, name: None) -> Matrix:
    """The matrix of the current registry: stale cells are run, the others kept; ``progress`` after each row."""
    every, wanted, stale = mutants(), asked(), matrix.stale()
    digests = {name: digest_of_mutant(m) for name, m in every.items()}
    fresh = Matrix(properties={name: digest_of_property(p) for name, p in wanted.items()})
    for name in sorted(every, key=lambda name: any(cell[0] == name for cell in stale)):
        old = matrix.rejected_by.get(name, [])
        fresh.rejected_by[name] = [
            p.name for p in wanted.values() if (rejects(p, every[name]) if (name, p.name) in stale else p.name in old)
        ]
        fresh.mutants[name] = digests[name]
        progress(fresh, name)
    for rows in (fresh.mutants, fresh.rejected_by):
        ordered = {name: rows[name] for name in every}
        rows.clear()
        rows.update(ordered)  # type: ignore[arg-type]
    return fresh


def broken(matrix: Matrix, progress: Callable[[str, list[str]], None] = lambda name, by: None) -> list[str]:
    """Run it all again: bugs that their property lets pass, properties that had a bug of their own and have none."""
    now = Matrix()
    for name, mutant in mutants().items():
        now.rejected_by[name] = row(mutant)
        progress(name, now.rejected_by[name])
    passing = [name for name, by in now.rejected_by.items() if mutants()[name].killed_by not in by]
    return passing + [name for name in asked() if matrix.sole(name) and not now.sole(name)]


def table(matrix: Matrix) -> str:
    """Each planted bug, the property that must reject it, and whether it alone does."""
    lines = []
    for name, mutant in mutants().items():
        by = matrix.rejected_by.get(name, [])
        kind = "only by" if by == [mutant.killed_by] else "killed by"
        more = f" and {len(by) - 1} more" if len(by) > 1 else ""
        lines.append(f"{mutant.mistake:100.100} {kind:9} {mutant.killed_by}{more}")
    alone = sum(bool(matrix.sole(name)) for name in asked())
    lines.append(f"{len(lines)} planted bugs; {alone} of {len(asked())} properties reject one that no other does")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m witcert_conformance.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="run every cell again")
    parser.add_argument("--show", action="store_true", help="print the table and run nothing")
    options = parser.parse_args(arguments)
    matrix = load() if FILE.is_file() and not options.all else Matrix()
    if not options.show:

        def progress(matrix: Matrix, name: str) -> None:
            save(matrix)
            print(f"{name}: {', '.join(matrix.rejected_by[name])}", flush=True)

        matrix = update(matrix, progress)
        save(matrix)
    print(table(matrix))


if __name__ == "__main__":
    main()
