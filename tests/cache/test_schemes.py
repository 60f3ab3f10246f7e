"""The black-box schemes against their reference, and schemes of one's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from witcert import WitCertCache, schemes
from witcert.schemes import Scheme, turboquant4
from witcert.schemes.numeric import e4m3, half_down
from witcert_ref import schemes as reference

from .models import Watch, generate, model, prompt

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

BLACK_BOX = [name for name in schemes.names() if isinstance(schemes.get(name), Scheme)]


def sample(shift: float, channels: int = 80) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(256, 2, channels, generator=generator) * torch.randn(1, 2, channels, generator=generator).exp()
    x = x + shift * torch.randn(1, 2, channels, generator=generator)
    x[3], x[5, 0], x[7, 1] = 0, x[5, 0] * 300, x[7, 1] * 1e-9
    return x


def test_names() -> None:
    assert set(BLACK_BOX) == set(reference.names())
    assert set(schemes.names()) - set(BLACK_BOX) == {"int8", "int8_dither"}


@pytest.mark.parametrize("name", [n for n in BLACK_BOX if n != "turboquant4"])
@pytest.mark.parametrize("shift", [0.0, 9.0])
def test_scheme_is_its_reference_to_the_bit(name: str, shift: float) -> None:
    x, scheme, twin = sample(shift), schemes.get(name), reference.get(name)
    for ours, theirs in ((scheme.quantize_keys, twin.keys), (scheme.quantize_values, twin.values)):
        wanted = theirs(x.double().numpy())
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        assert torch.equal(ours(x.double()), torch.from_numpy(np.array(wanted)))


def test_turboquant_has_the_codebook_of_its_reference_and_a_rotation() -> None:
    levels = turboquant4.lloyd_max(16)
    assert float((levels - torch.from_numpy(reference.lloyd_max(16))).abs().max()) < 1e-10
    turn = turboquant4.rotation(80)
    assert float((turn @ turn.T - torch.eye(80, dtype=torch.float64)).abs().max()) < 1e-12
    x = sample(0.0)
    error = (schemes.get("turboquant4").quantize_keys(x) - x).norm() / x.norm()
    assert 0.05 < float(error) < 0.15  # the distortion of 16 levels is 0.0095, its root 0.097


def test_e4m3_is_the_cast_of_torch() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()]
    wanted = every.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    assert torch.equal(e4m3(every.double()), wanted)


def test_half_down() -> None:
    x = torch.cat([torch.randn(1000, dtype=torch.float64).mul(10**e) for e in (-9, -3, 0, 4)] + [torch.zeros(1)])
    low = half_down(x)
    assert bool((low.double() <= x).all())
    step = torch.where(low < 0, -1, 1) * torch.where(low == 0, 1, 1)
    above = (low.view(torch.int16) + step.to(torch.int16)).view(torch.float16).double()
    assert bool((above > x)[low != 0].all())


@pytest.mark.parametrize("name", BLACK_BOX)
def test_groups_do_not_see_each_other(name: str) -> None:
    scheme, x = schemes.get(name), sample(1.0)
    group = scheme.token_group
    whole = scheme.quantize_keys(x), scheme.quantize_values(x)
    parts = x.split(group) if group > 1 else x.split(100)
    assert torch.equal(whole[0], torch.cat([scheme.quantize_keys(p) for p in parts]))
    assert torch.equal(whole[1], torch.cat([scheme.quantize_values(p) for p in parts]))
    assert whole[0].dtype == x.dtype


def test_nominal_bytes() -> None:
    wanted = {
        "fp8_raw": 256, "fp8_scaled": 260, "rtn8": 260, "rtn4": 132, "rtn2": 68, "sign1": 36, "turboquant4": 132,
        "kivi4": 64 + 16 + 64 + 16, "kivi2": 32 + 16 + 32 + 16, "kvquant4": 256 * (0.5 + 7 / 128),
    }  # fmt: skip
    assert {name: schemes.get(name).nominal_bytes(128, 128) for name in BLACK_BOX} == wanted


@pytest.mark.parametrize("name", BLACK_BOX)
def test_every_scheme_runs_and_is_metered(name: str) -> None:
    cache = WitCertCache(model("llama").config, name, backing=True)
    watch = Watch(cache)
    generate("llama", prompt(130, 6), cache, max_new_tokens=3)
    assert watch.cells == 2 * 2 * 4 * 2
    assert watch.violations == 0


def test_a_scheme_of_ones_own() -> None:
    def coarse(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 8).round() / 8, torch.full((), 1 / 8)

    mine = Scheme("coarse", coarse, coarse, bits=math.nan)
    cache = WitCertCache(model("llama").config, mine, backing=True)
    watch = Watch(cache)
    generate("llama", prompt(9), cache, max_new_tokens=3)
    assert (watch.cells, watch.violations) == (16, 0)
    assert cache.report().bytes_per_token == cache.report().bytes.per_token
    with pytest.raises(ValueError, match="the name 'int8', which is taken"):
        schemes.register(Scheme("int8", coarse, coarse, bits=3))
    with pytest.raises(TypeError, match="scheme: got function"):
        schemes.register(coarse)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token_group: got 0"):
        Scheme("none", coarse, coarse, bits=3, token_group=0)
    with pytest.raises(TypeError, match=r"token_group: got 1\.5"):
        Scheme("none", coarse, coarse, bits=3, token_group=1.5)  # type: ignore[arg-type]
    wrong = Scheme("wrong", lambda x: x[:1], coarse, bits=3)
    with pytest.raises(ValueError, match=r"scheme 'wrong': its quantiser returned \[1, 2, 80\]"):
        wrong.quantize_keys(sample(0.0))
