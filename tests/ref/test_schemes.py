"""The black-box quantisers."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from witcert_ref import schemes

SHIPPED = ["fp8_raw", "fp8_scaled", "rtn8", "rtn4", "rtn2", "sign1", "kivi4", "kivi2", "kvquant4", "turboquant4"]
STEPPED = ["rtn8", "rtn4", "rtn2", "kivi4", "kivi2", "kvquant4"]
WIDENED = 1 + 2.0**-12


def keys(tokens: int = 290, d: int = 80) -> NDArray[np.float64]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(tokens, 2, d)) * rng.exponential(size=d) + rng.normal(size=d)
    x[5, 1, 3] = 60.0
    return x.astype(np.float32).astype(np.float64)


def run(
    name: str, x: NDArray[np.float64], side: str = "keys"
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    out = getattr(schemes.get(name), side)(x)
    return out if isinstance(out, tuple) else (out, None)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", SHIPPED)
def test_a_scheme_returns_keys_of_the_same_shape_and_keeps_its_input(name: str, side: str) -> None:
    x = keys()
    before = x.copy()
    x_hat, steps = run(name, x, side)
    np.testing.assert_array_equal(x, before)
    assert x_hat.shape == x.shape and x_hat.dtype == np.float64 and np.isfinite(x_hat).all()
    assert (steps is not None) == (name in STEPPED)
    if steps is not None:
        error, step = np.abs(x_hat - x), np.broadcast_to(steps, x.shape)
        assert (error <= step / 2 * WIDENED).all()
        assert (error >= 0.49 * step).any(where=step > 0)
    again, _ = run(name, x.astype(np.float32), side)
    np.testing.assert_array_equal(again, x_hat)
    assert np.isfinite(run(name, np.zeros((40, 1, 4)), side)[0]).all()


def test_more_bits_err_less() -> None:
    x = np.random.default_rng(0).normal(size=(256, 2, 128))
    error = {name: np.linalg.norm(run(name, x)[0] - x) / np.linalg.norm(x) for name in SHIPPED}
    assert error["rtn8"] < error["rtn4"] < error["rtn2"] and error["kivi4"] < error["kivi2"]
    assert error["rtn8"] < 0.01 < error["fp8_scaled"] < 0.05 < error["kivi4"] < 0.1
    assert error["turboquant4"] == pytest.approx(np.sqrt(0.00950), rel=0.05)  # Lloyd-Max, 16 levels, normal source
    assert error["sign1"] == pytest.approx(np.sqrt(1 - 2 / np.pi), rel=0.02)


def test_e4m3_is_the_cast_of_torch() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    inside = every[every.abs() <= 448]
    extra = torch.randn(10_000, dtype=torch.float32) * 10.0 ** torch.randint(-4, 2, (10_000,))
    for values in (inside.float(), extra.clamp(-448, 448)):
        cast = values.to(torch.float8_e4m3fn).float().numpy().astype(np.float64)
        np.testing.assert_array_equal(schemes.e4m3(values.numpy()), cast)
    assert schemes.e4m3([1e6, -449.0, np.inf, 460.0, 2.0**-10, 3 * 2.0**-10]).tolist() == [
        448,
        -448,
        448,
        448,
        0,
        2 * 2.0**-9,
    ]


def test_the_raw_cast_saturates_and_the_scaled_one_does_not() -> None:
    x = np.array([[[1000.0, 1.0]]])
    assert run("fp8_raw", x)[0][0, 0].tolist() == [448, 1]
    assert run("fp8_scaled", x)[0][0, 0, 0] == pytest.approx(1000, rel=1e-3)


def test_round_to_nearest_uses_one_rounded_up_scale_a_token_and_head() -> None:
    x = keys()
    for name, levels in (("rtn8", 127), ("rtn4", 7), ("rtn2", 1)):
        x_hat, steps = run(name, x)
        assert steps is not None and steps.shape == (290, 2, 1)
        assert (steps == steps.astype(np.float16)).all()
        assert (steps * levels >= np.abs(x).max(-1, keepdims=True)).all()
        codes = x_hat / steps
        assert (np.abs(codes - np.rint(codes)) < 1e-12).all() and np.abs(codes).max() == levels


@pytest.mark.parametrize(("name", "group", "levels"), [("kivi2", 32, 4), ("kivi4", 32, 16), ("kvquant4", 128, 17)])
def test_keys_are_grouped_by_channel_and_a_short_group_is_exact(name: str, group: int, levels: int) -> None:
    x = keys(2 * group + 5)
    x_hat, steps = run(name, x)
    assert steps is not None
    np.testing.assert_array_equal(x_hat[2 * group :], x[2 * group :])
    assert (steps[2 * group :] == 0).all()
    for channel in (0, 7):
        assert len(np.unique(x_hat[:group, 1, channel])) <= levels
    np.testing.assert_array_equal(run(name, x[: group + 3])[0][:group], x_hat[:group])


def test_kivi_values_are_grouped_by_token() -> None:
    x = keys()
    x_hat, _ = run("kivi2", x, "values")
    for group in (slice(0, 32), slice(64, 80)):
        assert all(len(np.unique(row)) <= 4 for row in x_hat[..., group].reshape(2 * len(x), -1))
    np.testing.assert_array_equal(run("kivi2", x[1:2], "values")[0], x_hat[1:2])


def test_kvquant_keeps_outliers_exact() -> None:
    x = keys(128)
    x_hat, steps = run("kvquant4", x)
    assert steps is not None
    assert x_hat[5, 1, 3] == 60 and steps[5, 1, 3] == 0
    assert (steps == 0).mean() == 1 / 128
    assert np.abs(x_hat - x)[:, 1, 3].max() < 0.5


def test_the_codebook_is_lloyd_max() -> None:
    two, levels = schemes.lloyd_max(2), schemes.lloyd_max(16)
    np.testing.assert_allclose(two, [-np.sqrt(2 / np.pi), np.sqrt(2 / np.pi)], rtol=1e-10)
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-9)
    np.testing.assert_allclose(levels[8:], [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], atol=6e-4)


def test_schemes_are_registered_by_name() -> None:
    assert schemes.names()[: len(SHIPPED)] == SHIPPED
    try:
        added = schemes.register("halved", lambda x: x / 2)
        assert schemes.get("halved") is added and added.values is added.keys
        with pytest.raises(ValueError, match=r"^name: got 'halved', which is registered"):
            schemes.register("halved", lambda x: x)
    finally:
        schemes._SCHEMES.pop("halved")
    with pytest.raises(ValueError, match=r"^name: got 'halved', want one of fp8_raw, "):
        schemes.get("halved")


@pytest.mark.parametrize("name", SHIPPED)
def test_bad_input_is_refused(name: str) -> None:
    for bad in (np.zeros((3, 4)), np.full((40, 1, 4), np.nan)):
        with pytest.raises(ValueError, match=r"^x: got"):
            schemes.get(name).keys(bad)
    if name.startswith("rtn"):
        with pytest.raises(ValueError, match=r"^x: got a magnitude"):
            schemes.get(name).keys(np.full((1, 1, 4), 1e9))
