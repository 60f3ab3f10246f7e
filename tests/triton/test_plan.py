"""Plans: the same numbers from temporaries that are made once, and nothing else allocated."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from aot_report import KERNELS, Recorder, arguments, calibration, meta
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.oracle import make_case, softmax, stored_keys, stored_logits
from tests.kernels.test_decode import queries, repair
from witcert_kernels import (
    Budget,
    ObservatoryLayout,
    PackedPool,
    Plan,
    StoreLayout,
    Telemetry,
    certified_decode,
    quantize_,
    triton_observatory,
    triton_reader,
)
from witcert_ref import bounds

from .backends import CUDA, Result, decode_torch, decode_triton, on_triton, stored_bounds, to_device
from .test_observatory import observed
from .test_reader import assert_sound, extend_arguments

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, under the interpreter

F32, BF16 = torch.float32, torch.bfloat16


def plan_of(pool: Any, *args: Any, **options: Any) -> Plan:
    with on_triton():
        return Plan(to_device(pool), *args, **options)


def assert_same(a: Result, b: Result) -> None:
    for x, y in zip(a[:2], b[:2], strict=True):
        assert torch.equal(x, y)
    for name, x in vars(a[2]).items():
        y = getattr(b[2], name)
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_a_planned_decode_is_the_unplanned_one() -> None:
    """Bit for bit; one plan for several lengths, a smaller batch and a shorter table, whatever was in its workspace."""
    layout = StoreLayout(
        2, 64, 64, page_size=16, group=32, sketch=1, witness_bands=2, bypass=1, dither=True, dither_period=16
    )
    case = make_case(1, layout, [0, 70], heads=4)
    q = queries(case, 2)
    plan = plan_of(case.pool, 4, 2, case.page_table.shape[1], splits=3)
    place = plan.workspace.data_ptr()
    plan.workspace.fill_(255)
    for lengths, radius in (([0, 70], Budget(1e-2, 30, 4, 100)), ([0, 33], None)):
        now = torch.tensor(lengths, dtype=torch.int32)
        wanted = decode_triton(q, case.pool, case.page_table, now, splits=3, budget=radius)
        assert_same(decode_triton(q, case.pool, case.page_table, now, plan=plan, budget=radius), wanted)
    smaller = case.page_table[1:, :2].contiguous(), torch.tensor([25], dtype=torch.int32)
    wanted = decode_triton(q[1:], case.pool, *smaller, splits=3)
    assert_same(decode_triton(q[1:], case.pool, *smaller, plan=plan), wanted)
    assert plan.workspace.data_ptr() == place


def test_a_planned_extend_is_the_unplanned_one() -> None:
    layout = StoreLayout(2, 64, 32, dtype=BF16, page_size=16, sketch=2)
    case = make_case(6, layout, [40, 0, 97, 64], heads=2)
    rows = [3, 15, 0, 1]
    q, indptr, k_new, v_new = extend_arguments(case, rows, BF16)
    exact = repair(case, (torch.rand(4, 2, 7, generator=torch.Generator().manual_seed(1)) < 0.4))
    exact[case.page_table[:, None].expand_as(exact) < 0] = -1
    plan = plan_of(case.pool, 2, 4, 7, rows=25, exact=True, splits=2)
    given = (case.page_table, case.seq_lens, indptr, k_new, v_new, True, exact)
    assert_same(
        decode_triton(q, case.pool, *given, plan=plan),
        decode_triton(q, case.pool, *given, splits=2),
    )
    alone = (case.page_table, case.seq_lens, torch.tensor([0, 10, 10, 19, 19], dtype=torch.int32))
    lengths = torch.tensor([40, 0, 97, 64], dtype=torch.int32)
    wanted = decode_triton(q, case.pool, alone[0], lengths, alone[2], splits=2)
    assert_same(decode_triton(q, case.pool, alone[0], lengths, alone[2], plan=plan), wanted)


def test_a_planned_observatory_read_is_the_unplanned_one() -> None:
    case = observed(ObservatoryLayout(2, 64, 64, page_size=16, witness_bands=4, sketch=2), [40, 0, 50])
    q = torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(3))
    plan = plan_of(case.pool, 6, 3, case.page_table.shape[1], splits=2)
    given = (case.page_table, case.seq_lens)
    assert_same(decode_triton(q, case.pool, *given, plan=plan), decode_triton(q, case.pool, *given, splits=2))


@pytest.mark.parametrize(("heads", "options"), [(4, {"sketch": 1}), (4, {"group": 16, "dither": True}), (40, {})])
def test_two_digits_are_sound_and_close(heads: int, options: dict[str, Any]) -> None:
    """What the third digit would hold is in ζ: at most 2^-15 of the row's largest |q| a channel, times 127.5 steps."""
    layout = StoreLayout(2, 64, 64, page_size=16, **options)
    case = make_case(7, layout, [90, 20], heads=heads)
    q = queries(case, 3)[1:]
    given = (case.page_table, case.seq_lens)
    three, two = (
        decode_triton(q, case.pool, *given, plan=plan_of(case.pool, heads, 2, 6, splits=2, digits=digits))
        for digits in (3, 2)
    )
    assert_sound(case, q, two)
    for b in range(2):
        y, c = stored_logits(case, b, q[b], 0.125), stored_bounds(case, b, q[b], 0.125)
        step = stored_keys(case, b)[2].max()
        z = (q[b].double() * case.pool.calibration.f.double().repeat_interleave(heads // 2, 0)).abs()
        lost = 0.125 * 127.5 * step * 64 * z.amax(-1).numpy() * 2.0**-16
        for head in range(heads):
            reported, wanted = float(two[2].meter[b, head]), float(three[2].meter[b, head])
            assert reported >= bounds.meter(softmax(y)[head], c[head])
            assert wanted < reported <= wanted * (1 + 2 * lost[head] / float(c[head].min())) + lost[head]
    assert bool((two[2].meter < 1.2 * three[2].meter).all())


def test_the_torch_path_takes_the_plans_splits() -> None:
    case = make_case(2, StoreLayout(2, 64, 64, page_size=16), [100], heads=4)
    q = queries(case, 1)
    plan = Plan(case.pool, 4, 1, 7, splits=3)
    given = (case.page_table, case.seq_lens)
    assert_same(decode_torch(q, case.pool, *given, plan=plan), decode_torch(q, case.pool, *given, splits=3))
    assert plan.workspace.numel() == 0


class Allocations(TorchDispatchMode):
    """Bytes of every storage that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {x.untyped_storage()._cdata for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)}
        out = func(*args, **kwargs)
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:
                self.bytes.append(x.untyped_storage().nbytes())
        return out


def pool_tensors(pool: Any) -> dict[str, torch.Tensor]:
    own = (*pool.page_tensors, "band_of_channel") + (("bypass_channels",) if isinstance(pool, PackedPool) else ())
    return {n: getattr(pool, n).to("meta") for n in own} | {
        n: getattr(pool.calibration, n).to("meta") for n in ("mu", "f", "u")
    }


@pytest.mark.parametrize("extend", [False, True])
@pytest.mark.parametrize("kind", ["packed", "observatory"])
def test_only_outputs_are_allocated_and_no_value_is_read(kind: str, extend: bool) -> None:
    """On meta tensors, which have no data: reading a value raises. Kernels are recorded in place of launched."""
    layout: Any = (
        StoreLayout(2, 64, 32, dtype=BF16, page_size=16, group=16, sketch=2, witness_bands=3, bypass=1)
        if kind == "packed"
        else ObservatoryLayout(2, 64, 32, dtype=BF16, page_size=16, sketch=2)
    )
    rows, heads, batch = 20, 8, 4
    pool = (
        PackedPool(layout, 1, calibration=calibration(2, 64, 2, 1)) if kind == "packed" else observed(layout, [5]).pool
    )
    plan = plan_of(pool, heads, batch, 512, rows=rows if extend else None, exact=extend, splits=16)
    tensors, given = pool_tensors(pool), arguments(layout, rows if extend else batch, heads, batch, extend)
    workspace = meta(len(plan.workspace), dtype=torch.uint8)
    options: dict[str, Any] = {
        "tensors": tensors, "causal": True, "sm_scale": 0.1, "cap": 0.0, "window_left": -1, "splits": 16,
        "workspace": workspace,
    }  # fmt: skip
    scalars = {"dither": 0, "dither_period": 64, "seed": 0, "layer": 0}
    with contextlib.ExitStack() as stack:
        for module, name in KERNELS:
            stack.enter_context(mock.patch.object(module, name, Recorder(getattr(module, name))))
        seen = stack.enter_context(Allocations())
        if kind == "packed":
            out = triton_reader.decode_packed(*given, scalars=scalars, delta_local=0.0, **options)
        else:
            out = triton_observatory.decode_observatory(*given, **options)
        made = list(seen.bytes)
        with pytest.raises(ValueError, match=r"^plan.workspace: got \d+ bytes, wants \d+ at least"):
            options["workspace"] = workspace[:-1000]
            if kind == "packed":
                triton_reader.decode_packed(*given, scalars=scalars, delta_local=0.0, **options)
            else:
                triton_observatory.decode_observatory(*given, **options)
    assert sorted(made) == sorted(x.untyped_storage().nbytes() for x in out)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    layout = StoreLayout(2, 64, 64, page_size=16)
    case = make_case(3, layout, [20, 30], heads=4)
    pool, q = case.pool, queries(case, 2)
    given: dict[str, Any] = {"q": q, "pool": pool, "page_table": case.page_table, "seq_lens": case.seq_lens}
    indptr = torch.tensor([0, 1, 2], dtype=torch.int32)
    exact = torch.full((2, 2, 2), -1, dtype=torch.int32)
    other = PackedPool(StoreLayout(2, 64, 64, page_size=16, witness_bands=1), 1)
    good = Plan(pool, 4, 2, 2)
    bad: list[tuple[str, Any, dict[str, Any]]] = [
        ("plan", 3, {}),
        ("plan.layout", Plan(other, 4, 2, 2), {}),
        ("plan.heads", Plan(pool, 8, 2, 2), {}),
        ("plan.batch", Plan(pool, 4, 1, 2), {}),
        ("plan.max_pages", Plan(pool, 4, 2, 1), {}),
        ("plan.rows", Plan(pool, 4, 2, 2, rows=2), {}),
        ("plan.rows", good, {"qo_indptr": indptr}),
        ("plan.rows", Plan(pool, 4, 2, 2, rows=1), {"qo_indptr": indptr}),
        ("plan.exact", good, {"exact_pages": exact}),
        ("splits", good, {"splits": 2}),
    ]
    for name, plan, change in bad:
        with pytest.raises(TypeError if name == "plan" else ValueError, match=f"^{name}: got"):
            certified_decode(**given, **change, plan=plan)
    observatory = observed(ObservatoryLayout(2, 64, 64, page_size=16), [5]).pool
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("pool", {"pool": None}),
        ("heads", {"heads": 3}),
        ("batch", {"batch": -1}),
        ("max_pages", {"max_pages": -1}),
        ("rows", {"rows": -1}),
        ("splits", {"splits": 0}),
        ("digits", {"digits": 4}),
        *((name, {name: 2.0}) for name in ("heads", "batch", "max_pages", "rows", "splits", "digits")),
        ("exact", {"exact": 1}),
        ("digits", {"digits": 2, "pool": observatory}),
    ]
    for name, change in wrong:
        with pytest.raises((TypeError, ValueError), match=f"^{name}: got"):
            Plan(**{"pool": pool, "heads": 4, "batch": 2, "max_pages": 2} | change)


def test_a_planned_decode_compiles_to_one_graph() -> None:
    case = make_case(4, StoreLayout(2, 64, 64, page_size=16, sketch=1), [30, 9], heads=4)
    pool, q = to_device(case.pool), queries(case, 2)
    table, lengths = case.page_table, case.seq_lens
    if CUDA:
        q, table, lengths = q.cuda(), table.cuda(), lengths.cuda()
    plan = plan_of(case.pool, 4, 2, 2, splits=2)

    def step(q: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse, cert = certified_decode(q * 1.0, pool, table, lengths, plan=plan)
        return out, lse, cert.meter

    with on_triton():
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for shorter in (0, 3):
            for got, wanted in zip(compiled(q, lengths - shorter), step(q, lengths - shorter), strict=True):
                assert torch.equal(got, wanted)


@pytest.mark.gpu
def test_a_captured_decode_replays_with_other_lengths() -> None:
    case = make_case(5, StoreLayout(2, 64, 64, dtype=BF16, page_size=16, sketch=1), [150, 70], heads=8)
    pool, q, table = to_device(case.pool), queries(case, 2).cuda(), case.page_table.cuda()
    plan, lengths = plan_of(case.pool, 8, 2, table.shape[1]), case.seq_lens.cuda()
    certified_decode(q, pool, table, lengths, plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _, cert = certified_decode(q, pool, table, lengths, plan=plan)
    for now in ([150, 70], [3, 64], [0, 1]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        wanted = certified_decode(q, pool, table, lengths, splits=plan.splits)
        assert torch.equal(out, wanted[0]) and torch.equal(cert.meter, wanted[2].meter)


@pytest.mark.gpu
def test_a_captured_step_writes_reads_and_counts() -> None:
    """A token written and read in one graph: what eager steps of the same tokens store, report and count."""
    layout = StoreLayout(2, 64, 64, dtype=BF16, page_size=16, sketch=1, witness_bands=1)
    case = make_case(8, layout, [40, 17], heads=8)
    q, table, lengths = queries(case, 2).cuda(), case.page_table.cuda(), case.seq_lens.cuda()
    slots = table[torch.arange(2), (lengths - 1) // 16].long() * 16 + (lengths - 1) % 16
    k, v = (torch.randn(2, 2, 64, device="cuda").to(BF16) for _ in range(2))

    def step(pool: Any, plan: Plan, telemetry: Telemetry) -> Any:
        quantize_(k, v, pool, slots)
        return certified_decode(q, pool, table, lengths, plan=plan, telemetry=telemetry)

    eager, replayed = to_device(case.pool), to_device(case.pool)
    plan, counts = plan_of(case.pool, 8, 2, table.shape[1]), [Telemetry(device="cuda") for _ in range(2)]
    step(replayed, plan, counts[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _, cert = step(replayed, plan, counts[1])
    counts[1].reset()
    for _ in range(3):
        k.normal_(), v.normal_()
        graph.replay()
        wanted = step(eager, plan, counts[0])
        assert torch.equal(out, wanted[0]) and torch.equal(cert.meter, wanted[2].meter)
    for name in eager.page_tensors:
        assert torch.equal(getattr(eager, name).nan_to_num(), getattr(replayed, name).nan_to_num())
    assert torch.equal(counts[0].buffer, counts[1].buffer) and counts[1].read().cells == 48
