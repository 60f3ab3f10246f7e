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
    Path | None,
    typer.Option("--calibration", help="Calibration file of `witcert calibrate`; the default model has one."),
]
TauOption = Annotated[
    float | None,
    typer.Option("--tau", help="Repair what the meter puts above this; from 1 on, rank by risk; none if left out."),
]


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


def _check_target(path: Path | None) -> None:
    """Refuse a file that could not be written, before the work that would be written."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, wants a file to write")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: its folder does not exist")


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
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a self-contained HTML page with plots.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of torch.")] = 1,
) -> None:
    """Answer needle questions over every compressed cache, raw and gated, with the live meter.

    Example: witcert demo --quick --report demo.html
    """
    import torch

    from . import page
    from .demo import run_demo

    # a step is many small operations: threads that wait for each other cost more than they bring on a busy machine
    torch.set_num_threads(threads)
    for target in (json, report):
        _check_target(target)
    out = console()
    loaded, tokenizer = _load(model, out)
    with bar(out) as progress:
        task = progress.add_task("starting", meter="")

        def tell(name: str, done: int, total: int, worst: float | None) -> None:
            meter = "" if worst is None else f"largest meter {worst:.3f}"
            progress.update(task, description=name, completed=done, total=total, meter=meter)

        result = run_demo(loaded, tokenizer, tell, quick=quick, calibration=_calibration(None, loaded))
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
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens of the answer.")] = 128,
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
        calibration=_calibration(calibration, loaded),
        max_new_tokens=max_new_tokens,
        write=lambda text: (sys.stdout.write(text), sys.stdout.flush()),
    )
    out.print(f"\n[dim]{line}[/dim]")


def _calibration(path: Path | None, model: Any) -> Any:
    """The named calibration, checked against the model; else the shipped one if it is this model's; else none."""
    from .calibration import Calibration, default_for

    if path is None:
        return default_for(model)
    calibration = Calibration.load(path)
    calibration.check(model)
    return calibration


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text: got {path}, wants UTF-8 ({error})") from error
    if not text.strip():
        raise ValueError(f"text: got an empty file {path}, wants some text")
    return text


def _staged(progress: Progress) -> Any:
    """A progress callback ``(stage, done, total)`` that shows one bar a stage."""
    tasks: dict[str, Any] = {}

    def tell(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = progress.add_task(stage, meter="")
        progress.update(tasks[stage], completed=done, total=total)

    return tell


@app.command()
def calibrate(
    text: Annotated[
        Path, typer.Option("--text", help="Text like the one that will be served.", exists=True, dir_okay=False)
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Safetensors file to write.")],
    model: ModelOption = None,
    length: Annotated[int, typer.Option("--length", help="Tokens to fit to: the length that will be served.")] = 2048,
    tau: Annotated[float, typer.Option("--tau", help="Threshold of the coverage.")] = 0.2,
    target: Annotated[
        float | None,
        typer.Option(
            "--target",
            min=0.0,
            max=1.0,
            help="Coverage to reach with the fewest bytes; one that reads 1.000 if left out.",
        ),
    ] = None,
) -> None:
    """Fit equaliser, sketch directions and bypass to a text, and print bytes against coverage.

    Example: witcert calibrate --model ./model --text served.txt --length 4096 -o model.safetensors
    """
    from . import calibration

    _check_target(output)
    words, out = _text(text), console()
    loaded, tokenizer = _load(model, out)
    with bar(out) as progress:
        result, trade_off = calibration.calibrate(
            loaded,
            tokenizer,
            words,
            length=length,
            tau=tau,
            target=calibration.TARGET if target is None else target,
            progress=_staged(progress),
        )
    result.save(output)
    out.print(calibration.table(trade_off))
    chosen = result.metadata
    out.print(
        f"{output}: {len(result.fitted)} layers, fitted to {chosen.length} tokens; chosen: sketch {chosen.sketch}, "
        f"witness_bands {chosen.witness_bands}, bypass {chosen.bypass}"
    )


@app.command()
def capture(
    text: Annotated[Path, typer.Option("--text", help="Text to run through the model.", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="Safetensors file to write.")],
    model: ModelOption = None,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of the text.")] = 2048,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Query rows to keep, the last ones.")] = 64,
) -> None:
    """Write a model's exact queries, keys and values of a text.

    Example: witcert capture --text prose.txt --length 2048 --steps 64 -o captured.safetensors
    """
    import torch

    from .capture import capture as run

    _check_target(output)
    words, out = _text(text), console()
    loaded, tokenizer = _load(model, out)
    ids = tokenizer(words)["input_ids"]
    if len(ids) < length:
        raise ValueError(f"text: got {len(ids)} tokens, wants at least --length, {length}")
    with bar(out) as progress:
        captured = run(loaded, torch.tensor(ids[:length]), steps=steps, progress=_staged(progress))
    captured.save(output)
    out.print(f"{output}: {len(captured.layers)} layers, {length} tokens, {steps} query rows")


@app.command()
def meter(
    file: Annotated[Path, typer.Argument(help="Captured tensors.", exists=True, dir_okay=False)],
    scheme: Annotated[
        list[str] | None, typer.Option("--scheme", help="Scheme to meter, int8 if left out; may be repeated.")
    ] = None,
    calibration: CalibrationOption = None,
    tau: Annotated[float, typer.Option("--tau", help="Threshold of the coverage.")] = 0.2,
    json: Annotated[Path | None, typer.Option("--json", help="Write all cells (of one scheme).")] = None,
) -> None:
    """Meter captured tensors under a scheme and compare with the true total variation.

    Example: witcert meter captured.safetensors --scheme int8 --scheme kivi2
    """
    from witcert_kernels.checks import check_range

    from . import metering
    from .calibration import Calibration, default_for
    from .capture import Captured
    from .schemes import get

    names = scheme or ["int8"]
    if json is not None and len(names) > 1:
        raise ValueError(f"--json: got {len(names)} schemes, wants one")
    _check_target(json)
    check_range("tau", tau, 0.0, float("inf"), open_low=True)
    for name in names:
        get(name)
    out = console()
    captured = Captured.load(file)
    fitted = Calibration.load(calibration) if calibration is not None else None
    if fitted is None and captured.metadata.fingerprint is not None:
        fitted = default_for(captured)
    summaries = []
    with bar(out) as progress:
        for name in names:
            task = progress.add_task(name, meter="")

            def tell(stage: str, done: int, total: int, task: Any = task) -> None:
                progress.update(task, completed=done, total=total)

            result = metering.meter(captured, name, fitted, progress=tell)
            summaries.append(result.summary(tau))
    out.print(metering.table(summaries))
    if json is not None:
        result.write_json(json)


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


@app.command()
def conformance(
    impl: Annotated[
        str,
        typer.Option(
            "--impl", help="ref, torch-cpu, numba-cpu, triton-interpret, triton-cuda or package.module:Adapter."
        ),
    ],
    profile: Annotated[str, typer.Option("--profile", help="quick, ci or release.")] = "ci",
    seed: Annotated[int, typer.Option("--seed", help="Seed of all draws.")] = 0,
    report: Annotated[
        Path | None, typer.Option("--conformance-report", help="JSON to write; HTML goes beside it.")
    ] = None,
) -> None:
    """Test an implementation against every contract; exits with 1 unless all that it offers hold.

    Example: witcert conformance --impl mypackage.adapter:Adapter --profile quick
    """
    from witcert_conformance import release_check as run

    raise typer.Exit(run([impl], profile=profile, seed=seed, report=report))


@app.command("release-check")
def release_check(
    profile: Annotated[str, typer.Option("--profile", help="quick, ci or release.")] = "release",
    seed: Annotated[int, typer.Option("--seed", help="Seed of all draws.")] = 0,
    report: Annotated[
        Path | None, typer.Option("--conformance-report", help="JSON to write; HTML goes beside it.")
    ] = None,
) -> None:
    """Test every shipped implementation that this machine can run; exits with 1 unless all properties passed.

    Example: witcert release-check --conformance-report release.json
    """
    from witcert_conformance import release_check as run

    raise typer.Exit(run(profile=profile, seed=seed, report=report))


def _said(error: Exception) -> str:
    """What an error says, in one line also where several fields of a file are wrong."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    wrong = (f"{'.'.join(map(str, e['loc'])) or error.title}: got {e['input']!r}, {e['msg']}" for e in error.errors())
    return "; ".join(wrong)


def main() -> None:
    """Entry point: a mistake of the user ends with one line, not with a traceback."""
    from .model import ModelUnavailable

    try:
        app()
    except (ValueError, TypeError, OSError, ModelUnavailable) as error:
        typer.echo(f"witcert: {_said(error)}", err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
