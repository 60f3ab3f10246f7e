"""A calibration in a cache: what it decides, what may be changed, and that its bytes are the ones it wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from witcert import WitCertCache
from witcert.calibration import Calibration, CalibrationMetadata
from witcert.capture import ModelFingerprint
from witcert_kernels import StoreLayout

from .models import Watch, calibration, generate, model, prompt

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")


def fitted(**metadata: int) -> Calibration:
    about = CalibrationMetadata(
        model=ModelFingerprint.of(model("llama")), text_sha256="0" * 64, length=9, **({"bypass": 1} | metadata)
    )
    return Calibration(calibration(r=3), about)


def chosen_by(cache: WitCertCache) -> tuple[int, int, int]:
    """Sketch, witness bands and bypass of the store that a first request makes."""
    generate("llama", prompt(5), cache, max_new_tokens=2)
    store = cache.layers[1].store
    assert store is not None
    layout = store.pool.layout
    assert isinstance(layout, StoreLayout)
    return layout.sketch, layout.witness_bands, layout.bypass


def test_the_layout_is_what_was_chosen_with_the_calibration(tmp_path: Path) -> None:
    chosen = fitted(sketch=1, witness_bands=2)
    chosen.save(tmp_path / "file.safetensors")
    for given in (chosen, tmp_path / "file.safetensors", str(tmp_path / "file.safetensors")):
        cache = WitCertCache(model("llama").config, calibration=given)
        assert chosen_by(cache) == (1, 2, 1)
        assert cache.report().calibration == chosen.fingerprint


def test_every_stored_direction_may_be_used() -> None:
    cache = WitCertCache(model("llama").config, calibration=fitted(sketch=1), sketch=3, witness_bands=4, backing=True)
    watch = Watch(cache)
    assert chosen_by(cache) == (3, 4, 1)
    assert watch.violations == 0
    assert cache.report().calibration == fitted(sketch=3).fingerprint
    with pytest.raises(ValueError, match="sketch: got 4, wants at most the calibration's 3"):
        WitCertCache(model("llama").config, calibration=fitted(), sketch=4)


def test_layers_alone_use_all_they_have() -> None:
    cache = WitCertCache(model("llama").config, calibration=calibration(r=2))
    assert chosen_by(cache) == (2, 0, 1)


def test_an_observatory_takes_the_directions_and_keeps_its_own_bands() -> None:
    cache = WitCertCache(model("llama").config, "rtn4", calibration=fitted(sketch=2, witness_bands=1))
    generate("llama", prompt(5), cache, max_new_tokens=2)
    store = cache.layers[0].store
    assert store is not None
    assert (store.pool.layout.sketch, store.pool.layout.witness_bands) == (2, 8)


def test_another_models_calibration_is_refused_by_name() -> None:
    about = fitted().metadata
    other = about.model_copy(update={"model": about.model.model_copy(update={"head_dim": 32})})
    with pytest.raises(ValueError, match=r"calibration\.head_dim: got 32, wants the model's 16"):
        WitCertCache(model("llama").config, calibration=Calibration(calibration(r=3), other))


def test_a_calibration_tightens_and_never_decides_soundness() -> None:
    """A useless one (random means and factors) is as sound as a good one."""
    wild = [replace(layer, mu=layer.mu * 50, f=layer.f * 40) for layer in calibration(seed=9, r=2, bypass=0)]
    cache = WitCertCache(model("llama").config, calibration=wild, backing=True)
    watch = Watch(cache)
    generate("llama", prompt(30, 7), cache)
    assert watch.cells == 9 * 2 * 4 * 2
    assert watch.violations == 0
