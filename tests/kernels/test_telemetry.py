"""Counters in device memory: exactly the cells that the certificates report, on both paths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.triton.backends import CUDA, Result, decode_torch, decode_triton, on_triton, to_device
from tests.triton.test_observatory import observed
from witcert_kernels import (
    Counters,
    ObservatoryLayout,
    PackedPool,
    StoreLayout,
    Telemetry,
    certified_decode,
    quantize_,
)
from witcert_kernels.telemetry import BINS, PLACES, UNIT

from .oracle import Case, make_case
from .test_decode import queries, repair

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, under the interpreter

TAUS = (0.05, 1 / 3, 1.0)
DEVICE = "cuda" if CUDA else "cpu"
PATHS = {"torch": (decode_torch, "cpu"), "triton": (decode_triton, DEVICE)}


def spoiled() -> tuple[Case, torch.Tensor, torch.Tensor]:
    """Four sequences, one of them empty, one all of exact pages; a key and a value that are not finite."""
    case = make_case(1, StoreLayout(2, 64, 64, page_size=16), [40, 0, 30, 16], heads=4)
    k, v = case.keys[0][7:8].clone(), case.values[2][9:10].clone()
    k[0, 1, 5], v[0, 0, 5] = math.nan, math.inf
    quantize_(k, case.values[0][7:8], case.pool, case.page_table[0, 0].long()[None] * 16 + 7)
    quantize_(case.keys[2][9:10], v, case.pool, case.page_table[2, 0].long()[None] * 16 + 9)
    choose = torch.zeros(4, 2, 3, dtype=torch.bool)
    choose[3, :, 0] = True
    return case, queries(case, 4), repair(case, choose)


def by_hand(results: list[tuple[int, Result]]) -> Counters:
    """The counters of some decodes, of a layer each, one cell at a time."""
    histogram, covered, places = [0] * (BINS + 1), dict.fromkeys(TAUS, 0), []
    lost = lost_v = total = 0
    for layer, (_, _, cert) in results:
        for row, counts in enumerate(cert.compressed.tolist()):
            for head, compressed in enumerate(counts):
                if not compressed:
                    continue
                meter = float(cert.meter[row, head])
                histogram[next(i for i in range(BINS + 1) if meter <= i / BINS)] += 1
                for tau in TAUS:
                    covered[tau] += meter <= tau
                lost += not math.isfinite(cert.risk[row, head])
                lost_v += not math.isfinite(cert.value_error[row, head])
                total += math.ceil(meter / UNIT)
                places.append((meter, layer, head))
    top, layer, head = max(places)
    return Counters(len(places), lost, lost_v, covered, tuple(histogram), total * UNIT, top, (layer, head))


@pytest.mark.parametrize("path", PATHS)
def test_every_cell_is_counted_once(path: str) -> None:
    decode, device = PATHS[path]
    case, q, exact = spoiled()
    telemetry = Telemetry(TAUS, device)
    results = []
    for layer, scale in ((3, 1.0), (70000, 0.01), (1, 0.3)):
        case.pool.layer = layer
        given = (case.page_table, case.seq_lens)
        result = decode(q * scale, case.pool, *given, exact_pages=exact, telemetry=telemetry)
        results.append((min(layer, PLACES - 1), result))
    wanted = by_hand(results)
    assert telemetry.read() == wanted
    assert (wanted.cells, wanted.non_finite, wanted.value_non_finite) == (3 * 8, 3 * 2, 3 * 2)
    assert wanted.worst == (PLACES - 1, 3) and wanted.max_meter == 1.0
    again = Telemetry(TAUS)
    for layer, (_, _, cert) in reversed(results):
        again.add(cert.meter, cert.risk, cert.value_error, cert.compressed, layer)
    assert torch.equal(again.buffer, telemetry.buffer.cpu())
    telemetry.reset()
    empty = telemetry.read()
    assert (empty.cells, empty.max_meter, empty.worst) == (0, 0.0, None) and math.isnan(empty.coverage(0.1))


@pytest.mark.parametrize("path", PATHS)
def test_an_observatory_is_counted_too(path: str) -> None:
    decode, device = PATHS[path]
    case = observed(ObservatoryLayout(2, 64, 64, page_size=16, witness_bands=4, sketch=2), [40, 0])
    case.pool.layer = 7
    q = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(3))
    telemetry = Telemetry(TAUS, device)
    result = decode(q, case.pool, case.page_table, case.seq_lens, telemetry=telemetry)
    assert telemetry.read() == by_hand([(7, result)])


def test_coverage() -> None:
    telemetry = Telemetry((0.15,))
    meter = torch.tensor([[0.0, 0.15, 0.151, 0.5]])
    telemetry.add(meter, meter, meter, torch.ones(1, 4), 0)
    counters = telemetry.read()
    # as float32 0.15 is above, 0.151 below
    assert [counters.coverage(tau) for tau in (0.0, 0.15, 0.151, 0.5, 1.0)] == [0.25, 0.25, 0.75, 1.0, 1.0]
    for tau in (0.1234, -0.1, 1.1):
        with pytest.raises(ValueError, match=r"^tau: got"):
            counters.coverage(tau)


def test_a_compiled_step_counts() -> None:
    case = make_case(4, StoreLayout(2, 64, 64, page_size=16), [30, 9], heads=4)
    q, telemetry = queries(case, 2), Telemetry()

    def step(q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return certified_decode(q * 1.0, case.pool, case.page_table, lengths, telemetry=telemetry)[0]

    torch.compile(step, fullgraph=True, backend="aot_eager")(q, case.seq_lens)
    assert telemetry.read().cells == 8
    compiled = telemetry.buffer.clone()
    telemetry.reset()
    step(q, case.seq_lens)
    assert torch.equal(telemetry.buffer, compiled)


def test_bad_input_is_named() -> None:
    for taus in ((0.0,), (0.1, 1.5), (math.nan,)):
        with pytest.raises(ValueError, match=r"^taus: got"):
            Telemetry(taus)
    case = make_case(5, StoreLayout(2, 64, 64, page_size=16), [9], heads=4)
    given: dict[str, Any] = {
        "q": queries(case, 1), "pool": case.pool, "page_table": case.page_table, "seq_lens": case.seq_lens,
    }  # fmt: skip
    with pytest.raises(TypeError, match=r"^telemetry: got dict"):
        certified_decode(**given, telemetry={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^telemetry: got device meta, wants cpu"):
        certified_decode(**given, telemetry=Telemetry(device="meta"))


@pytest.mark.gpu
def test_a_captured_decode_counts_on_every_replay() -> None:
    case = make_case(6, StoreLayout(2, 64, 64, dtype=torch.bfloat16, page_size=16), [150, 70], heads=8)
    pool, q = to_device(case.pool), queries(case, 2).cuda()
    assert isinstance(pool, PackedPool)
    given, telemetry = (case.page_table.cuda(), case.seq_lens.cuda()), Telemetry(device="cuda")
    with on_triton():
        certified_decode(q, pool, *given, telemetry=telemetry)
        one = telemetry.read()
        telemetry.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            certified_decode(q, pool, *given, telemetry=telemetry)
    assert telemetry.read().cells == 0
    for _ in range(3):
        graph.replay()
    counters = telemetry.read()
    assert counters.histogram == tuple(3 * n for n in one.histogram) and counters.worst == one.worst


def test_what_is_added_by_hand_is_checked_before_anything_is_counted() -> None:
    telemetry, one = Telemetry(), torch.ones(2, 3)
    for bad, error in (
        (dict(meter=one.double()), TypeError),
        (dict(risk=one[:1]), ValueError),
        (dict(counted=one[:1]), ValueError),
        (dict(layer=-1), ValueError),
        (dict(layer=0.5), TypeError),
    ):
        arguments: dict[str, Any] = dict(meter=one, risk=one, value_error=one, counted=one, layer=0) | bad
        with pytest.raises(error, match=f"^{next(iter(bad))}: got"):
            telemetry.add(**arguments)
    assert telemetry.read().cells == 0
    meters = torch.tensor([[math.nan, 2.0, -0.0]])
    telemetry.add(meters, one[:1], one[:1], one[:1], 5)
    counters = telemetry.read()
    assert (counters.histogram[0], counters.histogram[BINS], counters.max_meter) == (1, 2, 1.0)
    telemetry.reset()
    telemetry.add(-0.0 * one[:1, :1], one[:1, :1], one[:1, :1], one[:1, :1], 5)
    assert telemetry.read().worst == (5, 0)
    for tau in (math.nan, math.inf, 2.0):
        with pytest.raises(ValueError, match=r"^tau: got"):
            counters.coverage(tau)
    for taus in (0.1, "0.1", ("a",)):
        with pytest.raises(TypeError, match=r"^taus: got"):
            Telemetry(taus)  # type: ignore[arg-type]
