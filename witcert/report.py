"""What the meter saw: cells, running counts, and the report that is made of them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from witcert_kernels import Certificate, Guarantee, Telemetry
from witcert_kernels.telemetry import BINS

from .read import Read, Reading


@dataclass(frozen=True)
class StepRecord:
    """What ``WitCertCache.observer`` gets after each read of a layer's store, which is still as it was read.

    Attributes:
        layer: index of the layer.
        step: number of the chunk's last position, counted over the request and never taken back by a crop.
        read: the op's arguments, among them the query rows and the store.
        reading: what came back.
    """

    layer: int
    step: int
    read: Read
    reading: Reading

    @property
    def certificate(self) -> Certificate:
        """The certificate of the last decode."""
        return self.reading.certificate

    def steps(self) -> list[int]:
        """The step of each query row; the last row of each sequence has the record's."""
        rows = self.read.rows
        last = dict(rows)  # a later row of a sequence replaces an earlier one
        return [self.step - last[sequence] + position for sequence, position in rows]


class Cell(BaseModel):
    """One (layer, query head, step) that read at least one compressed token.

    ``position`` is logical (padding not counted). ``decode`` is False for prefill rows, which are metered, not gated.
    ``meter_before``, ``repaired``: the meter before the gate, and the pages that it made exact for this kv head.
    ``compressed`` counts the compressed tokens that the last decode attended to.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    layer: int
    head: int
    step: int
    sequence: int
    position: int
    decode: bool
    meter: float
    meter_before: float
    eform: float
    risk: float
    value_error: float
    compressed: int
    repaired: int
    guarantee: Guarantee


class Bytes(BaseModel):
    """Allocated bytes of all layers by part, and bytes of one token's key and value in one kv head.

    ``store``: the pages; ``backing``: exact keys and values kept for repair; ``exact``: repaired pages; ``tail``: exact
    tokens of incomplete groups. ``per_token``: as stored here; ``nominal_per_token``: as a black-box scheme itself
    would store it, where an observatory holds 16-bit copies instead.
    """

    store: int
    backing: int
    exact: int
    tail: int
    per_token: int
    nominal_per_token: float | None


class BudgetState(BaseModel):
    """The failure budget of a dithered store: δ is of one sequence, of which a batch has several."""

    delta: float
    steps: int
    spent: int


class Report(BaseModel):
    """What the meter saw during a request.

    ``cells`` are the newest ones, at most ``history``; ``histogram`` has all ``cells_seen``: entry i counts meters in
    ((i − 1)/1000, i/1000]. ``non_finite`` counts cells with a key, scale or query that was not finite. ``pages`` and
    ``pages_repaired`` count the (layer, kv head, page) that the cache holds now; ``repairs`` counts all repairs so far.
    ``calibration`` is one fingerprint over those of all layers.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    scheme: str
    tau: float | None
    gate: Literal["certified", "risk_ranked"] | None
    guarantee: Guarantee
    cells: list[Cell]
    cells_seen: int
    histogram: list[int]
    max_meter: float
    non_finite: int
    pages: int
    pages_repaired: int
    repairs: int
    bytes: Bytes
    seed: int | None
    calibration: str | None
    budget: BudgetState | None
    versions: dict[str, str]

    @property
    def complete(self) -> bool:
        """Whether ``cells`` has all that were seen; if not, coverage and median have the histogram's resolution."""
        return len(self.cells) == self.cells_seen

    def coverage(self, tau: float) -> float:
        """Share of the cells with meter ≤ τ, rounded down to the histogram's bins; NaN if there are none.

        Raises:
            ValueError: τ is not in (0, 1): a meter of 1 certifies nothing.
        """
        if not 0 < tau < 1:
            raise ValueError(f"tau: got {tau}, wants a number in (0, 1)")
        if not self.cells_seen:
            return math.nan
        if self.complete:
            return sum(cell.meter <= tau for cell in self.cells) / self.cells_seen
        return sum(self.histogram[: math.floor(tau * BINS * (1 + 1e-12)) + 1]) / self.cells_seen

    @property
    def median_meter(self) -> float:
        """The lower median of the meters, rounded up to the histogram's bins where cells were dropped; NaN for none."""
        if not self.cells_seen:
            return math.nan
        if self.complete:
            return statistics.median_low(cell.meter for cell in self.cells)
        below = accumulate(self.histogram)
        return next(i for i, count in enumerate(below) if 2 * count >= self.cells_seen) / BINS

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token's key and value in one kv head, as the scheme itself stores them."""
        nominal = self.bytes.nominal_per_token
        return self.bytes.per_token if nominal is None else nominal

    def summary_line(self, tau: float = 0.2) -> str:
        """One line: coverage at τ (at 0.2 where τ is not below 1), the meter, the guarantee, what was repaired."""
        if not self.cells_seen:
            return f"{self.scheme}: no step read a compressed token"
        tau = tau if tau < 1 else 0.2
        line = (
            f"{self.scheme}: {self.cells_seen} cells, coverage {self.coverage(tau):.4f} at τ = {tau:g}, meter median "
            f"{self.median_meter:.3g}, max {self.max_meter:.3g} ({self.guarantee}), "
            f"{self.bytes_per_token:g} bytes a token and kv head"
        )
        if self.gate is not None:
            line += f", {self.pages_repaired} of {self.pages} pages repaired"
        return line

    def to_json(self, path: str | Path) -> None:
        """Write the report as JSON; numbers that are not finite become strings."""
        Path(path).write_text(self.model_dump_json(), encoding="utf-8")

    def to_html(self, path: str | Path) -> None:
        """Write a self-contained page with plots; needs the ``demo`` extra."""
        from .page import render_report

        Path(path).write_text(render_report(self), encoding="utf-8")


@dataclass(frozen=True)
class _Kept:
    """A step's cells, still as tensors ``[rows, heads]``, so that a step never waits for the device."""

    layer: int
    steps: list[int]
    rows: list[tuple[int, int]]
    decode: bool
    guarantee: Guarantee
    measures: dict[str, Tensor]
    compressed_before: Tensor
    repaired: Tensor

    def __len__(self) -> int:
        return self.compressed_before.numel()

    def cells(self) -> list[Cell]:
        table = {name: value.tolist() for name, value in self.measures.items()}
        seen, repaired = self.compressed_before.tolist(), self.repaired.tolist()
        per_head = self.compressed_before.shape[1] // self.repaired.shape[1]
        return [
            Cell(
                layer=self.layer,
                head=head,
                step=self.steps[i],
                sequence=sequence,
                position=position,
                decode=self.decode,
                repaired=repaired[i][head // per_head],
                guarantee=self.guarantee,
                **{name: value[i][head] for name, value in table.items()},
            )
            for i, (sequence, position) in enumerate(self.rows)
            for head in range(len(seen[i]))
            if seen[i][head]
        ]


TOGETHER = 64  # reads that are counted in one call


class History:
    """The newest cells, and counts of all. Adding a step never synchronises host and device.

    Args:
        history: most cells to keep.
    """

    def __init__(self, history: int) -> None:
        self.history = history
        self.guarantee: Guarantee = "any_query"
        self._kept: deque[_Kept] = deque()
        self._size = 0
        self._counts: Telemetry | None = None
        self._repairs: Tensor | int = 0
        self._uncounted: list[_Kept] = []

    def add(self, record: StepRecord) -> None:
        """Count a step's cells and keep them while they are among the newest."""
        reading = record.reading
        certificate = reading.certificate
        if certificate.guarantee == "fixed_trajectory":
            self.guarantee = "fixed_trajectory"
        names = ("meter", "eform", "risk", "value_error", "compressed")
        measures = {name: getattr(certificate, name).detach() for name in names}
        measures["meter_before"] = reading.meter_before.detach()
        kept = _Kept(
            layer=record.layer,
            steps=record.steps(),
            rows=record.read.rows,
            decode=record.read.is_decode,
            guarantee=certificate.guarantee,
            measures=measures,
            compressed_before=reading.compressed_before,
            repaired=reading.repaired,
        )
        self._uncounted.append(kept)
        if len(self._uncounted) == TOGETHER:
            self._count()
        self._kept.append(kept)
        self._size += len(kept)
        while self._kept and self._size - len(self._kept[0]) >= self.history:
            self._size -= len(self._kept.popleft())

    def cells(self) -> list[Cell]:
        """The newest cells, oldest first, at most ``history``."""
        cells = [cell for kept in self._kept for cell in kept.cells()]
        return cells[max(0, len(cells) - self.history) :]

    def totals(self) -> dict[str, int | float | list[int]]:
        """``cells_seen``, ``histogram``, ``max_meter``, ``non_finite`` and ``repairs`` over all steps."""
        self._count()
        if self._counts is None:
            return {"cells_seen": 0, "histogram": [0] * (BINS + 1), "max_meter": 0.0, "non_finite": 0, "repairs": 0}
        counters = self._counts.read()
        return {
            "cells_seen": counters.cells,
            "histogram": list(counters.histogram),
            "max_meter": counters.max_meter,
            "non_finite": counters.non_finite,
            "repairs": int(self._repairs),
        }

    def _count(self) -> None:
        """Count what is not counted yet, all at once: a call a layer would take as long as its decode."""
        if not self._uncounted:
            return
        if self._counts is None:
            self._counts = Telemetry((), self._uncounted[0].repaired.device)
        device = self._counts.device

        def joined(tensors: Iterable[Tensor]) -> Tensor:
            return torch.cat([x.to(device).reshape(-1, 1) for x in tensors])

        meter, risk, value_error = (
            joined(kept.measures[name] for kept in self._uncounted) for name in ("meter", "risk", "value_error")
        )
        counted = joined(kept.compressed_before for kept in self._uncounted)
        self._counts.add(meter, risk, value_error, counted, layer=0)
        self._repairs = self._repairs + joined(kept.repaired for kept in self._uncounted).sum()
        self._uncounted.clear()


def versions() -> dict[str, str]:
    """Versions of what a report depends on."""
    found = {}
    for name in ("witcert", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
