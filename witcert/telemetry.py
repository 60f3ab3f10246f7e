"""What decodes reported, for Prometheus: a collector that reads the counters when it is scraped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from witcert_kernels import Telemetry
from witcert_kernels.checks import check_range

LABEL = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")
OWN_LABELS = ("le", "tau", "layer", "head")
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class TelemetryCollector(Collector):
    """Exports a :class:`witcert_kernels.Telemetry`; a scrape waits for the device once, a decode never does.

    Metrics, each with ``labels``: ``witcert_meter`` (histogram of meters), ``witcert_covered_cells_total`` (by ``tau``:
    cells with meter ≤ τ), ``witcert_non_finite_cells_total``, ``witcert_value_non_finite_cells_total``, and
    ``witcert_worst_meter`` (gauge by ``layer`` and ``head``, absent before the first cell). A cell is a query head of a
    layer and step that read a compressed token.

    Example::

        telemetry = witcert_kernels.Telemetry(taus=(0.1, 0.2), device="cuda")
        prometheus_client.REGISTRY.register(TelemetryCollector(telemetry, {"model": "smollm2"}))
        prometheus_client.start_http_server(9100)
        cache = witcert.WitCertCache(model.config, telemetry=telemetry)

    A registry takes one collector of these metrics; :meth:`add` gives it the counters of further models or devices.

    Args:
        telemetry: the counters.
        labels: of every metric, such as a model's name.
        buckets: rising upper ends of the histogram's buckets, multiples of 1/1000 in [0, 1], the last one 1.

    Raises:
        TypeError, ValueError: by name.
    """

    def __init__(
        self, telemetry: Telemetry, labels: Mapping[str, str] | None = None, buckets: Sequence[float] = BUCKETS
    ) -> None:
        for edge in buckets:
            check_range("buckets", edge, 0.0, 1.0)
            if abs(edge * 1000 - round(edge * 1000)) > 1e-9:
                raise ValueError(f"buckets: got {edge}, wants multiples of 1/1000")
        edges = [round(edge * 1000) for edge in buckets]
        if not edges or edges[-1] != 1000 or any(a >= b for a, b in pairwise(edges)):
            raise ValueError(f"buckets: got {list(buckets)}, wants rising numbers, the last one 1")
        self._edges, self._names = edges, list(labels or {})
        for name in self._names:
            if not isinstance(name, str) or not LABEL.fullmatch(name) or name.startswith("__") or name in OWN_LABELS:
                raise ValueError(f"labels: got the name {name!r}, wants one of Prometheus, not of {OWN_LABELS}")
        self._sources: list[tuple[Telemetry, list[str]]] = []
        self.add(telemetry, labels)

    def add(self, telemetry: Telemetry, labels: Mapping[str, str] | None = None) -> None:
        """Export another telemetry too, under labels of the same names and other values.

        Raises:
            TypeError, ValueError: by name.
        """
        if not isinstance(telemetry, Telemetry):
            raise TypeError(f"telemetry: got {type(telemetry).__name__}, wants a witcert_kernels.Telemetry")
        labels = labels or {}
        if set(labels) != set(self._names):
            raise ValueError(f"labels: got the names {list(labels)}, wants {self._names}")
        values = [labels[name] for name in self._names]
        for value in values:
            if not isinstance(value, str):
                raise TypeError(f"labels: got the value {value!r}, wants a str")
        if any(values == taken for _, taken in self._sources):
            raise ValueError(f"labels: got {dict(labels)}, wants values that no other telemetry has")
        self._sources.append((telemetry, values))

    def describe(self) -> list[Metric]:
        """The metrics without samples, so that registering waits for nothing."""
        return list(self._families().values())

    def collect(self) -> Iterator[Metric]:
        """The metrics as of now."""
        families = self._families()
        for telemetry, labels in self._sources:
            counters = telemetry.read()
            below = list(accumulate(counters.histogram))
            buckets = [(str(edge / 1000), float(below[edge])) for edge in self._edges]
            families["meter"].add_metric(labels, [*buckets, ("+Inf", float(counters.cells))], counters.meter_sum)
            for tau, count in counters.covered.items():
                families["covered"].add_metric([*labels, str(tau)], count)
            families["non_finite"].add_metric(labels, counters.non_finite)
            families["value_non_finite"].add_metric(labels, counters.value_non_finite)
            if counters.worst is not None:
                layer, head = counters.worst
                families["worst"].add_metric([*labels, str(layer), str(head)], counters.max_meter)
        yield from families.values()

    def _families(self) -> dict[str, Any]:
        names = self._names
        return {
            "meter": HistogramMetricFamily(
                "witcert_meter", "Proved bound of the total variation of attention, a cell each", labels=names
            ),
            "covered": CounterMetricFamily("witcert_covered_cells", "Cells with meter <= tau", labels=[*names, "tau"]),
            "non_finite": CounterMetricFamily(
                "witcert_non_finite_cells", "Cells with a key, scale, query or logit that is not finite", labels=names
            ),
            "value_non_finite": CounterMetricFamily(
                "witcert_value_non_finite_cells", "Cells with a value that is not finite", labels=names
            ),
            "worst": GaugeMetricFamily(
                "witcert_worst_meter", "The largest meter, and where it was", labels=[*names, "layer", "head"]
            ),
        }
