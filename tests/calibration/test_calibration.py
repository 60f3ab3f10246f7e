"""The fit against the reference's, the choice, the file, and the whole of `calibrate` on a tiny model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from tests.cache.models import VOCAB, model
from tests.calibration.tensors import captured, with_outlier_pair
from witcert import calibration
from witcert.calibration import Calibration, CalibrationMetadata, calibrate, choose, fit
from witcert.capture import Captured, CapturedLayer, CaptureMetadata, ModelFingerprint, capture, read_safetensors
from witcert_kernels import LayerCalibration
from witcert_ref import equalizer, sketch

FINGERPRINT = ModelFingerprint(
    layers=2, heads=4, kv_heads=2, head_dim=16, head_dim_v=8, rope_layout="half", rotary_dim=None, dtype="float32",
    weights="0" * 64,
)  # fmt: skip


def made(bypass: int = 0, sketch: int = 1, **fields: Any) -> Calibration:
    """A calibration of the synthetic capture."""
    metadata = CalibrationMetadata(
        model=FINGERPRINT, text_sha256="1" * 64, length=150, sketch=sketch, bypass=bypass, **fields
    )
    return Calibration(fit(captured(), bypass=bypass, directions=4), metadata)


@pytest.mark.parametrize("rope", [("half", None), ("interleaved", None), ("half", 8), ("interleaved", 8)])
@pytest.mark.parametrize("bypass", [0, 3])
def test_fit_is_the_references(rope: tuple[Any, int | None], bypass: int) -> None:
    capture = captured(rope_layout=rope[0], rotary_dim=rope[1])
    for layer, found in zip(capture.layers, fit(capture, bypass=bypass, directions=5), strict=True):
        off = found.bypass_mask.numpy()
        assert off.sum(-1).tolist() == [2 * bypass] * 2
        mu, f = equalizer.fit(layer.k.numpy(), rope[0], exclude=off, rotary_dim=rope[1])
        rest = f[:, rope[1] or 16 :].reshape(2, -1, 2)  # channels that do not rotate are paired with their neighbours
        rest[:] = rest.max(-1, keepdims=True)
        np.testing.assert_allclose(found.mu, mu, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found.f, f, rtol=1e-6)
        for kv_head in range(2):
            queries = layer.q[:, 2 * kv_head : 2 * kv_head + 2].flatten(0, 1).numpy()
            u = sketch.fit(queries, 5, f[kv_head], off[kv_head])
            np.testing.assert_allclose(found.u[kv_head], u, atol=1e-5)


def test_any_prefix_of_the_directions_is_the_best_sketch_of_its_size() -> None:
    """No r orthonormal directions leave less of the queries' squared length than the first r (Eckart–Young)."""
    layer = captured().layers[0]
    found = fit(captured(), directions=16)[0]
    z = (layer.q.double().unflatten(1, (2, -1)) * found.f.double()[None, :, None]).transpose(0, 1).flatten(1, 2)
    values = torch.linalg.svdvals(z)
    for r in (1, 3, 16):
        u = found.u[:, :r].double()
        left = (z - z @ u.transpose(1, 2) @ u).square().sum((1, 2))
        torch.testing.assert_close(left, values[:, r:].square().sum(-1), rtol=1e-4, atol=1e-5)


def test_directions_are_orthonormal_where_the_queries_span_less() -> None:
    found = fit(captured(steps=1), bypass=2, directions=16)[0]
    assert found.u.shape[1] == 12
    gram = found.u.double() @ found.u.double().transpose(1, 2)
    torch.testing.assert_close(gram, torch.eye(12, dtype=torch.float64).expand(2, -1, -1), rtol=0, atol=1e-6)


def test_constant_channels_get_a_small_half_range() -> None:
    capture = captured()
    layers = []
    for layer in capture.layers:
        k = layer.k.clone()
        k[:, 0, [3, 11]] = 2.5
        k[:, 1] = -1.0
        layers.append(CapturedLayer(layer.q, k, layer.v))
    for found in fit(Captured(layers, capture.metadata)):
        largest = found.f[0].max()
        assert 0 < found.f[0, 3] == found.f[0, 11] < largest / 1000
        assert (found.f[1] == 1).all()
        assert (found.mu[0, [3, 11]] == 2.5).all()
        assert (found.mu[1] == -1).all()


def test_without_an_equaliser_only_bypass_and_directions_are_fitted() -> None:
    for found in fit(captured(), bypass=2, equalizer=False):
        assert (found.mu == 0).all()
        assert (found.f == 1).all()
        assert found.bypass.shape == (2, 2)


@pytest.mark.parametrize("rope", [("half", None), ("interleaved", 8)])
def test_the_pair_that_sets_the_scale_is_bypassed_first(rope: tuple[str, int | None]) -> None:
    capture = with_outlier_pair(captured(rope_layout=rope[0], rotary_dim=rope[1]), pair=6)
    for found in fit(capture, bypass=2, equalizer=False):
        assert (found.bypass[:, 0] == 6).all()


def test_bypass_pairs_are_the_greedy_minimum_of_the_mean_bound() -> None:
    """Against the definition, evaluated for every pair."""
    capture = captured()
    for layer, found in zip(capture.layers, fit(capture, bypass=3, equalizer=False), strict=True):
        for kv_head in range(2):
            k = layer.k[:, kv_head].double().unflatten(-1, (2, 8)).abs().amax(1)  # pairs (j, j + 8)
            q = layer.q[:, 2 * kv_head : 2 * kv_head + 2].double().flatten(0, 1).unflatten(-1, (2, 8)).abs().sum(1)
            kept = list(range(8))
            for pair in found.bypass[kv_head].tolist():
                rest = [[j for j in kept if j != p] for p in kept]
                bound = [float(k[:, r].amax(-1).mean() * q[:, r].sum(-1).mean()) for r in rest]
                assert pair == kept[int(np.argmin(bound))]
                kept.remove(pair)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bypass": 8}, ValueError, "bypass: got 8"),
        ({"bypass": -1}, ValueError, "bypass: got -1"),
        ({"bypass": 1.5}, TypeError, r"bypass: got 1\.5"),
        ({"directions": -1}, ValueError, "directions: got -1"),
        ({"directions": 1.5}, TypeError, r"directions: got 1\.5"),
    ],
)
def test_fit_arguments_are_named(change: dict[str, float], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fit(captured(), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["q", "k"])
def test_fit_refuses_what_is_not_finite(name: str) -> None:
    capture = captured()
    tensor = getattr(capture.layers[1], name).clone()
    tensor[3, 1, 2] = float("nan")
    bad = replace(capture.layers[1], **{name: tensor}, name="layers.1")
    with pytest.raises(ValueError, match=rf"layers\.1\.{name}: got a value that is not finite"):
        fit(Captured([capture.layers[0], bad], capture.metadata))


@pytest.mark.parametrize("bypass", [0, 2])
def test_file_round_trip(bypass: int, tmp_path: Path) -> None:
    this = made(bypass, sketch=2, witness_bands=4)
    this.save(tmp_path / "c.safetensors")
    back = Calibration.load(tmp_path / "c.safetensors")
    assert back.metadata == this.metadata
    assert back.fingerprint == this.fingerprint
    assert [layer.fingerprint for layer in back.fitted] == [layer.fingerprint for layer in this.fitted]
    assert set(load_file(tmp_path / "c.safetensors")) == {
        f"layers.{n}.{name}" for n in range(2) for name in ("mu", "f", "u", "bypass")
    }


def test_layers_have_the_chosen_directions_and_others_on_demand() -> None:
    this = made(sketch=1)
    assert [layer.u.shape[1] for layer in this.layers] == [1, 1]
    wider = this.with_sketch(3)
    assert [layer.u.shape[1] for layer in wider.layers] == [3, 3]
    assert torch.equal(wider.layers[0].u[:, :1], this.layers[0].u)
    assert wider.fingerprint != this.fingerprint
    with pytest.raises(ValueError, match="sketch: got 5"):
        this.with_sketch(5)
    with pytest.raises(TypeError, match=r"sketch: got 1\.5"):
        this.with_sketch(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 3), ("heads", 8), ("kv_heads", 4), ("head_dim", 32), ("head_dim_v", 16),
        ("rope_layout", "interleaved"), ("rotary_dim", 8), ("dtype", "bfloat16"), ("weights", "f" * 64),
    ],
)  # fmt: skip
def test_another_model_is_refused_by_the_field_that_differs(field: str, value: object) -> None:
    this = made()
    this.check(FINGERPRINT)
    with pytest.raises(ValueError, match=f"calibration.{field}: got .*, wants the model's {value}"):
        this.check(FINGERPRINT.model_copy(update={field: value}))


def test_check_compares_what_it_is_told() -> None:
    this = made()
    this.check(captured())
    with pytest.raises(ValueError, match=r"calibration\.dtype"):
        this.check(captured(dtype=torch.float16))
    with pytest.raises(ValueError, match=r"calibration\.rope_layout"):
        this.check(captured(rope_layout="interleaved"))
    llama = model("llama")
    for other in (llama, llama.config):
        with pytest.raises(ValueError, match=r"calibration\.head_dim_v: got 8, wants the model's 16"):
            this.check(other)


def test_the_shipped_calibration_is_for_its_own_model_only() -> None:
    assert calibration.default_for(FINGERPRINT) is None
    assert calibration.default_for(captured()) is None
    shipped = calibration.default()
    assert calibration.default_for(shipped.metadata.model) is shipped


@pytest.mark.parametrize(
    ("tensors", "metadata", "error", "message"),
    [
        ({}, {"format_version": None}, ValueError, "format_version: got none"),
        ({}, {"format_version": "2"}, ValueError, "format_version: got 2"),
        ({}, {"model": None}, ValueError, "model"),
        ({}, {"model": "{}"}, ValueError, "layers"),
        ({}, {"text_sha256": None}, ValueError, "text_sha256"),
        ({}, {"length": "0"}, ValueError, "length"),
        ({}, {"sketch": "9"}, ValueError, "sketch: got 9"),
        ({}, {"bypass": "1"}, ValueError, "bypass: got 1"),
        ({}, {"colour": "blue"}, ValueError, "colour"),
        ({"layers.1.u": None}, {}, ValueError, r"layers\.1\.u: got no such tensor"),
        (
            {f"layers.1.{name}": None for name in ("mu", "f", "u", "bypass")},
            {},
            ValueError,
            "calibration: got 1 layers",
        ),
        ({"layers.0.f": torch.zeros(2, 16)}, {}, ValueError, r"calibration\.f: got 0"),
        ({"layers.0.f": torch.arange(1.0, 33).view(2, 16)}, {}, ValueError, r"calibration\.f: got different values"),
        ({"layers.0.mu": torch.full((2, 16), float("nan"))}, {}, ValueError, r"calibration\.mu: got a value"),
        ({"layers.0.u": torch.zeros(2, 4, 8)}, {}, ValueError, r"calibration\.u: got shape"),
        ({"layers.0.mu": torch.zeros(2, 16, dtype=torch.float64)}, {}, TypeError, r"calibration\.mu: got dtype"),
    ],
)
def test_bad_file_is_refused_by_name(
    tensors: dict[str, torch.Tensor | None],
    metadata: dict[str, str | None],
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    made().save(tmp_path / "good.safetensors")
    fields, good = read_safetensors(tmp_path / "good.safetensors")
    save_file(
        {name: tensor for name, tensor in (good | tensors).items() if tensor is not None},
        tmp_path / "bad.safetensors",
        metadata={name: value for name, value in (fields | metadata).items() if value is not None},
    )
    with pytest.raises(error, match=message):
        Calibration.load(tmp_path / "bad.safetensors")


def fits(capture: Captured, bypasses: tuple[int, ...] = (0, 1, 2)) -> dict[int, list[LayerCalibration]]:
    return {m: fit(capture, bypass=m) for m in bypasses}


def test_the_choice_is_the_fewest_bytes_that_reach_the_target() -> None:
    capture = captured(tokens=300, steps=64)
    fitted = fits(capture, (0, 1))
    median = choose(fitted, capture).candidates[0].meter_median
    for tau in (2.0, median / 2):
        found = choose(fitted, capture, tau=tau, target=0.9)
        assert found.reached
        assert found.chosen.coverage >= 0.9
        assert found.chosen.cells == 2 * 4 * 64
        assert [c.extra_bytes for c in found.candidates] == sorted(c.extra_bytes for c in found.candidates)
        assert all(c.coverage < 0.9 for c in found.candidates if c.extra_bytes < found.chosen.extra_bytes)
    assert found.chosen.extra_bytes > 0


def test_candidates_that_no_head_has_room_for_are_not_tried() -> None:
    capture = captured(d=4, tokens=40)
    found = choose(fits(capture, (0, 1)), capture)
    assert {(c.sketch, c.witness_bands, c.bypass) for c in found.candidates} == {
        (r, b, m) for m, sizes in ((0, (0, 1, 2, 4)), (1, (0, 1, 2))) for r in sizes for b in (0, 1)
    }


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 8), (torch.bfloat16, 4)])
def test_extra_bytes_are_those_of_the_layout(dtype: torch.dtype, size: int) -> None:
    capture = captured(dtype=dtype)
    for c in choose(fits(capture), capture).candidates:
        assert c.extra_bytes == c.sketch + c.witness_bands + size * c.bypass


def test_a_target_out_of_reach_is_said() -> None:
    capture = captured(tokens=300, steps=64)
    found = choose(fits(capture, (0,)), capture, tau=1e-6)
    assert not found.reached
    assert found.chosen.coverage == max(c.coverage for c in found.candidates)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"tau": 0.0}, "tau: got 0"), ({"target": 1.5}, "target: got 1.5"), ({"target": 0}, "target")],
)
def test_choice_arguments_are_named(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(fits(captured(), (0,)), captured(), **change)  # type: ignore[arg-type]


class Letters:
    """A tokenizer: one token a letter, behind a token for the beginning."""

    bos_token_id = 1

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, *(2 + ord(letter) % (VOCAB - 2) for letter in text)]}


TEXT = "".join(chr(97 + (i * i + i // 3) % 26) for i in range(130))


@pytest.mark.parametrize(("length", "held_out"), [(60, True), (66, True), (67, False)])
def test_calibrate(length: int, held_out: bool) -> None:
    """Fitted to the first tokens; chosen on the next ones, or on the same where there are too few."""
    stages = []
    this = model("llama")
    found, trade_off = calibrate(
        this,
        Letters(),
        TEXT,
        length=length,
        progress=lambda *step: stages.append(step),  # type: ignore[arg-type]
    )
    found.check(this)
    meta = found.metadata
    assert trade_off.held_out == held_out
    chosen = trade_off.chosen
    assert (meta.sketch, meta.witness_bands, meta.bypass) == (chosen.sketch, chosen.witness_bands, chosen.bypass)
    assert meta.length == length
    ids = torch.tensor(Letters()(TEXT)["input_ids"][:length])
    wanted = fit(capture(this, ids), bypass=meta.bypass)
    assert [layer.fingerprint for layer in found.fitted] == [layer.fingerprint for layer in wanted]
    assert [name for name, done, of in stages if done == of] == ["capture", "fit", *["capture"] * held_out, "choose"]


def test_calibrate_holds_out_the_rows_it_chooses_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def record(model: Any, ids: torch.Tensor, **options: Any) -> Captured:
        seen.append(ids)
        return capture(model, ids, **options)

    monkeypatch.setattr(calibration, "capture", record)
    calibrate(model("llama"), Letters(), TEXT, length=60)  # type: ignore[arg-type]
    ids = Letters()(TEXT)["input_ids"]
    assert [x.tolist() for x in seen] == [ids[:60], [1, *ids[60:119]]]


def test_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="text: got 131 tokens, wants at least length, 132"):
        calibrate(model("llama"), Letters(), TEXT, length=132)  # type: ignore[arg-type]


def test_the_table_shows_the_choice_and_what_is_not_dominated() -> None:
    capture = captured()
    found = choose(fits(capture), capture)
    front = found.frontier()
    assert found.chosen in front
    for c in front:
        if c != found.chosen:
            others = [o for o in found.candidates if o != c and o.extra_bytes < c.extra_bytes]
            assert not any(o.coverage >= c.coverage and o.meter_median <= c.meter_median for o in others)
    console = Console(width=120, record=True, quiet=False)
    console.print(calibration.table(found))
    text = console.export_text()
    assert "extra bytes" in text
    assert f"{found.chosen.coverage:.4f}" in text


def test_a_captured_model_is_the_calibrations(tmp_path: Path) -> None:
    """The fingerprint in a capture is enough to refuse another model's calibration."""
    this = made()
    meta = CaptureMetadata(sm_scale=0.25, fingerprint=FINGERPRINT.model_copy(update={"weights": "a" * 64}))
    with pytest.raises(ValueError, match=r"calibration\.weights"):
        this.check(Captured(captured().layers, meta))
