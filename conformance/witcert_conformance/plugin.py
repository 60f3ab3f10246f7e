"""pytest options and reporting: ``pytest --pyargs witcert_conformance --impl NAME``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .adapter import Adapter
    from .registry import Property
    from .report import Run
    from .runner import Outcome

STATE = pytest.StashKey["_Session"]()
IN_PROCESS = "torch-cpu"


class _Session:
    """The implementations of a run and what became of their properties."""

    def __init__(self, names: list[str], profile: str, seed: int) -> None:
        from .adapter import load

        self.profile, self.seed = profile, seed
        self.adapters: dict[str, Adapter] = {name: load(name) for name in names}
        self.outcomes: dict[str, list[Outcome]] = {name: [] for name in names}

    def runs(self) -> list[Run]:
        from .report import Run

        return [Run(n, a, self.profile, self.seed, tuple(self.outcomes[n])) for n, a in self.adapters.items()]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("witcert conformance")
    group.addoption(
        "--impl", action="append", default=[], metavar="NAME",
        help="ref, torch-cpu, numba-cpu, triton-interpret, triton-cuda, or package.module:Adapter; may be repeated",
    )  # fmt: skip
    group.addoption(
        "--profile", default="ci", choices=("quick", "ci", "release"), dest="conformance_profile",
        help="how many cases are drawn (default: ci)",
    )  # fmt: skip
    group.addoption("--conformance-seed", type=int, default=0, help="seed of all draws")
    group.addoption(
        "--conformance-report",
        type=Path,
        default=None,
        metavar="FILE.json",
        help="write the report there, and as HTML beside it",
    )


def session(config: pytest.Config) -> _Session:
    """The run's state, made when it is first asked for."""
    if STATE not in config.stash:
        names = config.getoption("--impl") or [IN_PROCESS]
        try:
            config.stash[STATE] = _Session(
                names, config.getoption("conformance_profile"), config.getoption("--conformance-seed")
            )
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[STATE]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--impl"):
        session(config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.getoption("--impl"):
        return []
    from .adapter import CAPABILITIES
    from .report import commit, spec_hash

    lines = [f"conformance: commit {commit()[:16]}, spec {spec_hash()[:16]}, profile {session(config).profile}"]
    for name, adapter in session(config).adapters.items():
        info = adapter.info
        versions = ", ".join(f"{k} {v}" for k, v in info.versions.items())
        missing = sorted(CAPABILITIES.keys() - info.offers)
        lines.append(f"  {name}: {info.name} {info.version} on {info.device} ({versions})")
        lines.append(f"    not offered: {', '.join(missing) or 'nothing'}")
    return lines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not {"conformance_impl", "conformance_property"} <= set(metafunc.fixturenames):
        return
    from .registry import properties
    from .runner import why_not

    state = session(metafunc.config)
    cases: list[tuple[str, Property]] = []
    for name, adapter in state.adapters.items():
        for prop in properties().values():
            if why_not(prop, adapter.info) is None:
                cases.append((name, prop))
    metafunc.parametrize(("conformance_impl", "conformance_property"), cases, ids=[f"{n}-{p.name}" for n, p in cases])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if STATE not in config.stash:
        return
    from .registry import properties
    from .report import write_report
    from .runner import Outcome, why_not

    state = session(config)
    if not any(state.outcomes.values()):
        return
    terminalreporter.section("conformance")
    for name, outcomes in state.outcomes.items():
        done = {o.name for o in outcomes}
        for prop in properties().values():
            reason = why_not(prop, state.adapters[name].info)
            if reason is not None and prop.name not in done:
                outcomes.append(Outcome(prop.name, reason[0], message=reason[1]))
        counts = {
            v: sum(o.verdict == v for o in outcomes) for v in ("passed", "failed", "error", "not offered", "not run")
        }
        terminalreporter.write_line(f"{name}: " + ", ".join(f"{n} {v}" for v, n in counts.items() if n))
        for outcome in outcomes:
            if outcome.verdict in ("not offered", "not run"):
                terminalreporter.write_line(f"  {outcome.verdict}: {outcome.name} ({outcome.message})")
    path = config.getoption("--conformance-report")
    if path is not None:
        write_report(path, state.runs())
        terminalreporter.write_line(f"report: {path} and {path.with_suffix('.html')}")
