"""What an experiment reports, as JSON and as tables of text."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

Cell = str | float | int | None
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One number of the paper beside ours (None: there is none), with a 95 % interval where ours is a sample's."""

    quantity: str
    paper: float | int | None
    ours: float | int | None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Table:
    """What goes beyond the paper's own table."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[Cell, ...]]


@dataclass(frozen=True)
class Violations:
    """How often a claim failed, counted with tolerance 0, in how many checks."""

    claim: str
    count: int
    checks: int


@dataclass(frozen=True)
class Result:
    """An experiment's numbers; `differs` says why ours are not the paper's, `unit` what one sample is, `points` what
    the plot draws and no table shows."""

    name: str
    title: str
    source: str
    settings: dict[str, Any]
    unit: str
    samples: int
    seed: int | None
    rows: list[Row]
    violations: list[Violations]
    differs: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    quick: bool = False
    points: dict[str, list[list[float]]] = field(default_factory=dict)

    def to_json(self) -> str:
        """The result and the versions that computed it; a list of numbers is one line."""
        text = json.dumps({**asdict(self), "versions": versions()}, indent=1, ensure_ascii=False)
        return re.sub(r"\[\s+([-+.\deE,\s]+?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"


def versions() -> dict[str, str]:
    """Versions of what computes."""
    packages = ("numpy", "scipy", "torch", "transformers", "witcert")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def load(path: Path) -> tuple[Result, dict[str, str]]:
    """A result as `Result.to_json` wrote it, and its versions."""
    document = json.loads(path.read_text(encoding="utf-8"))
    used = document.pop("versions")
    document["rows"] = [
        Row(**{**row, "interval": None if row["interval"] is None else tuple(row["interval"])})
        for row in document["rows"]
    ]
    document["violations"] = [Violations(**entry) for entry in document["violations"]]
    document["tables"] = [
        Table(entry["title"], tuple(entry["header"]), [tuple(row) for row in entry["rows"]])
        for entry in document["tables"]
    ]
    return Result(**document), used


def number(value: Cell, digits: int = 4) -> str:
    """Significant digits of a float; an integer in full; — where there is none."""
    if value is None:
        return "—"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) else value


def comparison(rows: Sequence[Row]) -> Table:
    """The paper beside ours."""
    return Table(
        "The paper beside ours",
        ("quantity", "paper", "ours", "95 % interval"),
        [
            (
                row.quantity,
                number(row.paper, 5),
                number(row.ours, 5 if row.interval is None else 4),
                "—" if row.interval is None else " – ".join(number(end) for end in row.interval),
            )
            for row in rows
        ],
    )
