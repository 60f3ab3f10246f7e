"""Counters of what decodes reported, in device memory: no step waits for them, and a CUDA graph can hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_integer, check_range, check_tensor

BINS = 1000
PLACES = 2**16
# int64 fields of the buffer: counters, cells covered at each τ, cells of each bin, the τ as float64
WORST, NON_FINITE, VALUE_NON_FINITE, SUM, COVERED = range(5)
UNIT = 2.0**-24  # of SUM, each meter rounded up to it


@dataclass(frozen=True)
class Counters:
    """What a :class:`Telemetry` had counted when it was read. A cell is a (row, head) that read a compressed token.

    Attributes:
        cells: how many.
        non_finite: cells with a key, scale, query or logit that was not finite; their meter is 1.
        value_non_finite: cells with a value that was not finite, so that no bound of the output's error exists.
        covered: for each τ, cells with meter ≤ τ.
        histogram: entry i counts meters in ((i − 1)/1000, i/1000].
        meter_sum: sum of the meters, each rounded up to a multiple of 2⁻²⁴.
        max_meter: the largest meter, 0 for none.
        worst: a (layer, head) that reported it, the last in order of those that did; None for none.
    """

    cells: int
    non_finite: int
    value_non_finite: int
    covered: dict[float, int]
    histogram: tuple[int, ...]
    meter_sum: float
    max_meter: float
    worst: tuple[int, int] | None

    def coverage(self, tau: float) -> float:
        """Share of the cells with meter ≤ τ, for a τ that is counted or a multiple of 1/1000; NaN for no cells.

        Raises:
            TypeError, ValueError: another τ.
        """
        check_range("tau", tau, 0.0, 1.0)
        entry = round(tau * BINS)
        if tau not in self.covered and abs(tau * BINS - entry) > 1e-9:
            raise ValueError(f"tau: got {tau}, wants one of {list(self.covered)} or a multiple of 1/{BINS}")
        count = self.covered[tau] if tau in self.covered else sum(self.histogram[: entry + 1])
        return count / self.cells if self.cells else float("nan")


class Telemetry:
    """Counts every cell of the decodes that it is given to, exactly and in any order: the counters are integers.

    On a GPU the kernels count with atomics. On a CPU, threads that decode at the same time need one each.

    Args:
        taus: thresholds in (0, 1] at which coverage is counted exactly.
        device: of the decodes.

    Attributes:
        taus, device: as above.
        buffer: int64, the counters. Its address never changes, so captured graphs keep counting into it.

    Raises:
        TypeError, ValueError: a τ that is no number or out of range.
    """

    @torch.inference_mode(False)
    def __init__(self, taus: Sequence[float] = (0.1, 0.2), device: torch.device | str = "cpu") -> None:
        if not isinstance(taus, Sequence):
            raise TypeError(f"taus: got {taus!r}, wants a sequence of numbers")
        for tau in taus:
            check_range("taus", tau, 0.0, 1.0, open_low=True)
        self.taus = tuple(float(tau) for tau in taus)
        first_tau = COVERED + len(self.taus) + BINS + 1
        start = torch.zeros(first_tau + len(self.taus), dtype=torch.int64)
        start[WORST] = -1
        start[first_tau:] = torch.tensor(self.taus, dtype=torch.float64).view(torch.int64)
        self._start = start.to(device)
        self.buffer = self._start.clone()
        self.device = self.buffer.device

    def add(self, meter: Tensor, risk: Tensor, value_error: Tensor, counted: Tensor, layer: int) -> None:
        """Count cells with torch's own ops, for certificates that were made without it. Waits for nothing.

        Args:
            meter, risk, value_error: of a certificate, float32 ``[rows, heads]``. A meter that is no number in [0, 1]
                counts as the nearest, NaN as 1.
            counted: ``[rows, heads]``, nonzero at the cells to count.
            layer: their layer.

        Raises:
            TypeError, ValueError: another dtype or shape, or a negative layer, by name, before anything is counted.
        """
        check_integer("layer", layer, 0)
        check_tensor("meter", meter, (None, None), torch.float32)
        for name, tensor in (("risk", risk), ("value_error", value_error)):
            check_tensor(name, tensor, tuple(meter.shape), torch.float32)
        check_tensor("counted", counted, tuple(meter.shape))
        count_(self.buffer, meter.detach(), risk.detach(), value_error.detach(), counted, layer)

    def read(self) -> Counters:
        """The counters so far. Waits for the device: the only method that does."""
        numbers: list[int] = self.buffer.tolist()
        first_bin = COVERED + len(self.taus)
        histogram = tuple(numbers[first_bin : first_bin + BINS + 1])
        worst, place = numbers[WORST], None
        if worst >= 0:
            place = (worst >> 16) % PLACES, worst % PLACES
        bits = torch.tensor(max(worst, 0) >> 32, dtype=torch.int32)
        return Counters(
            cells=sum(histogram),
            non_finite=numbers[NON_FINITE],
            value_non_finite=numbers[VALUE_NON_FINITE],
            covered=dict(zip(self.taus, numbers[COVERED:first_bin], strict=True)),
            histogram=histogram,
            meter_sum=numbers[SUM] * UNIT,
            max_meter=float(bits.view(torch.float32)),
            worst=place,
        )

    def reset(self) -> None:
        """Count from 0 again."""
        self.buffer.copy_(self._start)


def count_taus(buffer: Tensor) -> int:
    """How many τ a buffer has."""
    return (len(buffer) - COVERED - BINS - 1) // 2


@torch.inference_mode(False)
@torch.no_grad()
def count_(buffer: Tensor, meter: Tensor, risk: Tensor, value_error: Tensor, counted: Tensor, layer: int) -> None:
    """Add cells to a :class:`Telemetry`'s buffer, see :meth:`Telemetry.add`."""
    if not meter.numel():
        return
    taus, device = count_taus(buffer), buffer.device
    counted = counted.to(device) != 0
    meter, risk, value_error = (x.to(device) for x in (meter, risk, value_error))
    meter = meter.nan_to_num(nan=1.0).clamp(0.0, 1.0) + 0.0  # no -0, whose bits are the smallest number's
    wide, one = meter.to(torch.float64), counted.to(torch.int64)
    lost = counted & ~torch.stack((risk, value_error)).isfinite()
    units = ((wide / UNIT).ceil().to(torch.int64) * one).sum()
    buffer[NON_FINITE : SUM + 1].add_(torch.cat((lost.sum((1, 2)), units[None])))
    if taus:
        thresholds = buffer[-taus:].view(torch.float64)
        buffer[COVERED : COVERED + taus].add_((counted[..., None] & (wide[..., None] <= thresholds)).sum((0, 1)))
    entry = (wide * BINS).ceil().to(torch.int64)  # exact: 24 bits times 10
    buffer[COVERED + taus :].index_add_(0, entry.flatten(), one.flatten())
    head = torch.arange(meter.shape[1], device=device).clamp_max(PLACES - 1)
    place = min(layer, PLACES - 1) * PLACES + head
    packed = meter.view(torch.int32).to(torch.int64) * 2**32 + place
    worst = buffer[WORST : WORST + 1]
    worst.copy_(torch.maximum(worst, packed.masked_fill(~counted, -1).amax()))
