"""The command line. Each command is a thin shell around a function of the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import __version__
from .spec import app as spec_app

app = typer.Typer(
    help="A proved bound on what KV-cache compression does to the request that is served now.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(spec_app, name="spec")

ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Local model directory or .gguf file; SmolLM2-135M-Instruct if left out."),
]
SchemeOption = Annotated[str, typer.Option("--scheme", help="A name that `witcert schemes` lists.")]
CalibrationOption = Annotated[
    Path | None, typer.Option("--calibration", help="Calibration file of `witcert calibrate`; the default model has one.")
]
TauOption = Annotated[float | None, typer.Option("--tau", help="Repair what the meter puts above this; none if left out.")]


def console() -> Console:
    """A console; a pipe has no width of its own, so it gets one that folds no table."""
    return Console(width=None if sys.stdout.isatty() else 200)


def bar(out: Console) -> Progress:
    """The progress bar of every command."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[meter]}"),
        console=out,
    )


def table(header: tuple[str, ...], rows: list[list[str]]) -> Table:
    """A table whose numbers are right-aligned."""
    grid = Table(header_style="bold")
    for i, name in enumerate(header):
        grid.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def _load(model: str | None, out: Console) -> tuple[Any, Any]:
    from . import model as models

    with out.status("loading the model"):
        loaded: tuple[Any, Any] = models.load(model)
    return loaded


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"witcert {__version__}")
        raise typer.Exit


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Two prompts instead of six.")] = False,
    model: ModelOption = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all cells and the summary.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write a self-contained HTML page with plots.")] = None,
) -> None:
    """Answer needle questions over every compressed cache, raw and gated, with the live meter.

    Example: witcert demo --quick --report demo.html
    """
    from . import page
    from .demo import run_demo

    for target in (json, report):
        if target is not None and not target.absolute().parent.is_dir():
            raise ValueError(f"{target}: its folder does not exist")
    out = console()
    loaded, tokenizer = _load(model, out)
    with bar(out) as progress:
        task = progress.add_task("starting", meter="")

        def tell(name: str, done: int, total: int, worst: float | None) -> None:
            meter = "" if worst is None else f"largest meter {worst:.3f}"
            progress.update(task, description=name, completed=done, total=total, meter=meter)

        result = run_demo(loaded, tokenizer, quick, tell)
        progress.update(task, description="done", completed=1, total=1, meter="")
    out.print(table(result.header, result.rows()))
    out.print(
        "A cell is a (layer, query head, decode step) that read compressed tokens. "
        "Pages are (layer, kv head, page) triples. `meter < TV` counts refuted bounds, tolerance 0."
    )
    if result.fidelity is not None:
        out.print(str(result.fidelity))
    if json is not None:
        result.write_json(json)
    if report is not None:
        report.write_text(page.render(result), encoding="utf-8")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    model: ModelOption = None,
    scheme: SchemeOption = "int8",
    tau: TauOption = None,
    calibration: CalibrationOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
) -> None:
    """Stream an answer generated over a compressed cache; the last line says what the meter saw.

    Example: witcert generate "Why is the sky blue?" --scheme kivi2 --tau 0.2
    """
    from .generation import generate as run

    out = console()
    loaded, tokenizer = _load(model, out)
    line = run(
        loaded,
        tokenizer,
        prompt,
        scheme=scheme,
        tau=tau,
        calibration=_calibration(calibration, model),
        max_new_tokens=max_new_tokens,
        write=lambda text: (sys.stdout.write(text), sys.stdout.flush()),
    )
    out.print(f"\n[dim]{line}[/dim]")


def _calibration(path: Path | None, model: str | None) -> Any:
    """The named calibration, the shipped one for the default model, or none."""
    if path is not None:
        return path
    return "default" if model is None else None


@app.command()
def schemes() -> None:
    """List the compression schemes.

    Example: witcert schemes
    """
    from . import schemes as registry

    rows = []
    for name in registry.names():
        scheme = registry.get(name)
        if isinstance(scheme, registry.PackedScheme):
            rows.append([name, f"{scheme.bits:g}", "1", "packed store", "radius" if scheme.dither else "half_step"])
        else:
            rows.append([name, f"{scheme.bits:g}", f"{scheme.token_group}", "observatory", "witness"])
    console().print(table(("scheme", "bits", "tokens a group", "store", "source of c"), rows))


def main() -> None:
    """Entry point: a mistake of the user ends with one line, not with a traceback."""
    from .model import ModelUnavailable

    try:
        app()
    except (ValueError, TypeError, OSError, ModelUnavailable) as error:
        typer.echo(f"witcert: {error}", err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
