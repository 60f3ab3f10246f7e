"""The properties, by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from .adapter import Adapter, Info


@dataclass(frozen=True)
class Property:
    """One contract.

    Attributes:
        name, group: the group is the module in :mod:`witcert_conformance.properties`.
        summary: what must hold, one line.
        theorems: Lean names that it instantiates.
        needs: capability groups without which it is not asked.
        cases: from what an implementation offers to what is drawn.
        check: raises :class:`~witcert_conformance.checks.Violation`.
        pinned: cases that are always tried first.
        examples: drawn cases in the profile ``ci``.
        cuda: needs a GPU.
        tool: a program without which it is not run.
    """

    name: str
    group: str
    summary: str
    theorems: tuple[str, ...]
    needs: frozenset[str]
    cases: Callable[[Info], SearchStrategy[Any]]
    check: Callable[[Adapter, Any], None]
    pinned: tuple[Any, ...] = ()
    examples: int = 25
    cuda: bool = False
    tool: str | None = None


_PROPERTIES: dict[str, Property] = {}


def prop(
    name: str,
    cases: Callable[[Info], SearchStrategy[Any]],
    *,
    theorems: Iterable[str] = (),
    needs: Iterable[str] = (),
    pinned: Iterable[Any] = (),
    examples: int = 25,
    cuda: bool = False,
    tool: str | None = None,
) -> Callable[[Callable[[Adapter, Any], None]], Callable[[Adapter, Any], None]]:
    """Register a check ``(adapter, case)`` as a property; its docstring is the summary."""

    def register(check: Callable[[Adapter, Any], None]) -> Callable[[Adapter, Any], None]:
        if name in _PROPERTIES:
            raise ValueError(f"name: got {name!r} twice")
        _PROPERTIES[name] = Property(
            name=name, group=check.__module__.rpartition(".")[2], summary=" ".join((check.__doc__ or "").split()),
            theorems=tuple(f"WitCert.{t}" for t in theorems), needs=frozenset(needs), cases=cases, check=check,
            pinned=tuple(pinned), examples=examples, cuda=cuda, tool=tool,
        )  # fmt: skip
        return check

    return register


def properties() -> dict[str, Property]:
    """All of them, in the order of their groups."""
    from . import properties as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(_PROPERTIES)
