"""The statements that Lean has proved, and the reference functions that follow from them.

`formal/spec.json` is exported by Lean; it ships inside the package as `spec.json`. `pending.json` holds statements that
the next export will carry: they may be cited with `pending=True` and are never counted as proved.
"""

import functools
import importlib
import json
import pathlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

PACKAGE = pathlib.Path(__file__).resolve().parent


@dataclass(frozen=True)
class Theorem:
    """One statement. A pending one has no module, line, axioms or seal yet."""

    name: str
    statement: str
    doc: str
    paper: tuple[str, ...] = ()
    module: str = ""
    line: int = 0
    axioms: tuple[str, ...] = ()
    sha256: str = ""
    pending: bool = False

    @property
    def core(self) -> bool:
        """Whether the statement has a number in the paper, or is one of ours that the paper index lists."""
        return bool(self.paper)


@dataclass(frozen=True)
class Spec:
    """`theorems`: proved, by Lean name. `pending`: not yet. `sources`: SHA-256 of every file behind the export."""

    lean: str
    theorems: dict[str, Theorem]
    pending: dict[str, Theorem]
    sources: dict[str, str]


def spec_path() -> pathlib.Path:
    """The packaged `spec.json`, or `formal/spec.json` in a checkout. Raises FileNotFoundError if there is neither."""
    packaged, checkout = PACKAGE / "spec.json", PACKAGE.parent / "formal" / "spec.json"
    for path in (packaged, checkout):
        if path.is_file():
            return path
    raise FileNotFoundError(f"no spec.json at {packaged} or {checkout}")


def read(spec: pathlib.Path, pending: pathlib.Path) -> Spec:
    """Read an export and the statements still to come; a pending one that the export has is dropped from `pending`."""
    raw = json.loads(spec.read_text(encoding="utf-8"))
    theorems = {
        t["name"]: Theorem(
            name=t["name"],
            statement=t["statement"],
            doc=t["doc"],
            paper=tuple(t["paper"]),
            module=t["module"],
            line=t["line"],
            axioms=tuple(t["axioms"]),
            sha256=t["sha256"],
        )
        for t in raw["theorems"]
    }
    coming = {
        name: Theorem(name=name, statement=entry["statement"], doc=entry["doc"], pending=True)
        for name, entry in json.loads(pending.read_text(encoding="utf-8")).items()
        if name not in theorems
    }
    return Spec(lean=raw["lean"], theorems=theorems, pending=coming, sources=raw["sources"])


@functools.cache
def load() -> Spec:
    """The specification that this package follows. Raises FileNotFoundError as `spec_path` does."""
    return read(spec_path(), PACKAGE / "pending.json")


def theorem(name: str) -> Theorem:
    """The statement with this Lean name, proved or pending. Raises ValueError if there is none."""
    spec = load()
    found = spec.theorems.get(name) or spec.pending.get(name)
    if found is None:
        raise ValueError(f"theorem: got {name!r}, which is neither in spec.json nor pending")
    return found


_CLAIMS: dict[str, dict[str, Callable[..., Any]]] = {}


def implements(name: str, pending: bool = False) -> Callable[[F], F]:
    """Register a function as following from a theorem; stackable, returns the function itself.

    Raises ValueError at decoration if the theorem does not exist, if it is proved and cited as pending, or the reverse.
    """
    if theorem(name).pending != pending:
        state, want = ("pending", "pending=True") if not pending else ("proved", "pending=False")
        raise ValueError(f"implements: {name} is {state}, want {want}")

    def register(function: F) -> F:
        _CLAIMS.setdefault(name, {})[f"{function.__module__}.{function.__qualname__}"] = function
        return function

    return register


def claims() -> dict[str, dict[str, Callable[..., Any]]]:
    """Theorem name -> qualified function name -> function, over every module of `witcert_ref`."""
    package = importlib.import_module("witcert_ref")
    for module in pkgutil.iter_modules(package.__path__, "witcert_ref."):
        importlib.import_module(module.name)
    return {name: dict(_CLAIMS[name]) for name in sorted(_CLAIMS)}
