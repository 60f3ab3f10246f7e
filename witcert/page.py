"""Reports as one self-contained HTML page with plots, readable on a phone."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .demo import Demo, Run
    from .report import Report

TAUS = np.geomspace(1e-3, 1.0, 61)


def _figure(width: float = 6.4, height: float = 4.0, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _image(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _by_scheme(runs: Sequence[Run], gated: bool) -> dict[str, list[Run]]:
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        if run.gated == gated and run.cells.size:
            grouped.setdefault(run.scheme, []).append(run)
    return grouped


def heat_map(runs: Sequence[Run]) -> Figure | None:
    """Largest meter of each layer and step, one panel a scheme, on the longest prompt, not gated."""
    longest = max((run.prompt_tokens for run in runs), default=0)
    chosen = [run for run in runs if not run.gated and run.cells.size and run.prompt_tokens == longest]
    if not chosen:
        return None
    columns = min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    figure, axes = _figure(2.4 * columns + 0.6, 2.1 * rows + 0.3, rows, columns)
    image: Any = None
    for axis, run in zip(axes.flat, chosen, strict=False):
        cells = run.cells
        grid = np.zeros((cells["layer"].max() + 1, cells["step"].max() + 1))
        np.maximum.at(grid, (cells["layer"], cells["step"]), cells["meter"])
        image = axis.imshow(grid, aspect="auto", vmin=0, vmax=1, cmap="magma", origin="lower")
        axis.set_title(run.scheme, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes.flat[len(chosen) :]:
        axis.axis("off")
    figure.supxlabel("decode step", fontsize=8)
    figure.supylabel("layer", fontsize=8)
    figure.colorbar(image, ax=list(axes.flat), label="largest meter of the layer's heads", shrink=0.8)
    return figure


def coverage_curve(runs: Sequence[Run]) -> Figure:
    """Share of the cells whose meter is at most τ."""
    figure, axes = _figure()
    axis = axes[0, 0]
    for scheme, mine in _by_scheme(runs, gated=False).items():
        meter = np.concatenate([run.cells["meter"] for run in mine])
        axis.plot(TAUS, [(meter <= tau).mean() for tau in TAUS], label=scheme)
    axis.set(xscale="log", xlabel="τ", ylabel="coverage: share of cells with meter ≤ τ", ylim=(-0.02, 1.02))
    axis.axvline(0.2, color="grey", linewidth=0.8, linestyle=":")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def scatter(runs: Sequence[Run], points: int = 1500) -> Figure:
    """Meter against true total variation; a point below the diagonal would refute the proof."""
    figure, axes = _figure(height=4.6)
    axis = axes[0, 0]
    rng = np.random.default_rng(0)
    for scheme, mine in _by_scheme(runs, gated=False).items():
        cells = np.concatenate([run.cells for run in mine])
        cells = cells[np.isfinite(cells["true_tv"])]
        if len(cells) > points:
            cells = rng.choice(cells, points, replace=False)
        axis.plot(np.maximum(cells["true_tv"], 1e-6), cells["meter"], ".", markersize=2, alpha=0.5, label=scheme)
    axis.plot([1e-6, 1], [1e-6, 1], color="black", linewidth=0.8)
    axis.set(
        xscale="log", yscale="log", xlabel="true total variation", ylabel="meter", xlim=(1e-6, 1.2), ylim=(1e-4, 1.2)
    )
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, markerscale=5)
    return figure


def traffic(runs: Sequence[Run]) -> Figure:
    """Share of all (kv head, page) pairs that the gate read exactly."""
    figure, axes = _figure(height=3.2)
    axis = axes[0, 0]
    grouped = _by_scheme(runs, gated=True)
    share = [
        100 * sum(r.pages_repaired for r in mine) / max(sum(r.pages for r in mine), 1) for mine in grouped.values()
    ]
    bars = axis.barh(list(grouped), share)
    axis.bar_label(bars, fmt="%.2f %%", fontsize=8, padding=2)
    axis.set(xlabel="pages repaired, per cent of all pages", xlim=(0, max([*share, 1]) * 1.2))
    axis.invert_yaxis()
    return figure


def render(demo: Demo) -> str:
    """The demo's page as HTML; needs the ``demo`` extra (jinja2, matplotlib)."""
    figures: list[tuple[str, Figure | None]] = [
        ("Where the meter is high", heat_map(demo.runs)),
        ("Coverage against τ", coverage_curve(demo.runs)),
        ("Meter against true total variation", scatter(demo.runs)),
        ("Repair traffic", traffic(demo.runs)),
    ]
    return _fill(
        figures,
        title="WitCert demo",
        meta=demo.meta,
        header=demo.header,
        rows=demo.rows(),
        answers=demo.answers(),
        fidelity=demo.fidelity,
    )


def render_report(report: Report) -> str:
    """The page of one cache's report as HTML; needs the ``demo`` extra."""
    figures: list[tuple[str, Figure | None]] = []
    if report.cells:
        figure, axes = _figure(height=4.6)
        grid = np.zeros((max(c.layer for c in report.cells) + 1, len({c.step for c in report.cells})))
        column = {step: i for i, step in enumerate(sorted({c.step for c in report.cells}))}
        for cell in report.cells:
            at = cell.layer, column[cell.step]
            grid[at] = max(grid[at], cell.meter)
        image = axes[0, 0].imshow(grid, aspect="auto", vmin=0, vmax=1, cmap="magma", origin="lower")
        axes[0, 0].set(xlabel="step", ylabel="layer")
        figure.colorbar(image, label="largest meter of the layer's heads")
        figures.append(("Where the meter is high", figure))
    if report.cells_seen:
        figure, axes = _figure()
        edges = np.arange(len(report.histogram)) / (len(report.histogram) - 1)
        axes[0, 0].step(edges, np.cumsum(report.histogram) / report.cells_seen, where="post")
        axes[0, 0].set(xlabel="τ", ylabel="share of cells with meter ≤ τ", xlim=(0, 1), ylim=(0, 1.02))
        axes[0, 0].grid(alpha=0.3)
        figures.append(("Coverage against τ", figure))
    facts = report.model_dump(exclude={"cells", "histogram", "versions", "bytes", "budget"})
    nested = {**report.versions, **{f"bytes: {k}": v for k, v in report.bytes.model_dump().items()}}
    return _fill(
        figures,
        title="WitCert report",
        meta={k: "—" if v is None else str(v) for k, v in {**facts, **nested}.items()},
        header=("summary",),
        rows=[[report.summary_line()]],
        answers=[],
        fidelity=None,
    )


def _fill(figures: Sequence[tuple[str, Figure | None]], **values: Any) -> str:
    import jinja2

    source = (files("witcert") / "data" / "report.html.j2").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
    return template.render(figures=[(title, _image(f)) for title, f in figures if f is not None], **values)
