"""What decodes reported, for Prometheus: a collector that reads the counters when it is scraped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from witcert_kernels import Telemetry
from witcert_kernels.checks import check_range

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
        if not isinstance(telemetry, Telemetry):
            raise TypeError(f"telemetry: got {type(telemetry).__name__}, wants a witcert_kernels.Telemetry")
        edges = [round(edge * 1000) for edge in buckets]
        for edge, number in zip(buckets, edges, strict=True):
            check_range("buckets", edge, 0.0, 1.0)
            if abs(edge * 1000 - number) > 1e-9:
                raise ValueError(f"buckets: got {edge}, wants multiples of 1/1000")
        if not edges or edges[-1] != 1000 or any(a >= b for a, b in pairwise(edges)):
            raise ValueError(f"buckets: got {list(buckets)}, wants rising numbers, the last one 1")
        self.telemetry = telemetry
        self._names, self._values = list(labels or {}), list((labels or {}).values())
        self._edges = edges

    def describe(self) -> list[Metric]:
        """The metrics without samples, so that registering waits for nothing."""
        return list(self._families().values())

    def collect(self) -> Iterator[Metric]:
        """The metrics as of now."""
        counters, families = self.telemetry.read(), self._families()
        below = list(accumulate(counters.histogram))
        buckets = [(str(edge / 1000), float(below[edge])) for edge in self._edges]
        families["meter"].add_metric(self._values, [*buckets, ("+Inf", float(counters.cells))], counters.meter_sum)
        for tau, count in counters.covered.items():
            families["covered"].add_metric([*self._values, str(tau)], count)
        families["non_finite"].add_metric(self._values, counters.non_finite)
        families["value_non_finite"].add_metric(self._values, counters.value_non_finite)
        if counters.worst is not None:
            layer, head = counters.worst
            families["worst"].add_metric([*self._values, str(layer), str(head)], counters.max_meter)
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
