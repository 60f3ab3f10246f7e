"""The experiments on activations, run on a tiny model, and the stores that they simulate against the package's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from experiments import activations, bounds, cells, figure1, intervals, model, synthetic, table6
from experiments.__main__ import ACTIVATIONS, app
from experiments.cells import Account, Cells, two_part
from experiments.result import RESULTS, Result, load
from experiments.stores import Attention, Layout, Store, observe, write, write_values
from tests.calibration.tensors import captured as random_capture
from tests.experiments import tiny
from witcert.calibration import Calibration, CalibrationMetadata, fit
from witcert.capture import Captured, ModelFingerprint, traits
from witcert.metering import DELTA, meter
from witcert.schemes import Scheme, get
from witcert_ref import bounds as reference
from witcert_ref.radius import delta_local
from witcert_ref.store import block_bytes

NAMES = [module.NAME for module in ACTIVATIONS]
STEPS, SEED = 8, 11


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model, chosen, with a cache of its own."""
    folder = tiny.save(tmp_path_factory.mktemp("model") / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "CACHE", tmp_path_factory.mktemp("activations"))
        model.choose(folder)
        yield folder
        model.choose(None)


@pytest.fixture(scope="module")
def quick(chosen: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Every experiment, quick, by its command."""
    folder = tmp_path_factory.mktemp("results")
    out = {}
    for name in NAMES:
        run = CliRunner().invoke(app, [name, "--quick", "--out", str(folder), "--model", str(chosen)])
        assert run.exit_code == 0, run.output
        assert (folder / f"{name}.svg").exists()
        out[name], _ = load(folder / f"{name}.json")
    return out


@pytest.fixture(scope="module")
def random() -> Captured:
    return random_capture(tokens=300, steps=STEPS, d=32, d_v=32, dtype=torch.float16)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_runs_on_any_model(name: str, quick: dict[str, Result], chosen: Path) -> None:
    small, full = quick[name], load(RESULTS / f"{name}.json")[0]
    assert small.quick and small.settings["model"] == chosen.name and full.settings["model"] == model.SMOLLM2
    assert {row.quantity for row in small.rows} <= {row.quantity for row in full.rows}
    assert [table.header for table in small.tables] == [table.header for table in full.tables]
    assert not any(entry.count for entry in small.violations) and all(entry.checks for entry in small.violations)


@pytest.mark.parametrize("module", ACTIVATIONS, ids=NAMES)
def test_the_committed_run_says_what_it_read(module: ModuleType) -> None:
    full, _ = load(RESULTS / f"{module.NAME}.json")
    assert full.samples > 4480, "more cells than the paper's study"
    assert full.differs == list(getattr(module, "DIFFERS", ()))
    assert full.differs or not any(row.paper for row in full.rows)
    assert {"prose", "code", "needle"} <= {text.domain for text in activations.TEXTS}
    assert all(text.name in full.settings["texts"] for text in activations.TEXTS)


def test_a_capture_is_reused(chosen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = activations.QUICK[0]
    first = activations.captured(text)
    monkeypatch.setattr(activations, "capture", lambda *_, **__: pytest.fail("captured again"))
    assert all(torch.equal(a.k, b.k) for a, b in zip(first.layers, activations.captured(text).layers, strict=True))
    assert first.layers[0].k.dtype == torch.float16 and len(first.layers[0].q) == activations.STEPS


def test_a_text_that_is_too_short_is_refused(chosen: Path) -> None:
    with pytest.raises(ValueError, match=r"text: got \d+ tokens of story, want 1000000"):
        activations.captured(activations.Text("prose", "story", 1_000_000))


def test_an_unsound_source_is_counted(quick: dict[str, Result], chosen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments import sources

    honest = Store.half_step
    monkeypatch.setattr(Store, "half_step", lambda self, q: honest(self, q) / 50)
    counts = {entry.claim: entry.count for entry in sources.run(quick=True).violations}
    assert counts["half_step and witness: c >= every logit error"] > 0
    assert counts["half_step and witness: every bound >= true total variation"] > 0


def test_an_unsound_bound_is_counted() -> None:
    p, c = np.full((1, 2), 0.5), np.full((1, 2), 0.1)
    account, true = Account(), np.array([0.049834])
    account.check("sound", [reference.meter(p, c), reference.eform(p, c)], [true])
    account.check("unsound", [reference.dispersion_unsound(p, c)], [true])
    account.check("undefined", [np.array([np.nan])], [true])
    assert [(entry.count, entry.checks) for entry in account.violations()] == [(0, 2), (1, 1), (1, 1)]


def read(captured: Captured, layout: Layout, calibration: Calibration | None) -> dict[str, np.ndarray]:
    """Meters and truth of all layers, cell by cell as the package orders them: layer, step, head."""
    found: dict[str, list[np.ndarray]] = {"meter": [], "true": []}
    heads = captured.layers[0].q.shape[1]
    local = delta_local(DELTA, len(captured.layers), heads, STEPS)
    for n in range(len(captured.layers)):
        attention = Attention.of(captured, n)
        store = write(attention, n, layout, calibration.layers[n] if calibration else None, seed=SEED)
        q = attention.q
        c = store.fixed_trajectory(q, local) if layout.dither else store.any_query(q)
        part = Cells(attention, store.error(q), c)
        for name, value in (("meter", part.values(["meter"])["meter"]), ("true", part.tv)):
            found[name].append(value.reshape(heads, STEPS).T.ravel())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def calibrated(captured: Captured, sketch: int, witness: int, bypass: int) -> Calibration:
    fingerprint = ModelFingerprint(**traits(captured), weights="0" * 64)
    metadata = CalibrationMetadata(
        model=fingerprint, text_sha256="0" * 64, length=300, sketch=sketch, witness_bands=witness, bypass=bypass
    )
    return Calibration(fit(captured, bypass=bypass, directions=4), metadata)


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [
        (Layout(), "int8"),
        (Layout(group=16), "int8"),
        (Layout(equalizer=True, sketch=1), "int8"),
        (Layout(equalizer=True, sketch=2, witness=4, bypass=2), "int8"),
        (Layout(dither=64), "int8_dither"),
        (Layout(equalizer=True, sketch=1, bypass=1, dither=64), "int8_dither"),
    ],
    ids=str,
)
def test_a_simulated_store_is_the_packages(random: Captured, layout: Layout, scheme: str) -> None:
    calibration = calibrated(random, layout.sketch, layout.witness, layout.bypass) if layout.equalizer else None
    ours = read(random, layout, calibration)
    theirs = meter(random, scheme, calibration, group=layout.group, seed=SEED if layout.dither else None)
    reported, true = (np.array([getattr(cell, name) for cell in theirs.cells]) for name in ("meter", "true_tv"))
    np.testing.assert_allclose(ours["true"], true, rtol=1e-3, atol=1e-6)
    assert (ours["meter"] <= reported).all(), "the kernels add their rounding"
    np.testing.assert_allclose(ours["meter"], reported, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("name", ["rtn8", "fp8_raw", "kivi4"])
def test_a_black_box_is_the_packages(random: Captured, name: str) -> None:
    scheme = get(name)
    assert isinstance(scheme, Scheme)
    calibration = calibrated(random, 2, 0, 0)
    plain = Calibration([*fit(random, directions=4, equalizer=False)], calibration.metadata)
    theirs = meter(random, scheme, plain, witness_bands=16)
    reported, true = (np.array([getattr(cell, key) for cell in theirs.cells]) for key in ("meter", "true_tv"))
    ours, tv = [], []
    heads = random.layers[0].q.shape[1]
    for n in range(len(random.layers)):
        attention = Attention.of(random, n)
        store = observe(attention, scheme, 16)
        error = store.error(attention.q)
        part = Cells(attention, error, store.tier_a(attention.q))
        known = two_part(attention, error, store.sketched(plain.layers[n].u))
        best = np.minimum(part.values(["meter"])["meter"], known)
        ours.append(best.reshape(heads, STEPS).T.ravel())
        tv.append(part.tv.reshape(heads, STEPS).T.ravel())
    np.testing.assert_allclose(np.concatenate(tv), true, rtol=1e-3, atol=1e-6)
    assert (np.concatenate(ours) <= reported).all()
    np.testing.assert_allclose(np.concatenate(ours), reported, rtol=0.01, atol=1e-4)


def test_the_papers_block_store_is_the_synthetic_one() -> None:
    d, tokens = 32, 2 * synthetic.BLOCK
    k = synthetic.gaussian(np.random.default_rng(1), tokens, d)
    keys = torch.from_numpy(k)[None]
    attention = Attention(keys[:, :2], keys, keys, torch.zeros(2, tokens, dtype=torch.bool), d**-0.5, "half", None)
    layout = Layout(block=synthetic.BLOCK, bypass=3, dither=1)
    store = write(attention, 0, layout, seed=SEED)
    xi = synthetic.token_dither(SEED, tokens, d)
    wanted = synthetic.block_store(k, bypass=3, levels=synthetic.DITHER_LEVELS, xi=xi)
    np.testing.assert_allclose(k + store.keys[0].numpy(), wanted.k_hat, rtol=0, atol=1e-12)
    assert store.steps is not None
    assert (store.steps[0].numpy() == np.repeat(wanted.steps, synthetic.BLOCK, axis=0)).all()
    assert layout.bytes(d) == block_bytes(tokens, d, 3) / tokens


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_every_width_errs_by_half_a_step_at_most(random: Captured, bits: int) -> None:
    attention = Attention.of(random, 0)
    for layout in (Layout(bits=bits), Layout(bits=bits, dither=16), Layout(bits=bits, block=256, dither=1)):
        store = write(attention, 0, layout)
        assert store.steps is not None
        assert (store.residual.abs() <= store.steps / 2 * (1 + 1e-12)).all()
        assert (write_values(attention, 0, layout).abs() > 0).any()


def test_amax_may_keep_a_bypass(random: Captured) -> None:
    calibration = fit(random, bypass=2, directions=0, equalizer=False)
    attention = Attention.of(random, 0)
    steps = [write(attention, 0, Layout(bypass=2, in_amax=kept), calibration[0]).steps for kept in (True, False)]
    assert steps[0] is not None and steps[1] is not None
    assert (steps[1] <= steps[0]).all() and (steps[1] < steps[0]).any()


def test_pages_are_repaired_until_the_bound_is_within_the_gate(random: Captured) -> None:
    attention = Attention.of(random, 0)
    store = observe(attention, get("rtn4"), 16)  # type: ignore[arg-type]
    error = store.error(attention.q)
    part = Cells(attention, error, store.tier_a(attention.q))
    found = bounds.page_ins(part)
    value = part.values(["meter"])["meter"]
    assert ((found["meter, τ = 0.2"] == 0) == (value <= 0.2)).all()
    assert (found["meter, τ = 0.99"] <= found["meter, τ = 0.2"]).all() and found["meter, τ = 0.2"].max() > 0
    assert (found["attained, τ = 0.2"] <= found["relaxed, τ = 0.2"]).all()
    assert (found["relaxed, τ = 0.2"] <= found["meter, τ = 0.2"]).all()
    exact = bounds.page_ins(Cells(attention, 0 * error, 0 * error))
    assert all((pages == 0).all() for pages in exact.values())


@pytest.mark.parametrize("scheme", ["rtn8", "kivi4", "rtn4"])
def test_the_worst_cases_within_the_gate_are_those_of_every_cell(random: Captured, scheme: str) -> None:
    attention = Attention.of(random, 0)
    store = observe(attention, get(scheme), 16)  # type: ignore[arg-type]
    part = Cells(attention, store.error(attention.q), store.tier_a(attention.q))
    values = part.values(bounds.ALL, bounds.ALL)
    for name, within in bounds.worst_within(part, values["meter"]).items():
        assert (within == (values[name] <= synthetic.TAU)).all()


def test_bits_are_interpolated() -> None:
    falling = [1.0, 0.5, *[0.0] * (len(bounds.WIDTHS) - 2)]
    assert bounds.bits_at(0.75, falling) == pytest.approx((bounds.WIDTHS[0] + bounds.WIDTHS[1]) / 2)
    assert bounds.bits_at(0.5, [1.0] * len(bounds.WIDTHS)) is None


def test_the_two_sided_form_token_by_token_is_the_smaller_one() -> None:
    rng = np.random.default_rng(0)
    p, c = rng.dirichlet(np.ones(20), 50), rng.exponential(0.5, (50, 20))
    value = figure1.retention(p, c)
    assert (value <= np.minimum(reference.eform(p, c), reference.two_sided(p, c)) * (1 + 1e-12)).all()
    assert (value >= reference.worst_case_lower(p, c)[0]).all()
    np.testing.assert_allclose(figure1.log10_eform(p, c), np.log10(reference.eform(p, c)), rtol=1e-9)
    assert np.isfinite(figure1.log10_eform(p, c + 1000)).all()


@pytest.mark.parametrize("peak", [0.01, 0.1])
def test_an_anchor_is_sound_and_never_worse(peak: float) -> None:
    rng = np.random.default_rng(0)
    p, c = rng.dirichlet(np.full(10, peak), 40), rng.exponential(0.5, (40, 10))
    value, plain = bounds.anchored(p, c), reference.meter(p, c)
    assert all(bound >= reference.worst_case(x, y) for bound, x, y in zip(value, p, c, strict=True))
    assert (value <= plain).all() and (value < plain).any()


def test_accounts() -> None:
    score, danger = np.array([0.1, 0.2, 0.2, 0.9]), np.array([False, True, False, True])
    assert cells.auc(score, danger) == 0.875 and cells.auc(score, danger | True) is None
    assert cells.every_head([1, 1, 0, 1, 1, 1, 1, 1], 2, 2).tolist() == [0, 1, 1, 1]
    assert table6.jaccard(np.array([[0, 1], [2, 3]]), np.array([[1, 0], [3, 4]])) == [1.0, 1 / 3]
    share, (low, high) = intervals.over_prompts(np.repeat([[0.0], [1.0]], 500, axis=1))
    assert (share, low, high) == (0.5, 0.0, 1.0), "two prompts, however many cells"
    assert intervals.spread(np.repeat([[0.0], [1.0]], 500, axis=1)) == (0.5, "0 – 1")
