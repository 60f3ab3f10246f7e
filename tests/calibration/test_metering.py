"""Every scheme on synthetic tensors: bound against truth, the truth against the reference, the file and the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.calibration.tensors import captured
from witcert import metering, schemes
from witcert.calibration import Calibration, CalibrationMetadata, fit
from witcert.capture import Captured, CapturedLayer, traits
from witcert.metering import meter
from witcert_ref import attention, dither, equalizer, sketch
from witcert_ref.tv import softmax, total_variation

KINDS: list[dict[str, Any]] = [
    {},
    {"sinks": True, "logits_soft_cap": 3.0},
    {"windows": (20, -1), "sinks": True, "dtype": torch.bfloat16},
    {"d": 24, "d_v": 40, "heads": 6, "kv_heads": 1, "dtype": torch.float16, "rope_layout": "interleaved"},
    {"steps": 1, "tokens": 1},
    {"steps": 100, "tokens": 100},
]


def calibrated(capture: Captured, bypass: int = 1, sketch: int = 2, witness_bands: int = 0) -> Calibration:
    known = traits(capture) | {"weights": "0" * 64}
    metadata = CalibrationMetadata(
        model=known,  # type: ignore[arg-type]
        text_sha256="1" * 64,
        length=len(capture.layers[0].k),
        sketch=sketch,
        witness_bands=witness_bands,
        bypass=bypass,
    )
    return Calibration(fit(capture, bypass=bypass, directions=4), metadata)


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("scheme", schemes.names())
def test_meter_bounds_the_truth(scheme: str, kind: int) -> None:
    """Tolerance 0, every scheme, with and without a calibration; a cell for each (layer, head, row)."""
    capture = captured(**KINDS[kind])
    layer = capture.layers[0]
    for calibration in (None, calibrated(capture)):
        found = meter(capture, scheme, calibration)
        assert len(found.cells) == 2 * layer.q.shape[0] * layer.q.shape[1]
        assert len({(c.layer, c.head, c.step) for c in found.cells}) == len(found.cells)
        for cell in found.cells:
            assert cell.true_tv is not None
            assert cell.true_tv <= cell.meter <= min(1.0, cell.eform) + 1e-3
        assert found.summary().violations == 0
        dithered = scheme == "int8_dither"
        assert {c.guarantee for c in found.cells} == {"fixed_trajectory" if dithered else "any_query"}
        assert (found.meta.seed is not None) == (found.meta.delta is not None) == dithered


def reference_tv(capture: Captured, n: int, head: int, row: int, calibration: Calibration, seed: int | None) -> float:
    """The true TV of one cell of the packed store, from the reference's writer alone."""
    layer, meta, found = capture.layers[n], capture.metadata, calibration.layers[n]
    kv_head = head * layer.k.shape[1] // layer.q.shape[1]
    stop = len(layer.k) - len(layer.q) + 1 + row
    start = 0 if layer.window_left < 0 else max(0, stop - 1 - layer.window_left)
    k, q = layer.k[start:stop, kv_head].double().numpy(), layer.q[row, head].double().numpy()
    mu, f, u = (getattr(found, name)[kv_head].double().numpy() for name in ("mu", "f", "u"))
    off = found.bypass_mask[kv_head].numpy()
    x = equalizer.apply(k, mu, f).astype(np.float32).astype(np.float64)
    xi = np.zeros_like(x)
    if seed is not None:
        pages = np.arange(start, stop)[:, None] // 64
        xi = dither.dither(seed, n, kv_head, pages, np.arange(k.shape[1]))
    scale = dither.scale_of(x, k.shape[1], off, 127.0 if seed is None else 126.5)
    code = dither.quantize(x, scale, xi, off)
    stored = np.where(off, 0.0, dither.dequantize(code, scale, xi))
    residual = np.where(off, 0.0, stored - x)
    steps = dither.steps(scale, k.shape[1])
    z = np.where(off, 0.0, equalizer.fold(q, f))
    a = u @ z
    taken = sketch.correction(a, sketch.encode(residual, u, steps), u, steps)
    raw = meta.sm_scale * (stored @ z - taken + k[:, off] @ q[off] + q @ mu)
    y = attention.soft_cap(raw, meta.logits_soft_cap)
    exact = attention.logits(q, k, meta.sm_scale, logits_soft_cap=meta.logits_soft_cap)
    if layer.sinks is not None:
        sink = float(layer.sinks[head])
        exact, y = np.append(exact, sink), np.append(y, sink)
    return float(total_variation(softmax(exact), softmax(y)))


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("seed", [None, 2**63 + 5])
def test_true_tv_is_the_references(kind: int, seed: int | None) -> None:
    capture = captured(**KINDS[kind])
    calibration = calibrated(capture)
    found = meter(capture, "int8" if seed is None else "int8_dither", calibration, seed=seed)
    for cell in found.cells[::17]:
        wanted = reference_tv(capture, cell.layer, cell.head, cell.step, calibration, seed)
        assert cell.true_tv == pytest.approx(wanted, rel=1e-3, abs=1e-7)


def test_true_tv_of_a_black_box_scheme() -> None:
    """The reconstruction in the store's own 16 bits, an incomplete group of tokens exact."""
    capture = captured()
    layer, scheme = capture.layers[1], schemes.get("kivi2")
    assert isinstance(scheme, schemes.Scheme)
    whole = len(layer.k) // scheme.token_group * scheme.token_group
    k_hat = torch.cat([scheme.quantize_keys(layer.k[:whole]), layer.k[whole:]]).half().double().numpy()
    cells = [c for c in meter(capture, "kivi2").cells if c.layer == 1]
    for cell in cells[::7]:
        stop, q = len(layer.k) - 19 + cell.step, layer.q[cell.step, cell.head].double().numpy()
        exact, stored = (
            attention.logits(q, keys[:stop, cell.head // 2], capture.metadata.sm_scale)
            for keys in (layer.k.double().numpy(), k_hat)
        )
        assert cell.true_tv == pytest.approx(float(total_variation(softmax(exact), softmax(stored))), rel=1e-9)


def test_calibration_tightens_and_options_reach_the_store() -> None:
    capture = captured(tokens=300)
    calibration = calibrated(capture, bypass=0, sketch=1)
    plain, default = meter(capture), meter(capture, calibration=calibration)
    wide = meter(capture, calibration=calibration, sketch=4, witness_bands=4, group=8, page_size=16)
    assert default.meta.bytes_per_token == plain.meta.bytes_per_token + 1
    assert wide.meta.bytes_per_token == plain.meta.bytes_per_token + 4 + 4 + 2
    assert (wide.meta.sketch, wide.meta.witness_bands, wide.meta.group, wide.meta.page_size) == (4, 4, 8, 16)
    medians = [found.summary().meter_median for found in (plain, default, wide)]
    assert medians[0] > medians[1] > medians[2]  # type: ignore[operator]
    assert plain.meta.calibration is None
    assert default.meta.calibration == calibration.fingerprint


def test_witness_bands_are_the_calibrations() -> None:
    capture = captured()
    assert meter(capture, calibration=calibrated(capture, witness_bands=4)).meta.witness_bands == 4
    assert meter(capture, "fp8_raw", calibrated(capture, witness_bands=4)).meta.witness_bands == 8  # head_dim / 2


def test_seed_makes_a_dithered_run_repeatable() -> None:
    capture = captured()
    assert meter(capture, "int8_dither", seed=7) == meter(capture, "int8_dither", seed=7)
    assert meter(capture, "int8_dither").meta.seed != meter(capture, "int8_dither").meta.seed


def test_smaller_delta_is_a_larger_meter() -> None:
    capture = captured(d=64, tokens=300)
    first, second = (meter(capture, "int8_dither", seed=7, delta=delta).summary() for delta in (1e-2, 1e-12))
    assert first.meter_median < second.meter_median  # type: ignore[operator]


def poisoned(capture: Captured, name: str, index: tuple[int, ...], value: float) -> Captured:
    tensor = getattr(capture.layers[0], name).clone()
    tensor[index] = value
    return Captured([replace(capture.layers[0], **{name: tensor}), *capture.layers[1:]], capture.metadata)


@pytest.mark.parametrize("scheme", ["int8", "int8_dither", "rtn4", "kivi2"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_key_that_is_not_finite_is_not_covered(scheme: str, value: float) -> None:
    """Kv head 1 from token 140 on reads as meter 1; nothing else changes, but for the key's own group of tokens."""
    capture = captured()
    good = meter(capture, scheme, seed=3)
    found = meter(poisoned(capture, "k", (140, 1, 2), value), scheme, seed=3)
    assert found.summary().violations == 0
    bad = [c for c in found.cells if c.layer == 0 and c.head in (2, 3) and c.step >= 10]
    assert all(c.meter == 1.0 for c in bad)
    undefined = [c for c in found.cells if c.true_tv is None]
    assert all(c in bad for c in undefined)  # a logit of -Inf is a weight of 0, and a truth
    if value != value:
        assert len(undefined) == len(bad) == 20
    summary = found.summary(0.99)
    assert summary.not_finite == len(undefined)
    assert summary.coverage == sum(c.meter <= 0.99 for c in found.cells) / len(found.cells)
    for a, b in zip(good.cells, found.cells, strict=True):
        if a.layer or a.head < 2:
            assert a == b


def test_query_that_is_not_finite_is_not_covered() -> None:
    found = meter(poisoned(captured(), "q", (3, 1, 0), float("inf")))
    bad = [c for c in found.cells if c.true_tv is None]
    assert [(c.layer, c.head, c.step, c.meter) for c in bad] == [(0, 1, 3, 1.0)]


def test_json_is_what_the_interface_says(tmp_path: Path) -> None:
    found = meter(poisoned(captured(steps=2), "k", (0, 1, 2), float("nan")), "rtn8")
    found.write_json(tmp_path / "cells.json")
    read = json.loads((tmp_path / "cells.json").read_text())
    assert set(read) == {"meta", "cells"}
    assert len(read["cells"]) == 2 * 4 * 2
    for cell in read["cells"]:
        assert set(cell) == {"layer", "head", "step", "scheme", "meter", "eform", "true_tv", "guarantee"}
        assert cell["scheme"] == "rtn8"
    assert {c["true_tv"] for c in read["cells"] if c["layer"] == 0 and c["head"] > 1} == {None}
    assert metering.Metering.model_validate_json((tmp_path / "cells.json").read_text()) == found


def test_table_prints_every_count_even_zero() -> None:
    capture = captured()
    console = Console(width=200, record=True)
    console.print(metering.table([meter(capture).summary(0.3), meter(capture, "rtn2").summary(0.3)]))
    text = console.export_text()
    lines = [line.split() for line in text.splitlines() if "any_query" in line]
    assert [line[1] for line in lines] == ["int8", "rtn2"]
    assert all(line[3] == "160" for line in lines)
    assert "coverage τ=0.3" in text
    assert "meter < TV" in text
    assert all(line[13] == "0" and line[15] == "0" for line in lines)


def test_violations_are_counted_with_tolerance_zero() -> None:
    found = meter(captured())
    cell = found.cells[0]
    above = cell.model_copy(update={"true_tv": float(np.nextafter(cell.meter, 2.0))})
    changed = found.model_copy(update={"cells": [above, cell.model_copy(update={"true_tv": cell.meter})]})
    assert changed.summary().violations == 1


def test_summary_of_no_cells() -> None:
    nothing = meter(captured()).model_copy(update={"cells": []}).summary()
    assert (nothing.cells, nothing.violations, nothing.coverage, nothing.guarantee) == (0, 0, None, None)
    Console(quiet=True).print(metering.table([nothing]))


def test_progress_counts_layers() -> None:
    seen: list[tuple[str, int, int]] = []
    meter(captured(), progress=lambda *step: seen.append(step))
    assert seen == [("meter", 1, 2), ("meter", 2, 2)]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scheme": "int9"}, ValueError, "scheme: got 'int9'"),
        ({"scheme": 8}, TypeError, "scheme: got int"),
        ({"scheme": "rtn8", "group": 8}, ValueError, "group: got 8 for scheme 'rtn8'"),
        ({"group": 5}, ValueError, "group: got 5"),
        ({"page_size": 3}, ValueError, "page_size: got 3"),
        ({"sketch": 1}, ValueError, "layout.sketch: got 1"),
        ({"witness_bands": 9}, ValueError, "witness_bands: got 9"),
        ({"scheme": "int8_dither", "delta": 0.0}, ValueError, "budget.delta: got 0"),
        ({"scheme": "int8_dither", "seed": 2**64}, ValueError, "seed: got"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        meter(captured(), **change)


def test_another_models_calibration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"calibration\.head_dim: got 16, wants the model's 32"):
        meter(captured(d=32), calibration=calibrated(captured()))
    with pytest.raises(ValueError, match="tau: got 0"):
        meter(captured()).summary(0)


def test_layers_of_unlike_shapes() -> None:
    """Heads and head dims may differ between layers; each has its own store."""
    small, large = captured(layers=1), captured(layers=1, d=32, heads=8, d_v=16)
    layers = [*small.layers, CapturedLayer(*(getattr(large.layers[0], name) for name in ("q", "k", "v")))]
    found = meter(Captured(layers, small.metadata))
    assert len(found.cells) == 20 * (4 + 8)
    assert found.summary().violations == 0
