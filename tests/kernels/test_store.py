"""The writer: exact rationals against what was stored, purity, the byte account, bad input."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from witcert_kernels import (
    ExactPages,
    LayerCalibration,
    ObservatoryLayout,
    ObservatoryPool,
    PackedPool,
    StoreLayout,
    certified_decode,
    observe_,
    quantize_,
)
from witcert_kernels.philox import dither

from .oracle import make_case, random_calibration

DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128), (576, 512)]


@pytest.fixture(autouse=True, params=["", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, and with torch's own ops."""
    monkeypatch.setenv("WITCERT_BACKEND", request.param)


def rational(x: torch.Tensor) -> list[Fraction]:
    return [Fraction(v) for v in x.double().tolist()]


@pytest.mark.parametrize("dithered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_key_is_within_half_a_step(dithered: bool, dtype: torch.dtype) -> None:
    """Every bound that the read takes from the bytes, in exact rationals."""
    layout = StoreLayout(
        1,
        32,
        32,
        dtype=dtype,
        group=16,
        sketch=2,
        witness_bands=4,
        bypass=1,
        dither=dithered,
        page_size=4,
        dither_period=8,
    )
    case = make_case(1, layout, [30], heads=1)
    pool, cal = case.pool, case.pool.calibration
    mask, band = cal.bypass_mask[0], layout.band_of_channel
    mu, f = rational(cal.mu[0]), rational(cal.f[0])
    for t in range(30):
        page, offset = int(case.page_table[0, t // 4]), t % 4
        steps = rational(pool.k_scale[page, offset, 0].repeat_interleave(16))
        codes = rational(pool.k_codes[page, offset, 0])
        if dithered:
            xi = rational(dither(pool.seed, 5, 1, torch.tensor([t // 8]), 32)[0, 0])
            codes = [c - e for c, e in zip(codes, xi, strict=True)]
        k = rational(case.keys[0][t, 0])
        error = []
        for j in range(32):
            if mask[j]:
                kept = cal.bypass_channels[0].tolist().index(j)
                assert Fraction(float(pool.bypass[page, offset, 0, kept])) == k[j]
                error.append(Fraction(0))
                continue
            error.append(steps[j] * codes[j] - (k[j] - mu[j]) / f[j])
            assert abs(error[j]) <= steps[j] / 2 * (1 + Fraction(1, 2**12))
            assert abs(int(pool.k_codes[page, offset, 0, j])) <= 127
        for i in range(2):
            u = rational(cal.u[0, i])
            unit = sum((abs(w) * s for w, s in zip(u, steps, strict=True)), Fraction(0)) / 254
            wanted = sum((w * e for w, e in zip(u, error, strict=True)), Fraction(0))
            got = int(pool.sketch[page, offset, 0, i]) * unit
            assert abs(wanted - got) <= unit / 2 * (1 + Fraction(1, 32))
        for b in range(4):
            inside = [j for j in range(32) if band[j] == b]
            norm = sum((error[j] ** 2 for j in inside), Fraction(0))
            unit_square = sum((steps[j] ** 2 for j in inside), Fraction(0)) / 508**2
            assert norm <= int(pool.witness[page, offset, 0, b]) ** 2 * unit_square


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_pages_norm_covers_every_value_that_its_codes_may_stand_for(dtype: torch.dtype) -> None:
    """Half a step away in each channel, in exact rationals."""
    layout = StoreLayout(2, 32, 32, dtype=dtype, group=16, page_size=4)
    case = make_case(2, layout, [10], heads=2)
    pool = case.pool
    for t in range(10):
        page, offset = int(case.page_table[0, t // 4]), t % 4
        for h in range(2):
            steps = rational(pool.v_scale[page, offset, h].repeat_interleave(16))
            codes = rational(pool.v_codes[page, offset, h])
            furthest = sum(((abs(c) + Fraction(1, 2)) * s) ** 2 for c, s in zip(codes, steps, strict=True))
            assert Fraction(float(pool.v_norm[page, h])) ** 2 >= furthest


def test_scale_is_the_smallest_that_covers() -> None:
    layout = StoreLayout(1, 64, 64, page_size=1)
    pool = PackedPool(layout, 400)
    g = torch.Generator().manual_seed(0)
    k = torch.randn(400, 1, 64, generator=g) * torch.logspace(-9, 4, 400)[:, None, None]
    quantize_(k, k, pool, torch.arange(400))
    scale = pool.k_scale[:, 0, 0, 0]
    amax = k.abs().amax((1, 2)).double()
    assert bool((scale.double() * 127 >= amax).all())
    below = (scale.view(torch.int16) - 1).view(torch.float16)
    assert bool(((below.double() * 127 < amax) | (scale == 2.0**-24)).all())


def test_zero_and_tiny_and_huge_keys() -> None:
    pool = PackedPool(StoreLayout(1, 64, 64, page_size=1), 4)
    k = torch.zeros(4, 1, 64)
    k[1, 0, 0], k[2, 0, 0], k[3, 0, 0] = 1e-30, 3e38, 65504 * 127.0
    quantize_(k, k, pool, torch.arange(4))
    scale = pool.k_scale[:, 0, 0, 0]
    assert scale.tolist() == [2.0**-24, 2.0**-24, float("inf"), 65504.0]
    assert bool((pool.k_codes[2] == 0).all()) and int(pool.k_codes[3, 0, 0, 0]) == 127


@pytest.mark.parametrize("dithered", [False, True])
def test_bytes_depend_on_the_key_alone(dithered: bool) -> None:
    layout = StoreLayout(
        2, 64, 64, group=32, sketch=2, witness_bands=4, bypass=2, page_size=8, dither=dithered, dither_period=4
    )
    g = torch.Generator().manual_seed(3)
    calibration = random_calibration(g, 2, 64, 2, 2)
    k, v = torch.randn(50, 2, 64, generator=g) * 3, torch.randn(50, 2, 64, generator=g)
    position = torch.arange(50)

    def write(order: torch.Tensor, chunks: list[int]) -> dict[str, torch.Tensor]:
        pool = PackedPool(layout, 10, layer=1, calibration=calibration, seed=77)
        slots = order[position // 8] * 8 + position % 8
        for part in torch.arange(50).split(chunks):
            quantize_(k[part], v[part], pool, slots[part], position[part])
        token = {n: getattr(pool, n)[order[position // 8], position % 8] for n in pool.page_tensors if n != "v_norm"}
        return token | {"v_norm": pool.v_norm[order[:7]]}

    once = write(torch.arange(10), [50])
    for order, chunks in (
        (torch.randperm(10, generator=g), [50]),
        (torch.arange(10), [1] * 50),
        (torch.arange(10), [13, 30, 7]),
    ):
        again = write(order, chunks)
        assert all(torch.equal(once[n], again[n]) for n in once)


def test_what_is_made_in_inference_mode_is_written_outside() -> None:
    layout = StoreLayout(2, 8, 8, page_size=4, witness_bands=1)
    with torch.inference_mode():
        pools = PackedPool(layout, 1), ObservatoryPool(ObservatoryLayout(2, 8, 8, page_size=4, witness_bands=2), 1)
        exact = ExactPages(layout, 1)
        for pool in pools:
            pool.take_pages(torch.tensor([0]), 2)
    k, slots = torch.ones(3, 2, 8), torch.arange(3)
    quantize_(k, k, pools[0], slots)
    observe_(k, k, k, k, pools[1], slots)
    exact.k[0, :3], exact.v[0, :3] = k[:, 0], k[:, 0]
    assert bool((pools[0].v_norm[0] > 0).all()) and torch.equal(pools[1].k_hat[0, :3], k)


@pytest.mark.parametrize("kind", ["packed", "observatory"])
def test_a_slot_that_was_never_written_certifies_nothing(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(16, 2, 64, generator=g) for _ in range(3))
    pool: PackedPool | ObservatoryPool
    if kind == "packed":
        pool = PackedPool(StoreLayout(2, 64, 64, page_size=16), 2)
        quantize_(k, v, pool, torch.arange(16) + 16)
    else:
        pool = ObservatoryPool(ObservatoryLayout(2, 64, 64, page_size=16), 2)
        observe_(k, v, k, v, pool, torch.arange(16) + 16)
    pool.take_pages(torch.tensor([0, 1]), 3)

    def read(pages: list[int], length: int) -> tuple[float, float]:
        table, lengths = torch.tensor([pages], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        cert = certified_decode(q[:1], pool, table, lengths)[2]
        return float(cert.meter.min()), float(cert.value_error.min())

    assert max(read([1], 16)) < 1
    for pages, length in (([0], 16), ([1, 0], 17), ([1, 2], 32)):
        assert read(pages, length) == (1.0, float("inf"))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_allocated_bytes_are_the_account(dims: tuple[int, int], dtype: torch.dtype) -> None:
    d, dv = dims
    for options in ({}, {"group": 16}, {"sketch": 4, "witness_bands": 2, "bypass": 2}):
        layout = StoreLayout(2, d, dv, dtype=dtype, page_size=16, **options)
        calibration = random_calibration(torch.Generator(), 2, d, layout.sketch, layout.bypass)
        pool = PackedPool(layout, 3, calibration=calibration)
        groups, groups_v = (1, 1) if layout.group is None else (d // 16, dv // 16)
        key = d + 2 * groups + layout.sketch + layout.witness_bands + 2 * layout.bypass * dtype.itemsize
        assert pool.nbytes == 3 * 2 * (16 * (key + dv + 2 * groups_v) + 4) == 3 * layout.bytes_per_page
    observatory = ObservatoryLayout(2, d, dv, dtype=dtype, page_size=16, witness_bands=8, sketch=3)
    calibration = random_calibration(torch.Generator(), 2, d, 3, 0)
    assert ObservatoryPool(observatory, 3, calibration=calibration).nbytes == 3 * observatory.bytes_per_page


def test_paper_account() -> None:
    """Design section 5 at d = 128, bytes of a key and value in one kv head."""
    f16 = torch.float16
    assert StoreLayout(1, 128, 128, f16).bytes_per_token == 130 + 130
    assert StoreLayout(1, 128, 128, f16, sketch=4, witness_bands=1).bytes_per_token == 135 + 130
    assert StoreLayout(1, 128, 128, f16, group=32).bytes_per_token == 136 + 136
    assert StoreLayout(1, 128, 128, f16, group=32, bypass=4).bytes_per_token == 152 + 136


def test_bad_input_is_named_before_anything_is_written() -> None:
    layout = StoreLayout(2, 64, 32, dither=True, page_size=4)
    pool = PackedPool(layout, 2, seed=1)
    k, v, slots = torch.ones(3, 2, 64), torch.ones(3, 2, 32), torch.arange(3)
    cases = [
        ("k", TypeError, (k.half(), v, pool, slots, slots)),
        ("k", ValueError, (k[:2], v, pool, slots, slots)),
        ("v", ValueError, (k, v[..., :8], pool, slots, slots)),
        ("slots", TypeError, (k, v, pool, slots.int(), slots)),
        ("slots", ValueError, (k, v, pool, slots + 6, slots)),
        ("slots", ValueError, (k, v, pool, slots - 1, slots)),
        ("slots", ValueError, (k, v, pool, slots * 0, slots)),
        ("positions", ValueError, (k, v, pool, slots, None)),
        ("positions", ValueError, (k, v, pool, slots, slots[:2])),
        ("positions", ValueError, (k, v, pool, slots, slots - 1)),
        ("pool", TypeError, (k, v, "pool", slots, slots)),
    ]
    for name, kind, arguments in cases:
        with pytest.raises(kind, match=f"^{name}: got"):
            quantize_(*arguments)  # type: ignore[arg-type]
    fresh = PackedPool(layout, 2, seed=1)
    assert all(torch.equal(getattr(pool, n), getattr(fresh, n)) for n in pool.page_tensors)
    observatory = ObservatoryPool(ObservatoryLayout(2, 64, 32, page_size=4), 2)
    with pytest.raises(ValueError, match=r"^k_hat: got shape"):
        observe_(k, v, k[..., :8], v, observatory, slots)
    assert int(observatory.k_hat.count_nonzero()) == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("page_size", {"page_size": 48}),
        ("page_size", {"page_size": 512}),
        ("group", {"group": 48}),
        ("sketch", {"sketch": 65}),
        ("witness_bands", {"witness_bands": 33}),
        ("bypass", {"bypass": -1}),
        ("dither_period", {"dither_period": 3}),
        ("rope_layout", {"rope_layout": "other"}),
        ("rotary_dim", {"rotary_dim": 65}),
        ("dtype", {"dtype": torch.float64}),
        ("head_dim", {"head_dim": 63}),
    ],
)
def test_bad_layouts_are_named(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got"):
        StoreLayout(**{"kv_heads": 2, "head_dim": 64, "head_dim_v": 64, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_heads", 2.0),
        ("head_dim", 64.0),
        ("page_size", 16.0),
        ("group", True),
        ("sketch", 1.5),
        ("witness_bands", None),
        ("bypass", "1"),
        ("dither", "no"),
        ("dither_period", 8.0),
        ("rotary_dim", 4.0),
    ],
)
def test_layouts_of_another_type_are_named(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"^{name}: got"):
        StoreLayout(**{"kv_heads": 2, "head_dim": 64, "head_dim_v": 64, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layout", {"layout": None}),
        ("layout", {"layout": ObservatoryLayout(2, 64, 64)}),
        ("num_pages", {"num_pages": 1.5}),
        ("layer", {"layer": 0.5}),
        ("seed", {"layout": StoreLayout(2, 64, 64, dither=True), "seed": 1.0}),
        ("calibration", {"calibration": "default"}),
    ],
)
def test_pools_of_another_type_are_named(name: str, change: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=f"^{name}: got"):
        PackedPool(**{"layout": StoreLayout(2, 64, 64), "num_pages": 1, **change})  # type: ignore[arg-type]


def test_bad_calibrations_are_named() -> None:
    def build(**change: torch.Tensor) -> LayerCalibration:
        parts = {
            "mu": torch.zeros(2, 64),
            "f": torch.ones(2, 64),
            "u": torch.zeros(2, 1, 64),
            "bypass": torch.tensor([[3], [5]]),
        }
        return LayerCalibration(**{**parts, **change})

    build()
    wrong = torch.ones(2, 64)
    wrong[0, 3] = 2
    for name, change in {
        "f": wrong,
        "mu": torch.full((2, 64), float("nan")),
        "u": torch.ones(2, 1, 64),
        "bypass": torch.tensor([[3], [32]]),
    }.items():
        with pytest.raises(ValueError, match=f"calibration.{name}"):
            build(**{name: change})
    with pytest.raises(ValueError, match=r"calibration.f: got 0"):
        build(f=torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"calibration.rope_layout: got 'other'"):
        build(rope_layout="other")
    with pytest.raises(ValueError, match=r"calibration.rotary_dim: got 66"):
        build(rotary_dim=66)
    with pytest.raises(ValueError, match=r"layout.bypass: got 0, wants the calibration's 1"):
        PackedPool(StoreLayout(2, 64, 64), 1, calibration=build())
    with pytest.raises(ValueError, match=r"layout.sketch: got 2, wants at most"):
        PackedPool(StoreLayout(2, 64, 64, sketch=2, bypass=1), 1, calibration=build())
    with pytest.raises(ValueError, match=r"^seed: got None"):
        PackedPool(StoreLayout(2, 64, 64, dither=True), 1)


def test_philox_known_answers() -> None:
    """Random123's vectors, first word."""
    from witcert_kernels.philox import philox_first_word

    for counter, seed, word in (
        ([0, 0, 0, 0], 0, 0x6627E8D5),
        ([0xFFFFFFFF] * 4, 2**64 - 1, 0x408F276D),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 0x299F31D0A4093822, 0xD16CFE09),
    ):
        words = [torch.tensor([c]) for c in counter]
        assert int(philox_first_word(*words, seed)) == word


def test_a_calibration_belongs_to_the_bytes_it_wrote() -> None:
    g = torch.Generator().manual_seed(1)
    mine, other = random_calibration(g, 2, 64, 1, 0), random_calibration(g, 2, 64, 1, 0)
    pool = PackedPool(StoreLayout(2, 64, 64, sketch=1), 1, calibration=mine)
    pool.calibration = mine.to("cpu")
    with pytest.raises(ValueError, match=r"^calibration: got [0-9a-f]{12}…, wants"):
        pool.calibration = other
    assert pool.calibration.fingerprint == mine.fingerprint
