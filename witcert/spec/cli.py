"""`witcert spec`: list, show, check and pin the statements behind the software."""

import difflib
import shutil
import subprocess
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from witcert.spec import guard, links, lock, render
from witcert_ref.spec import PACKAGE, claims, load

ROOT = PACKAGE.parent
DOCS = ROOT / "docs" / "statements.md"

app = typer.Typer(help="The machine-checked statements behind the software, and what follows from each.")


def _console() -> Console:
    # a pipe has no width of its own; wide enough that names are not folded
    return Console(width=None if sys.stdout.isatty() else 240)


def _need_checkout(command: str) -> None:
    if not guard.is_checkout(ROOT):
        typer.echo(f"witcert spec {command} is for a checkout; the Lean sources (formal/) are not installed.", err=True)
        raise typer.Exit(2)


@app.callback(invoke_without_command=True)
def listing(context: typer.Context) -> None:
    """List every statement with its links.

    Example: witcert spec
    """
    if context.invoked_subcommand is None:
        _console().print(render.table(links.rows()))


@app.command()
def show(name: Annotated[str, typer.Argument(help="Lean name; the prefix WitCert. may be left out.")]) -> None:
    """Print a statement as Lean printed it, its docstring and its links.

    Example: witcert spec show tv_tilt_le_meter
    """
    rows = {row.theorem.name: row for row in links.rows()}
    full = name if name.startswith("WitCert.") else f"WitCert.{name}"
    if full not in rows:
        near = ", ".join(difflib.get_close_matches(full, rows, n=3))
        typer.echo(f"No statement {full}." + (f" Near: {near}." if near else ""), err=True)
        raise typer.Exit(1)
    _console().print(render.page(rows[full]), soft_wrap=True)


@app.command()
def check(
    lean: Annotated[bool, typer.Option("--lean", help="Also build every proof and compare the exports.")] = False,
) -> None:
    """Check sources, export, citations, claims and pins; without Lean unless asked.

    Example: witcert spec check --lean
    """
    _need_checkout("check")
    problems = guard.check(ROOT)
    try:
        claimed = claims()
    except (KeyError, ValueError) as error:  # a claim that does not fit the export, or an export that does not load
        problems.append(f"claims: {error}")
    else:
        pinned = lock.PATH.read_text(encoding="utf-8") if lock.PATH.is_file() else ""
        problems += lock.check(pinned, lock.build(load(), claimed, ROOT))
        problems += [f"{name}: linked to kernels or properties, but does not exist" for name in links.unknown()]
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{render.summary(links.rows())}: sources, export, citations, claims and pins agree.")
    if not lean:
        typer.echo(guard.BLIND_SPOT)
        return
    if shutil.which("lake") is None:
        typer.echo("--lean: lake is not on the PATH; install elan.", err=True)
        raise typer.Exit(2)
    for command in (["lake", "exe", "cache", "get"], [sys.executable, "formal/check.py", "--verify"]):
        if subprocess.run(command, cwd=ROOT).returncode:
            typer.echo(f"{' '.join(command)}: failed", err=True)
            raise typer.Exit(1)
    typer.echo("Lean built every proof, and spec.json is what it exports.")


@app.command()
def pin(yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Show what changed since the statements were pinned, and pin them as they are now.

    Example: witcert spec pin
    """
    _need_checkout("pin")
    old = lock.PATH.read_text(encoding="utf-8") if lock.PATH.is_file() else ""
    new = lock.dump(lock.build(load(), claims(), ROOT))
    if old == new:
        typer.echo("Nothing has changed since the statements were pinned.")
        return
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for line in lock.difference(old, new):
        _console().print(Text(line, style=colours.get(line[:1], "")), soft_wrap=True)
    if not yes:
        typer.confirm("Does the reference still follow from these statements?", abort=True)
    lock.PATH.write_text(new, encoding="utf-8")
    typer.echo(f"Pinned in {lock.PATH.relative_to(ROOT)}.")


@app.command()
def docs() -> None:
    """Write docs/statements.md.

    Example: witcert spec docs
    """
    _need_checkout("docs")
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text(render.markdown(links.rows()), encoding="utf-8")
    typer.echo(f"Wrote {DOCS.relative_to(ROOT)}.")
