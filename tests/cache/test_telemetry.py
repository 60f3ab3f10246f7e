"""Prometheus sees exactly the cells of the report."""

from __future__ import annotations

import copy
import math
import urllib.request

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from witcert import WitCertCache
from witcert.telemetry import BUCKETS, TelemetryCollector
from witcert_kernels import Telemetry

from .models import NO_GATE_LEFT, generate, model, prompt

LABELS = {"model": "llama"}


CONFIG = model("llama").config


def run(cache: WitCertCache, tokens: int = 5) -> None:
    generate("llama", prompt(20, 13), cache, max_new_tokens=tokens)


@pytest.mark.parametrize(("scheme", "tau"), [("int8", None), ("int8", NO_GATE_LEFT), ("rtn4", None)])
def test_a_scrape_has_the_cells_of_the_report(scheme: str, tau: float | None) -> None:
    """Over HTTP, as Prometheus does it; with a gate, the cells after repair."""
    telemetry, registry = Telemetry(taus=(0.02, 0.2)), CollectorRegistry()
    registry.register(TelemetryCollector(telemetry, LABELS))
    cache = WitCertCache(CONFIG, scheme, tau, telemetry=telemetry)
    run(cache)
    report = cache.report()
    assert report.complete and report.cells_seen > 0 and (report.repairs > 0) == (tau is not None)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert all(sample[1:] and ("model", "llama") in sample[1:] for sample in samples)
    meters = [cell.meter for cell in report.cells]
    model_label = ("model", "llama")
    for edge in BUCKETS:
        bucket = samples["witcert_meter_bucket", ("le", str(edge)), model_label]
        assert bucket == sum(meter <= edge for meter in meters)
    assert samples["witcert_meter_count", model_label] == len(meters)
    total = samples["witcert_meter_sum", model_label]
    assert math.fsum(meters) <= total <= math.fsum(meters) + len(meters) * 2.0**-24
    for covered in (0.02, 0.2):
        count = samples["witcert_covered_cells_total", model_label, ("tau", str(covered))]
        assert count == sum(meter <= covered for meter in meters)
    assert samples["witcert_non_finite_cells_total", model_label] == 0
    assert samples["witcert_value_non_finite_cells_total", model_label] == 0
    (worst,) = [(key, value) for key, value in samples.items() if key[0] == "witcert_worst_meter"]
    labels = dict(worst[0][1:])
    assert worst[1] == max(meters)
    assert any(
        (str(cell.layer), str(cell.head), cell.meter) == (labels["layer"], labels["head"], worst[1])
        for cell in report.cells
    )


def test_one_telemetry_counts_several_caches() -> None:
    telemetry = Telemetry()
    first, second = (WitCertCache(CONFIG, telemetry=telemetry) for _ in range(2))
    run(first)
    run(second)
    copied = copy.deepcopy(second)
    assert copied.telemetry is telemetry
    seen = first.report().cells_seen + second.report().cells_seen
    assert telemetry.read().cells == seen
    first.reset()
    assert telemetry.read().cells == seen


def test_registering_waits_for_nothing_and_an_empty_scrape_works() -> None:
    registry, telemetry = CollectorRegistry(), Telemetry()
    telemetry.buffer = telemetry.buffer.to("meta")
    registry.register(TelemetryCollector(telemetry, LABELS, buckets=(0.25, 1.0)))
    telemetry.buffer = Telemetry().buffer
    names = {sample.name for family in registry.collect() for sample in family.samples}
    assert "witcert_meter_count" in names and "witcert_worst_meter" not in names


def test_several_telemetries_under_labels_of_their_own() -> None:
    first, second, registry = Telemetry(), Telemetry(), CollectorRegistry()
    collector = TelemetryCollector(first, LABELS)
    collector.add(second, {"model": "other"})
    registry.register(collector)
    one = torch.ones(1, 1)
    first.add(one * 0.1, one, one, one, 0)
    second.add(one * 0.3, one, one, one, 1)
    second.add(one * 0.5, one, one, one, 2)
    text = generate_latest(registry).decode()
    counts = {
        sample.labels["model"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "witcert_meter_count"
    }
    assert counts == {"llama": 1, "other": 2}
    for labels in (LABELS, {}, {"name": "x"}):
        with pytest.raises(ValueError, match=r"^labels: got"):
            collector.add(Telemetry(), labels)


@pytest.mark.parametrize("labels", [{"le": "1"}, {"tau": "1"}, {"": "x"}, {"__x": "x"}, {"a-b": "x"}])
def test_labels_that_prometheus_would_refuse(labels: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"^labels: got the name"):
        TelemetryCollector(Telemetry(), labels)


@pytest.mark.parametrize("value", [0, None])
def test_label_values_are_strings(value: object) -> None:
    with pytest.raises(TypeError, match=r"^labels: got the value"):
        TelemetryCollector(Telemetry(), {"rank": value})  # type: ignore[dict-item]


def test_bad_arguments_are_named() -> None:
    for buckets in ((), (0.1,), (0.5, 0.1, 1.0), (0.00015, 1.0), (0.5, 2.0), (0.5, math.inf), (math.nan, 1.0)):
        with pytest.raises(ValueError, match=r"^buckets: got"):
            TelemetryCollector(Telemetry(), buckets=buckets)
    with pytest.raises(TypeError, match=r"^telemetry: got NoneType"):
        TelemetryCollector(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^telemetry: got str"):
        WitCertCache(CONFIG, telemetry="yes")  # type: ignore[arg-type]
    cache = WitCertCache(CONFIG, telemetry=Telemetry(device="meta"))
    with pytest.raises(ValueError, match=r"^telemetry: got device meta, wants cpu"):
        run(cache, 1)
    assert cache.get_seq_length() == 0
