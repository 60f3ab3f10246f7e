"""Metering captured tensors: what a scheme would do to a model's attention, bound and truth side by side."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict
from rich.table import Table
from torch import Tensor

from witcert_kernels import (
    Budget,
    Certificate,
    Guarantee,
    LayerCalibration,
    ObservatoryLayout,
    ObservatoryPool,
    PackedPool,
    StoreLayout,
)
from witcert_kernels.checks import check_range

from .capture import Captured, CapturedLayer, CaptureMetadata, Progress
from .read import Read
from .schemes import PackedScheme, Scheme, get
from .store import LayerStore
from .truth import read_tv

if TYPE_CHECKING:
    from .calibration import Calibration

ROWS = 64
DELTA = 0.01


class Cell(BaseModel):
    """One (layer, query head, query row) that read at least one compressed token.

    ``step`` counts the query rows of the capture. ``meter`` bounds ``true_tv``, which is None where a key or query that
    is not finite leaves none; ``eform`` is the paper's ½ (A² − 1).
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    layer: int
    head: int
    step: int
    scheme: str
    meter: float
    eform: float
    true_tv: float | None
    guarantee: Guarantee


class MeteringMeta(BaseModel):
    """What was metered. ``bytes_per_token``: one token's key and value in one kv head, largest over the layers."""

    model: str
    scheme: str
    tokens: int
    steps: int
    layers: int
    bytes_per_token: int
    sketch: int
    witness_bands: int
    bypass: int
    group: int | None
    page_size: int
    calibration: str | None
    delta: float | None
    seed: int | None


class Metering(BaseModel):
    """All cells of a capture under one scheme."""

    meta: MeteringMeta
    cells: list[Cell]

    def write_json(self, path: str | Path) -> None:
        """Write ``{"meta": …, "cells": […]}``."""
        Path(path).write_text(self.model_dump_json(), encoding="utf-8")

    def summary(self, tau: float = 0.2) -> Summary:
        """Coverage at τ and the rest of the table's row.

        Raises:
            ValueError: τ is not above 0.
        """
        check_range("tau", tau, 0.0, float("inf"), open_low=True)
        meters = [cell.meter for cell in self.cells]
        pairs = [(cell.meter, cell.true_tv) for cell in self.cells if cell.true_tv is not None]
        return Summary(
            scheme=self.meta.scheme,
            tau=tau,
            cells=len(meters),
            coverage=sum(m <= tau for m in meters) / len(meters) if meters else None,
            meter_median=median(meters) if meters else None,
            meter_max=max(meters, default=None),
            true_tv_median=median(tv for _, tv in pairs) if pairs else None,
            violations=sum(m < tv for m, tv in pairs),
            not_finite=len(meters) - len(pairs),
            guarantee=self.cells[0].guarantee if self.cells else None,
            bytes_per_token=self.meta.bytes_per_token,
        )


class Summary(BaseModel):
    """One row of the table; numbers are None where there is no cell.

    ``violations`` counts cells with meter < true TV, tolerance 0. Cells that are not finite have meter 1.
    """

    scheme: str
    tau: float
    cells: int
    coverage: float | None
    meter_median: float | None
    meter_max: float | None
    true_tv_median: float | None
    violations: int
    not_finite: int
    guarantee: Guarantee | None
    bytes_per_token: int


def meter(
    captured: Captured,
    scheme: str | Scheme | PackedScheme = "int8",
    calibration: Calibration | None = None,
    *,
    sketch: int | None = None,
    witness_bands: int | None = None,
    group: int | None = None,
    page_size: int = 64,
    delta: float = DELTA,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Metering:
    """Write captured keys and values under a scheme, read every captured query row, and compare with the exact keys.

    Args:
        captured: the tensors; row i reads the first ``tokens - steps + 1 + i`` tokens, all from the store.
        scheme: a name of ``witcert.schemes``, or a scheme.
        calibration: equaliser, sketch directions and bypass pairs; None for none of them.
        sketch, witness_bands: by default what the calibration chose (without one 0); a black-box scheme has 16 bands.
        group, page_size: as in :class:`StoreLayout`; a black-box scheme has no group.
        delta: failure probability that a dithered store divides over layers, heads and steps.
        seed: 64-bit key of the dither; None draws one.
        progress: called with ``"meter"``, layers done and layers.

    Raises:
        TypeError, ValueError: an argument or a calibration that does not fit, by name.
    """
    chosen = get(scheme) if isinstance(scheme, str) else scheme
    if not isinstance(chosen, Scheme | PackedScheme):
        raise TypeError(f"scheme: got {type(scheme).__name__}, wants a name or a Scheme")
    if group is not None and isinstance(chosen, Scheme):
        raise ValueError(f"group: got {group} for scheme {chosen.name!r}, wants None: it has its own groups")
    if calibration is not None:
        calibration.check(captured)
        calibration = calibration if sketch is None else calibration.with_sketch(sketch)
        sketch = calibration.metadata.sketch
        if witness_bands is None and isinstance(chosen, PackedScheme):
            witness_bands = calibration.metadata.witness_bands
    dithered = isinstance(chosen, PackedScheme) and chosen.dither
    if dithered and seed is None:
        seed = secrets.randbits(64)
    first, count = captured.layers[0], len(captured.layers)
    seed = seed if dithered else None
    options = StoreOptions(chosen, sketch or 0, witness_bands, group, page_size, captured.metadata, seed)
    heads = max(layer.q.shape[1] for layer in captured.layers)
    budget = Budget(delta, count, heads, len(first.q)) if dithered else None
    cells: list[Cell] = []
    pools = []
    for n, layer in enumerate(captured.layers):
        store = fill(layer, n, options, calibration.layers[n] if calibration else None)
        pools.append(store.pool)
        for step in range(0, len(layer.q), ROWS):
            read = causal_read(store, layer, captured.metadata, step, min(step + ROWS, len(layer.q)), budget)
            cells += _cells(n, step, chosen.name, read.run()[2], read_tv(read))
        if progress is not None:
            progress("meter", n + 1, count)
    layout = pools[0].layout
    meta = MeteringMeta(
        model=captured.metadata.model,
        scheme=chosen.name,
        tokens=len(first.k),
        steps=len(first.q),
        layers=count,
        bytes_per_token=max(pool.layout.bytes_per_token for pool in pools),
        sketch=layout.sketch,
        witness_bands=layout.witness_bands,
        bypass=getattr(layout, "bypass", 0),
        group=group,
        page_size=page_size,
        calibration=calibration.fingerprint if calibration else None,
        delta=delta if dithered else None,
        seed=seed,
    )
    return Metering(meta=meta, cells=cells)


@dataclass(frozen=True)
class StoreOptions:
    """What all layers' stores share, see :func:`meter`."""

    scheme: Scheme | PackedScheme
    sketch: int
    witness_bands: int | None
    group: int | None
    page_size: int
    metadata: CaptureMetadata
    seed: int | None = None

    def pool(
        self, layer: CapturedLayer, index: int, calibration: LayerCalibration | None
    ) -> PackedPool | ObservatoryPool:
        """An empty pool for a layer."""
        sizes = (layer.k.shape[1], layer.k.shape[2], layer.v.shape[2], layer.k.dtype, self.page_size)
        rope_layout, rotary_dim = self.metadata.rope_layout, self.metadata.rotary_dim
        if isinstance(self.scheme, Scheme):
            bands = min(16, layer.k.shape[2] // 2) if self.witness_bands is None else self.witness_bands
            observatory = ObservatoryLayout(
                *sizes, witness_bands=bands, sketch=self.sketch, rope_layout=rope_layout, rotary_dim=rotary_dim
            )
            return ObservatoryPool(observatory, 0, layer=index, calibration=calibration)
        packed = StoreLayout(
            *sizes,
            group=self.group,
            sketch=self.sketch,
            witness_bands=self.witness_bands or 0,
            bypass=calibration.bypass.shape[1] if calibration else 0,
            dither=self.scheme.dither,
            rope_layout=rope_layout,
            rotary_dim=rotary_dim,
        )
        return PackedPool(packed, 0, layer=index, calibration=calibration, seed=self.seed)


def fill(
    layer: CapturedLayer,
    index: int,
    options: StoreOptions,
    calibration: LayerCalibration | None,
    *,
    backing: bool = True,
) -> LayerStore:
    """A store that holds a captured layer's keys and values, with ``backing`` the exact ones too."""
    scheme = options.scheme if isinstance(options.scheme, Scheme) else None
    store = LayerStore(options.pool(layer, index, calibration), scheme, 1, backing=backing)
    store.write(layer.k, layer.v, [len(layer.k)])
    return store


def causal_read(
    store: LayerStore,
    layer: CapturedLayer,
    metadata: CaptureMetadata,
    start: int,
    stop: int,
    budget: Budget | None = None,
) -> Read:
    """Query rows ``start … stop`` of a captured layer, each with the tokens up to its own."""
    return Read(
        store,
        [0],
        [len(layer.k) - len(layer.q) + stop],
        layer.q[start:stop],
        [0, stop - start],
        sm_scale=metadata.sm_scale,
        logits_soft_cap=metadata.logits_soft_cap,
        window_left=layer.window_left,
        sinks=layer.sinks,
        budget=budget,
    )


def _cells(layer: int, step: int, scheme: str, certificate: Certificate, true_tv: Tensor) -> Iterable[Cell]:
    rows = [certificate.meter, certificate.eform, true_tv, certificate.compressed]
    for i, row in enumerate(zip(*(x.tolist() for x in rows), strict=True)):
        for head, (meter, eform, tv, compressed) in enumerate(zip(*row, strict=True)):
            if compressed:
                yield Cell(
                    layer=layer,
                    head=head,
                    step=step + i,
                    scheme=scheme,
                    meter=meter,
                    eform=eform,
                    true_tv=None if tv != tv else tv,
                    guarantee=certificate.guarantee,
                )


def table(summaries: Iterable[Summary]) -> Table:
    """The summaries as a table, all of one τ."""
    rows = list(summaries)
    grid = Table(header_style="bold")
    grid.add_column("scheme")
    for name, _ in _COLUMNS:
        grid.add_column(name.format(tau=rows[0].tau if rows else 0.2), justify="right")
    for summary in rows:
        grid.add_row(summary.scheme, *(value(summary) for _, value in _COLUMNS))
    return grid


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


_COLUMNS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("cells", lambda s: str(s.cells)),
    ("coverage τ={tau:g}", lambda s: _number(s.coverage, ".4f")),
    ("median meter", lambda s: _number(s.meter_median, ".3g")),
    ("max meter", lambda s: _number(s.meter_max, ".3g")),
    ("median true TV", lambda s: _number(s.true_tv_median, ".3g")),
    ("meter < TV", lambda s: str(s.violations)),
    ("not finite", lambda s: str(s.not_finite)),
    ("guarantee", lambda s: s.guarantee or "–"),
    ("bytes/token", lambda s: str(s.bytes_per_token)),
)
