"""The planted bugs, by name."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..adapter import Read
from ..twin import Twin
from ..twin.reader import Query
from ..twin.writer import TwinStore


@dataclass(frozen=True)
class Mutant:
    """A planted bug: its class, the twin that it was made from, the property that must reject it.

    ``path``: the options of the one path that has the mistake, None for all paths.
    """

    name: str
    mistake: str
    kind: type[Twin]
    twin: type[Twin]
    killed_by: str
    path: frozenset[str] | None

    @property
    def target(self) -> str:
        """What ``--impl`` takes."""
        return f"{self.kind.__module__}:{self.kind.__name__}"


_MUTANTS: dict[str, Mutant] = {}


def mutant(
    killed_by: str, twin: type[Twin] = Twin, *, path: Iterable[str] | None = None
) -> Callable[[type[Twin]], type[Twin]]:
    """Register a class as a planted bug; its docstring names the mistake.

    A kernel is compiled, or written, once for each combination of options. With ``path`` the mistake is in the code of
    exactly one combination, see :func:`options`; its methods take the store or the query first.
    """
    only = None if path is None else frozenset(path)

    def register(kind: type[Twin]) -> type[Twin]:
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in kind.__name__).lstrip("_")
        if name in _MUTANTS:
            raise ValueError(f"name: got {name!r} twice")
        if only is not None:
            for method in [n for n in vars(kind) if not n.startswith("__")]:
                setattr(kind, method, _guarded(kind, method, only))
        _MUTANTS[name] = Mutant(name, " ".join((kind.__doc__ or "").split()), kind, twin, killed_by, only)
        return kind

    return register


def _guarded(kind: type[Twin], name: str, only: frozenset[str]) -> Callable[..., Any]:
    """The method on one path, the parent's on all others."""
    changed = vars(kind)[name]

    @functools.wraps(changed)
    def method(self: Twin, subject: Query | TwinStore, *rest: Any) -> Any:
        if options(subject) == only:
            return changed(self, subject, *rest)
        return getattr(super(kind, self), name)(subject, *rest)

    return method


def options(subject: Query | TwinStore, read: Read | None = None) -> frozenset[str]:
    """The optional parts of a store, and of a read of it, that are in use; ``heads``: several kv heads."""
    store = subject.store if isinstance(subject, Query) else subject
    read = subject.read if isinstance(subject, Query) else read
    layout, calibration = store.layout, store.calibration
    used = {
        "heads": layout.kv_heads > 1,
        "groups": layout.group is not None,
        "sketch": layout.sketch > 0,
        "witness": layout.witness_bands > 0,
        "bypass": layout.bypass > 0,
        "dither": layout.dither,
        "equaliser": bool(np.any(calibration.mu != 0) or np.any(calibration.f != 1)),
        "observatory": store.observatory,
    }
    if read is not None:
        used |= {
            "rows": read.qo_indptr is not None,
            "chunk": read.k_new is not None,
            "repair": read.exact_pages is not None and bool((read.exact_pages >= 0).any()),
            "sinks": read.sinks is not None,
            "soft_cap": read.soft_cap != 0,
            "window": read.window_left >= 0,
            "bias": read.bias is not None,
            "budget": read.budget is not None,
            "splits": read.splits is not None,
        }
    return frozenset(name for name, on in used.items() if on)


def mutants() -> dict[str, Mutant]:
    """All of them, in the order of their modules."""
    from .. import mutants as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(_MUTANTS)
