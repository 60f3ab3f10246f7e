"""Runs properties on an implementation and keeps what happened."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis.strategies import SearchStrategy

from .adapter import Adapter, Info
from .case import adapted
from .registry import Property, properties

Verdict = Literal["passed", "failed", "error", "not offered", "not run"]

SCALES = {"quick": 0.25, "mutants": 0.4, "ci": 1.0, "release": 5.0}
"""Profile to how many times a property's ``examples`` are drawn."""

SLOW = 0.1
"""What remains of the examples for an implementation that calls itself slow."""


TRIES = 200
"""Smaller cases that are tried for a reproduction."""


@dataclass(frozen=True)
class Outcome:
    """What became of one property. ``failed``: an assertion of it; ``error``: anything else was raised."""

    name: str
    verdict: Verdict
    examples: int = 0
    seconds: float = 0.0
    message: str = ""
    reproduction: str = ""


@dataclass
class _Trial:
    """The check, counting, and remembering the last case that failed: Hypothesis ends on the minimal one."""

    check: Callable[[Adapter, Any], None]
    adapter: Adapter
    runs: int = 0
    case: Any = None

    def __call__(self, case: Any) -> None:
        self.runs += 1
        try:
            with np.errstate(all="ignore"):
                self.check(self.adapter, case)
        except Exception:
            self.case = case
            raise


_current: list[str] = ["ci"]


def profile() -> str:
    """The profile that is running."""
    return _current[-1]


@contextmanager
def _profile(name: str) -> Iterator[None]:
    _current.append(name)
    try:
        yield
    finally:
        _current.pop()


def why_not(prop: Property, info: Info) -> tuple[Verdict, str] | None:
    """Why a property is not asked of an implementation, or None."""
    missing = prop.needs - info.offers
    if missing:
        return ("not run" if prop.cuda else "not offered"), f"needs {', '.join(sorted(missing))}"
    if prop.tool is not None and shutil.which(prop.tool) is None:
        return "not run", f"{prop.tool} is not installed"
    return None


def run_property(
    prop: Property,
    adapter: Adapter,
    name: str,
    *,
    profile: str = "ci",
    root_seed: int = 0,
    shrink: bool = True,
    budget: float | None = None,
) -> Outcome:
    """Try the pinned cases, then drawn ones.

    Args:
        prop: what to check.
        adapter, name: the implementation and what ``--impl`` calls it.
        profile: a key of :data:`SCALES`.
        root_seed: seed of all draws.
        shrink: look for a minimal case when one fails.
        budget: factor on the number of drawn cases, default by profile and by ``info.slow``.
    """
    reason = why_not(prop, adapter.info)
    if reason is not None:
        return Outcome(prop.name, reason[0], message=reason[1])
    factor = SCALES[profile] * (SLOW if adapter.info.slow else 1.0) if budget is None else budget
    trial = _Trial(prop.check, adapter)
    strategy: SearchStrategy[Any] = prop.cases(adapter.info)
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]

    def body(case: Any) -> None:
        trial(case)

    test = given(strategy)(body)
    for case in reversed(prop.pinned):
        test = example(adapted(adapter.info, case))(test)
    test = settings(
        max_examples=max(1, round(prop.examples * factor)),
        deadline=None,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )(seed(root_seed)(test))
    start = time.perf_counter()
    with _profile(profile):
        try:
            test()
        except Exception as error:
            if shrink:
                trial.case, error = smallest(prop, adapter, trial.case, error)
            found: Verdict = "failed" if isinstance(error, AssertionError) else "error"
            text = str(error) if found == "failed" else "".join(traceback.format_exception(error))[-3000:]
            return Outcome(
                prop.name,
                found,
                trial.runs,
                time.perf_counter() - start,
                text,
                reproduction(prop.name, name, trial.case),
            )
    return Outcome(prop.name, "passed", trial.runs, time.perf_counter() - start)


def smallest(prop: Property, adapter: Adapter, case: Any, error: Exception) -> tuple[Any, Exception]:
    """A case that fails the same way with as little as possible in it, and its failure.

    Hypothesis shrinks what it draws, never a pinned case.
    """
    tries = TRIES
    smaller = _smaller(adapter.info, case)
    while tries and (one := next(smaller, None)) is not None:
        tries -= 1
        try:
            with np.errstate(all="ignore"):
                prop.check(adapter, one)
        except Exception as again:
            if type(again) is type(error):
                case, error, smaller = one, again, _smaller(adapter.info, one)
    return case, error


def _smaller(info: Info, case: Any) -> Iterator[Any]:
    """The case with one thing less, in dimensions that the implementation has."""
    for one in (adapted(info, less) for less in _less(case)):
        if len(repr(one)) < len(repr(case)):
            yield one


def _less(case: Any) -> Iterator[Any]:
    """A field at its default, or one sequence less."""
    if not is_dataclass(case) or isinstance(case, type):
        return
    for f in fields(case):
        value = getattr(case, f.name)
        if is_dataclass(value):
            yield from (replace(case, **{f.name: less}) for less in _less(value))
        if f.default is not MISSING and value != f.default:
            yield replace(case, **{f.name: f.default})
    lists = {f.name: x for f in fields(case) if isinstance(x := getattr(case, f.name), tuple)}
    for n in {len(x) for x in lists.values() if len(x) > 1}:
        for i in range(n):
            shorter = {name: x[:i] + x[i + 1 :] for name, x in lists.items() if len(x) == n}
            yield replace(case, **shorter)


def sample(prop: Property, adapter: Adapter, *, profile: str = "ci", root_seed: int = 0) -> list[Any]:
    """The cases that :func:`run_property` would try, none failing: the pinned ones, then drawn ones."""
    tried: list[Any] = []
    recording = replace(prop, check=lambda adapter, case: tried.append(case))
    run_property(recording, adapter, prop.name, profile=profile, root_seed=root_seed)
    return tried


def survives(prop: Property, adapter: Adapter, tried: Iterable[Any], *, profile: str = "ci") -> bool:
    """Whether no case makes the property fail or raise; stops at the first that does."""
    with _profile(profile), np.errstate(all="ignore"):
        for case in tried:
            try:
                prop.check(adapter, case)
            except Exception:
                return False
    return True


def reproduction(prop: str, name: str, case: Any) -> str:
    """A program that fails the same way."""
    text, kind = repr(case), type(case)
    lines = ["from witcert_conformance import Case, Layout, check"]
    if kind.__name__ != "Case":
        lines.append(f"from {kind.__module__} import {kind.__name__}")
    return "\n".join([*lines, "", f"check({prop!r}, {name!r}, {text})", ""])


def check(prop: str, name: str, case: Any) -> None:
    """Put one case of a property to an implementation; raises what it raises.

    Args:
        prop: a property's name.
        name: as for ``--impl``.
        case: as printed with a failure.
    """
    from .adapter import load

    properties()[prop].check(load(name), case)


def run_suite(
    adapter: Adapter,
    name: str,
    *,
    profile: str = "ci",
    root_seed: int = 0,
    only: Collection[str] = (),
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run all properties, or ``only`` some, on one implementation."""
    outcomes = []
    for prop in properties().values():
        if only and prop.name not in only:
            continue
        outcome = run_property(prop, adapter, name, profile=profile, root_seed=root_seed)
        progress(outcome)
        outcomes.append(outcome)
    return outcomes
