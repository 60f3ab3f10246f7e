"""The report of a run: JSON for machines, HTML for readers."""

from __future__ import annotations

import hashlib
import html
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np

from .adapter import CAPABILITIES, Adapter
from .registry import properties
from .runner import Outcome


@dataclass(frozen=True)
class Run:
    """All outcomes of one implementation."""

    impl: str
    adapter: Adapter
    profile: str
    seed: int
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """Every property that was asked passed."""
        return all(o.verdict not in ("failed", "error") for o in self.outcomes) and any(
            o.verdict == "passed" for o in self.outcomes
        )


def spec_hash() -> str:
    """SHA-256 of the theorem export that the reference ships, or that a checkout has."""
    found = util.find_spec("witcert_ref")
    places = []
    if found is not None and found.origin is not None:
        places = [Path(found.origin).parent / "spec.json", Path(found.origin).parents[1] / "formal" / "spec.json"]
    for place in places:
        if place.is_file():
            return hashlib.sha256(place.read_bytes()).hexdigest()
    return "not installed"


def commit() -> str:
    """Commit of the checkout that the suite lies in, or the version that is installed."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
        if done.returncode == 0:
            return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        return f"version {metadata.version('witcert')}"
    except metadata.PackageNotFoundError:
        return "unknown"


def as_dict(runs: Sequence[Run]) -> dict[str, Any]:
    """The report as plain data."""
    known = properties()
    return {
        "commit": commit(),
        "spec_sha256": spec_hash(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {"hypothesis": hypothesis.__version__, "numpy": np.__version__},
        "implementations": [
            {
                "impl": run.impl,
                "name": run.adapter.info.name,
                "version": run.adapter.info.version,
                "device": run.adapter.info.device,
                "versions": run.adapter.info.versions,
                "offered": sorted(run.adapter.info.offers),
                "not_offered": sorted(CAPABILITIES.keys() - run.adapter.info.offers),
                "profile": run.profile,
                "seed": run.seed,
                "passed": run.passed,
                "properties": [
                    {
                        **asdict(o),
                        "group": known[o.name].group,
                        "summary": known[o.name].summary,
                        "theorems": known[o.name].theorems,
                    }
                    for o in run.outcomes
                ],
            }
            for run in runs
        ],
    }


def write_report(path: Path, runs: Sequence[Run]) -> None:
    """Write ``path`` (JSON), and beside it the same as HTML."""
    data = as_dict(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".html").write_text(as_html(data), encoding="utf-8")


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c1c1c; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #999; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.passed { color: #14691f; } .failed, .error { color: #b00020; font-weight: 600; } .not { color: #767676; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; }
small { color: #666; }
"""


def as_html(data: dict[str, Any]) -> str:
    """One page, no script, nothing fetched."""
    runs = "".join(_run_html(run) for run in data["implementations"])
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Conformance</title><style>{_STYLE}</style>"
        f"</head><body><h1>Conformance</h1><p>Commit <code>{_text(data['commit'])}</code>, spec "
        f"<code>{_text(data['spec_sha256'][:16])}</code>, Python {_text(data['python'])} on "
        f"{_text(data['machine'])}.</p>"
        f"{runs}</body></html>\n"
    )


def _text(x: object) -> str:
    return html.escape(str(x))


def _run_html(run: dict[str, Any]) -> str:
    asked = [p for p in run["properties"] if not p["verdict"].startswith("not")]
    good = sum(p["verdict"] == "passed" for p in asked)
    about = [f"{run['name']} {run['version']} on {run['device']}"]
    about += [f"{name} {version}" for name, version in run["versions"].items()]
    about += [f"profile {run['profile']}", f"seed {run['seed']}"]
    head = "".join(f"<th>{name}</th>" for name in ("Property", "What must hold", "Verdict", "Examples", "Seconds"))
    return (
        f"<h2>{_text(run['impl'])}</h2><p class='{'passed' if run['passed'] else 'failed'}'>{good} of {len(asked)} "
        f"properties passed</p><p>{_text('; '.join(about))}. Not offered: "
        f"{_text(', '.join(run['not_offered']) or 'nothing')}.</p><table><thead><tr>{head}</tr></thead><tbody>"
        f"{''.join(_row_html(p) for p in run['properties'])}</tbody></table>"
    )


def _row_html(p: dict[str, Any]) -> str:
    kind = "not" if p["verdict"].startswith("not") else p["verdict"]
    theorems = f"<br><small>{_text(', '.join(p['theorems']))}</small>" if p["theorems"] else ""
    row = (
        f"<tr><td><code>{_text(p['name'])}</code><br><small>{_text(p['group'])}</small></td>"
        f"<td>{_text(p['summary'])}{theorems}</td><td class='{kind}'>{_text(p['verdict'])}</td>"
        f"<td class='number'>{p['examples']}</td><td class='number'>{p['seconds']:.2f}</td></tr>"
    )
    if p["verdict"] in ("failed", "error"):
        row += f"<tr><td colspan='5'><pre>{_text(p['message'])}\n\n{_text(p['reproduction'])}</pre></td></tr>"
    return row
