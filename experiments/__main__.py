"""`python -m experiments NAME`."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType
from typing import Annotated

import matplotlib as mpl
import typer
from rich.console import Console
from rich.table import Table as Grid

from experiments import (
    adaptive,
    bounds,
    context,
    counterexample,
    documentation,
    figure1,
    gate_traffic,
    long_text,
    loop,
    memory,
    pollution,
    quality,
    rescue,
    sources,
    table1,
    table4,
    table5,
    table6,
    table7,
    table8,
    table14,
)
from experiments import model as subject
from experiments.result import RESULTS, Result, Table, comparison, number

SYNTHETIC = (counterexample, memory, table5, table7, loop, table14)
ACTIVATIONS = (figure1, sources, table1, table4, table6, table8, bounds)
DECODING = (rescue, gate_traffic, quality, long_text, context, pollution, adaptive)
EXPERIMENTS: dict[str, ModuleType] = {module.NAME: module for module in (*SYNTHETIC, *ACTIVATIONS, *DECODING)}

QUICK = Path("build") / "experiments"

app = typer.Typer(pretty_exceptions_enable=False)


def show(result: Result, console: Console) -> None:
    """Print a result: the paper beside ours, the tables beyond, violations, and why ours differ."""
    console.print(f"\n[bold]{result.title}[/bold] ({result.source}): {result.samples} × {result.unit}")
    for table in (comparison(result.rows), *result.tables):
        console.print(grid(table))
    for entry in result.violations:
        console.print(f"{entry.claim}: {entry.count} violations in {entry.checks:,} checks")
    for reason in result.differs:
        console.print(f"• {reason}")


def grid(table: Table) -> Grid:
    """A table for a terminal."""
    out = Grid(*table.header, title=table.title, title_justify="left")
    for row in table.rows:
        out.add_row(*(number(cell) for cell in row))
    return out


def write(result: Result, folder: Path) -> None:
    """Write NAME.json and NAME.svg to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result.name}.json").write_text(result.to_json(), encoding="utf-8")
    with mpl.rc_context({"svg.hashsalt": result.name}):
        EXPERIMENTS[result.name].plot(result).savefig(folder / f"{result.name}.svg", metadata={"Date": None})


@app.command()
def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}; all; or docs.")],
    quick: Annotated[bool, typer.Option("--quick", help="Small samples, to build/experiments.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where JSON and plots go.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A local model directory or .gguf file instead of SmolLM2; to build/experiments."),
    ] = None,
) -> None:
    """Re-run one of the paper's tables, or all; `docs` writes docs/experiments.md from the results."""
    if name == "docs":
        documentation.PAGE.write_text(documentation.render(list(EXPERIMENTS)), encoding="utf-8")
        return
    if name != "all" and name not in EXPERIMENTS:
        raise typer.BadParameter(f"got {name!r}, want one of {', '.join(EXPERIMENTS)}, all, docs")
    subject.choose(model)
    console = Console(width=160)
    for module in EXPERIMENTS.values() if name == "all" else (EXPERIMENTS[name],):
        began = time.perf_counter()
        result = module.run(quick)
        show(result, console)
        write(result, out or (QUICK if quick or model else RESULTS))
        console.print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    app()
