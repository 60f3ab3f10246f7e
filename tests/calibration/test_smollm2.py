"""What must hold on SmolLM2 at 2048 tokens: 64 decode rows in every layer and head, of text that no fit has seen."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

import pytest
import torch

from tests.calibration.tensors import captured as synthetic
from witcert import calibration
from witcert.calibration import Calibration, fit
from witcert.capture import Captured, capture
from witcert.metering import Metering, meter

pytestmark = pytest.mark.model

TOKENS, STEPS, TAU = 2048, 64, 0.2
CELLS = 30 * 9 * STEPS
TEXTS = ("prose", "source_code")


@pytest.fixture(scope="module")
def shipped_text() -> str:
    return (files("witcert") / "data" / "calibration.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def fitted_to(smollm2: Any, shipped_text: str) -> Captured:
    """The shipped text's tensors, all query rows."""
    model, tokenizer = smollm2
    return capture(model, torch.tensor(tokenizer(shipped_text)["input_ids"][:TOKENS]))


@pytest.fixture(scope="module")
def texts(smollm2: Any, prose: str, source_code: str) -> dict[str, Captured]:
    """The held-out texts' tensors."""
    model, tokenizer = smollm2
    ids = {name: tokenizer(text)["input_ids"] for name, text in zip(TEXTS, (prose, source_code), strict=True)}
    return {name: capture(model, torch.tensor(x[:TOKENS]), steps=STEPS) for name, x in ids.items()}


@pytest.fixture(scope="module")
def bypass_alone(fitted_to: Captured) -> Calibration:
    """Four bypass pairs and nothing else."""
    update = {"sketch": 0, "witness_bands": 0, "bypass": 4}
    metadata = calibration.default().metadata.model_copy(update=update)
    return Calibration(fit(fitted_to, bypass=4, directions=0, equalizer=False), metadata)


@pytest.fixture(scope="module")
def metered(texts: dict[str, Captured], bypass_alone: Calibration) -> Any:
    """Each (text, store) metered once."""
    stores: dict[str, tuple[str, Calibration | None]] = {
        "plain": ("int8", None),
        "default": ("int8", calibration.default()),
        "bypass": ("int8", bypass_alone),
        "dithered": ("int8_dither", bypass_alone),
    }

    @cache
    def of(text: str, store: str) -> Metering:
        scheme, fitted = stores[store]
        return meter(texts[text], scheme, fitted)

    return of


def coverage(found: Metering) -> float:
    value = found.summary(TAU).coverage
    assert value is not None
    return value


@pytest.mark.parametrize("text", TEXTS)
class TestHeldOutText:
    def test_default_covers(self, metered: Any, text: str) -> None:
        """1.000 to three digits, for any query, one byte more than plain int8."""
        default = metered(text, "default")
        assert (default.meta.sketch, default.meta.witness_bands, default.meta.bypass) == (1, 0, 0)
        assert {cell.guarantee for cell in default.cells} == {"any_query"}
        assert default.meta.bytes_per_token == metered(text, "plain").meta.bytes_per_token + 1 == 133
        assert round(coverage(default), 3) == 1.0
        assert coverage(metered(text, "plain")) < 0.85

    def test_default_is_nearer_the_truth_than_plain_int8(self, metered: Any, text: str) -> None:
        medians = [metered(text, store).summary().true_tv_median for store in ("default", "plain")]
        assert medians[0] <= 0.6 * medians[1]

    def test_bypass_alone_covers(self, metered: Any, text: str) -> None:
        found = metered(text, "bypass")
        assert (found.meta.sketch, found.meta.bypass) == (0, 4)
        assert round(coverage(found), 3) == 1.0
        assert {cell.guarantee for cell in found.cells} == {"any_query"}

    def test_dithered_with_bypass_covers(self, metered: Any, text: str) -> None:
        found = metered(text, "dithered")
        assert coverage(found) >= 0.999
        assert {cell.guarantee for cell in found.cells} == {"fixed_trajectory"}
        tighter = median(cell.meter for cell in metered(text, "bypass").cells)
        assert median(cell.meter for cell in found.cells) < tighter

    @pytest.mark.parametrize("store", ["plain", "default", "bypass", "dithered"])
    def test_every_cell_is_bounded(self, metered: Any, texts: dict[str, Captured], text: str, store: str) -> None:
        """meter ≥ true TV with tolerance 0, and ≤ min(1, eform) + the rounding allowance of interfaces section 7."""
        cells, allowed = metered(text, store).cells, allowance(texts[text])
        assert len(cells) == CELLS
        assert metered(text, store).summary().violations == 0
        for cell in cells:
            assert cell.true_tv is not None
            assert cell.true_tv <= cell.meter <= min(1.0, cell.eform) + allowed[cell.layer][cell.step][cell.head]


def allowance(texts: Captured) -> list[list[list[float]]]:
    """8 (d + 16) 2⁻²⁴ · sm_scale · Σ_j |q_j| max_t |k_tj| + 10⁻⁵ of each layer, row and head."""
    out = []
    for layer in texts.layers:
        d = layer.k.shape[-1]
        largest = layer.k.abs().amax(0).repeat_interleave(layer.q.shape[1] // layer.k.shape[1], 0)
        size = texts.metadata.sm_scale * (layer.q.abs() * largest).sum(-1)
        out.append((8 * (d + 16) * 2.0**-24 * size + 1e-5).tolist())
    return out


def test_the_shipped_calibration_is_the_fit_of_the_shipped_text(fitted_to: Captured, shipped_text: str) -> None:
    shipped = calibration.default()
    shipped.check(fitted_to)
    assert shipped.metadata.text_sha256 == hashlib.sha256(shipped_text.encode()).hexdigest()
    assert shipped.metadata.length == TOKENS
    for layer, again in zip(shipped.fitted, fit(fitted_to, directions=1), strict=True):
        torch.testing.assert_close(layer.mu, again.mu, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(layer.f, again.f, rtol=1e-3, atol=1e-3)
        assert ((layer.u[:, :1] * again.u).sum(-1).abs() > 0.999).all()


def test_the_shipped_calibration_is_the_default_models(smollm2: Any) -> None:
    shipped = calibration.default()
    assert calibration.default_for(smollm2[0]) is shipped
    assert calibration.default_for(synthetic()) is None
