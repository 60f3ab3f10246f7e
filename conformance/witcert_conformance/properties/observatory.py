"""Reconstructions of any scheme: the witness in fp16, and the two-part meter whose sketch does not touch the read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from mpmath import mpf

from .. import arrays, exact
from ..adapter import Adapter, Array, Calibration, Decoded, Info, Ints, Layout, Mask, Observed, Read, optional
from ..case import calibration, terse
from ..checks import require
from ..exact import MP, Dyadic, finite
from ..model import attended_mask, slack
from ..registry import prop
from ..strategies import bands

SCHEMES = ("coarse", "aligned", "shifted", "zeroed", "spiky")


SEEN_LAYOUT = Layout(head_dim=8, witness_bands=2, sketch=1)


@dataclass(frozen=True)
class View:
    """Recipe of an observatory: a scheme's damage, and a read.

    scheme: ``coarse`` rounds to few levels, ``aligned`` errs along the first direction only, ``shifted`` errs alike on
    every token, ``zeroed`` forgets channels, ``spiky`` hits some tokens hard. factor: of the equaliser's f.
    """

    layout: Layout = SEEN_LAYOUT
    lengths: tuple[int, ...] = (5,)
    group_heads: int = 1
    scheme: str = "coarse"
    damage: float = 0.1
    equalised: bool = False
    soft_cap: float = 0.0
    sinks: bool = False
    splits: int | None = None
    scale: float = 1.0
    factor: float = 1.0
    along: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        return terse(self)


@dataclass(frozen=True)
class Seen:
    """A view on an implementation."""

    view: View
    adapter: Adapter
    store: Any
    calibration: Calibration
    k: Array
    v: Array
    k_hat: Array
    slots: Ints
    read: Read
    observed: Observed
    band: Ints


def look(adapter: Adapter, view: View) -> Seen:
    """Write the view and form its read."""
    layout, rng = view.layout, np.random.default_rng(view.seed)
    observer = optional(adapter)
    total, size = sum(view.lengths), layout.page_size
    k = arrays.round_to(rng.normal(size=(total, layout.kv_heads, layout.head_dim)), layout.dtype)
    v = arrays.round_to(rng.normal(size=(total, layout.kv_heads, layout.head_dim_v)), layout.dtype)
    calibrated = calibration(layout, rng, equalised=view.equalised, keys=k)
    calibrated = replace(calibrated, mu=np.zeros_like(calibrated.mu), f=calibrated.f * view.factor)
    u = calibrated.u[:, 0] if layout.sketch else np.ones_like(calibrated.f)
    error = {
        "coarse": lambda: np.round(k / view.damage) * view.damage - k,
        "aligned": lambda: view.damage * rng.normal(size=(*k.shape[:2], 1)) * u * calibrated.f,
        "shifted": lambda: np.broadcast_to(view.damage * u * calibrated.f, k.shape),
        "zeroed": lambda: -k * (rng.random(layout.head_dim) < 0.3),
        "spiky": lambda: view.damage * rng.normal(size=k.shape) * (1 + 3e4 * (rng.random((total, 1, 1)) < 0.3)),
    }[view.scheme]()
    k_hat, v_hat = k + error, v + 0.01 * rng.normal(size=v.shape)
    used = [-(-n // size) for n in view.lengths]
    table = np.zeros((len(used), max([*used, 1])), np.int64)
    slots = np.empty(total, np.int64)
    start = page = 0
    for b, n in enumerate(view.lengths):
        table[b, : used[b]] = np.arange(page, page + used[b])
        at = np.arange(n)
        slots[start : start + n] = (page + at // size) * size + at % size
        start, page = start + n, page + used[b]
    store = observer.create_observatory(layout, max(page, 1), calibrated)
    observer.observe(store, k, v, k_hat, v_hat, slots)
    heads = layout.kv_heads * view.group_heads
    q = rng.normal(size=(len(used), heads, layout.head_dim)) * view.scale
    if view.along and layout.sketch:
        q = (calibrated.u[:, 0] / calibrated.f).repeat(view.group_heads, 0)[None] * q[..., :1] + 2.0**-6 * q
    read = Read(
        q=arrays.round_to(q, layout.dtype), page_table=table, seq_lens=np.asarray(view.lengths),
        sm_scale=float(np.float32(layout.head_dim**-0.5)), soft_cap=view.soft_cap, splits=view.splits,
        sinks=rng.normal(size=heads).astype(np.float32).astype(np.float64) if view.sinks else None,
    )  # fmt: skip
    return Seen(
        view, adapter, store, calibrated, k, v, k_hat, slots, read, observer.observed(store), observer.bands(layout)
    )


@dataclass(frozen=True)
class Cell:
    """One row and head: logits y of what is stored, exact x, the known part r, both bounds; the last may be a sink."""

    b: int
    head: int
    y: list[mpf]
    x: list[mpf]
    r: list[mpf]
    c_one: list[mpf]
    c_two: list[mpf]
    v_hat: Array
    slack: float


def cells(seen: Seen) -> Iterator[Cell]:
    """Every cell whose tokens are finite, in mpmath."""
    view, read, layout = seen.view, seen.read, seen.view.layout
    cap, sm = MP.mpf(view.soft_cap), MP.mpf(read.sm_scale)
    band = np.eye(layout.witness_bands)[seen.band]

    def g(x: mpf) -> mpf:
        return cap * MP.tanh(x / cap) if cap else x

    first = np.concatenate([[0], np.cumsum(view.lengths)])
    for b, n in enumerate(view.lengths):
        page, offset = np.divmod(seen.slots[first[b] : first[b] + n], layout.page_size)
        mask: Mask = attended_mask(read, n, 0, 1)[0] if n else np.zeros(0, bool)
        assert mask.all()
        for head in range(read.q.shape[1]):
            h = head // view.group_heads
            witness = seen.observed.witness[page, offset, h]
            if not np.isfinite(witness).all() or not (n or view.sinks):
                continue
            q, f, u = (Dyadic.of(t) for t in (read.q[b, head], seen.calibration.f[h], seen.calibration.u[h]))
            stored = Dyadic.of(seen.observed.k_hat[page, offset, h])
            raw = [sm * t for t in (stored @ q).real()] if n else []
            true = [sm * t for t in (Dyadic.of(seen.k[first[b] : first[b] + n, h]) @ q).real()] if n else []
            z = q * f
            one = [MP.sqrt(t) for t in ((z * z) @ Dyadic.of(band)).real()]
            y, x = [g(t) for t in raw], [g(t) for t in true]
            r, c_one, c_two = [], [], []
            unit = seen.observed.sketch_scale[page, offset, h]
            if layout.sketch:
                a = u @ z
                w = z - a @ u
                two = [MP.sqrt(t) for t in ((w * w) @ Dyadic.of(band)).real()]
            for t in range(n):
                w_t = [MP.mpf(float(s)) for s in witness[t]]
                c_one.append(sm * sum((s * o for s, o in zip(one, w_t, strict=True)), MP.zero))
                if not layout.sketch or not np.isfinite(unit[t]):
                    r.append(MP.zero)
                    c_two.append(MP.inf)
                    continue
                scale = MP.mpf(float(unit[t]))
                code = Dyadic.of(seen.observed.sketch[page[t], offset[t], h])
                taken = sm * (a @ code).real()[()] * scale
                r.append(y[t] - g(raw[t] - taken))
                own = sm * scale / 2 * (1 + MP.mpf(seen.adapter.info.sketch_widening)) * abs(a).sum().real()[()]
                c_two.append(sm * sum((s * o for s, o in zip(two, w_t, strict=True)), MP.zero) + own)
            v_hat = seen.observed.v_hat[page, offset, h]
            if view.sinks:
                sink = MP.mpf(float(read.sinks[head]))  # type: ignore[index]
                y, x = [*y, sink], [*x, sink]
                r, c_one, c_two = ([*s, MP.zero] for s in (r, c_one, c_two))
                v_hat = np.concatenate([v_hat, np.zeros((1, v_hat.shape[1]))])
            allowed = slack(
                seen.adapter.info,
                layout,
                read,
                read.q[b, head][None],
                seen.observed.k_hat[page, offset, h],
                np.zeros((1, 0)),
            )
            yield Cell(b, head, y, x, r, c_one, c_two, v_hat, float(allowed[0]))


def two_part(cell: Cell) -> mpf:
    """½ sd(e^r)/mean(e^r) under softmax(y − r), and the meter of what is left there."""
    if MP.inf in cell.c_two:
        return MP.one
    p = exact.softmax_mp([y - r for y, r in zip(cell.y, cell.r, strict=True)])
    grown = [MP.exp(r) for r in cell.r]
    mean = sum((a * b for a, b in zip(p, grown, strict=True)), MP.zero)
    spread = sum((a * (b - mean) ** 2 for a, b in zip(p, grown, strict=True)), MP.zero)
    deviation = MP.sqrt(spread) / (2 * mean)
    return deviation + exact.meter_mp(p, cell.c_two)


def read_is_untouched(seen: Seen, decoded: Decoded) -> None:
    """lse and out are those of the scheme's reconstructions."""
    for cell in cells(seen):
        p = exact.softmax_mp(cell.y)
        lse = float(exact.logsumexp_mp(cell.y))
        got = float(decoded.lse[cell.b, cell.head])
        require(
            abs(got - lse) <= cell.slack + 2.0**-22 * abs(lse),
            f"lse: got {got!r} at row {cell.b}, head {cell.head}, wants {lse!r}",
        )
        want = np.asarray([float(w) for w in p]) @ cell.v_hat
        off = float(np.linalg.norm(decoded.out[cell.b, cell.head] - want))
        reach = float(np.abs(cell.v_hat).sum())
        limit = (2.0**-7 if seen.view.layout.dtype == "bfloat16" else 2.0**-9) * reach + 2 * cell.slack * reach
        require(off <= limit, f"out: off by {off!r} at row {cell.b}, head {cell.head}, wants at most {limit!r}")


def covers(seen: Seen, decoded: Decoded) -> None:
    """The meter covers what happened, and the worst x that both bounds allow; 1 where a witness overflowed."""
    page, offset = np.divmod(seen.slots, seen.view.layout.page_size)
    lost = ~finite(seen.observed.witness[page, offset])  # [tokens, kv_heads]
    end = np.cumsum(seen.view.lengths)
    for b, head in np.ndindex(decoded.meter.shape):
        got_b = decoded.meter[b, head]
        unknown = lost[end[b] - seen.view.lengths[b] : end[b], head // seen.view.group_heads].any()
        require(not unknown or got_b == 1, f"meter: got {got_b!r} at row {b}, head {head}, wants 1: a c is infinite")
    for cell in cells(seen):
        got = MP.mpf(float(decoded.meter[cell.b, cell.head]))
        where = f"row {cell.b}, head {cell.head}"
        p = exact.softmax_mp(cell.y)
        moved = exact.tv_mp(exact.softmax_mp(cell.x), p)
        require(got >= moved, f"meter: got {MP.nstr(got, 12)} at {where}, but attention moved by {MP.nstr(moved, 12)}")
        low, high = [], []
        for y, r, one, two in zip(cell.y, cell.r, cell.c_one, cell.c_two, strict=True):
            low.append(max(y - one, y - r - two))
            high.append(min(y + one, y - r + two))
        if any(a > b for a, b in zip(low, high, strict=True)):
            require(False, f"bounds: contradict each other at {where}")
        worst = exact.worst_box_mp(cell.y, low, high)
        require(got >= worst, f"meter: got {MP.nstr(got, 12)} at {where}, but both bounds allow {MP.nstr(worst, 12)}")


def value_error_covers(seen: Seen, decoded: Decoded) -> None:
    """The value error covers the distance of out from exact attention over exact values."""
    first = np.concatenate([[0], np.cumsum(seen.view.lengths)])
    for cell in cells(seen):
        h = cell.head // seen.view.group_heads
        p = exact.softmax_mp(cell.x)[: seen.view.lengths[cell.b]]
        off = MP.zero
        for got_j, v_j in zip(
            decoded.out[cell.b, cell.head], seen.v[first[cell.b] : first[cell.b + 1], h].T, strict=True
        ):
            off += (sum((a * MP.mpf(float(b)) for a, b in zip(p, v_j, strict=True)), -MP.mpf(float(got_j)))) ** 2
        assert decoded.value_error is not None
        got = MP.mpf(float(decoded.value_error[cell.b, cell.head]))
        require(
            got >= MP.sqrt(off),
            f"value_error: got {MP.nstr(got, 9)} at row {cell.b}, head {cell.head}, off by {MP.nstr(MP.sqrt(off), 9)}",
        )


def useful(seen: Seen, decoded: Decoded) -> None:
    """The meter is the smaller of the one-part and the two-part meter, up to 1.01 and rounding."""
    for cell in cells(seen):
        got = float(decoded.meter[cell.b, cell.head])
        one = exact.meter_mp(exact.softmax_mp(cell.y), cell.c_one)
        most = min(float(min(one, two_part(cell))) * 1.01 + 2 * cell.slack, 1.0)
        require(got <= most, f"meter: got {got!r} at row {cell.b}, head {cell.head}, wants at most {most!r}")


def _views(
    sketch: bool, *, schemes: tuple[str, ...] = SCHEMES, cap: bool = False, sinks: bool = False, splits: bool = False
) -> Any:
    @st.composite
    def views(draw: st.DrawFn, info: Info) -> View:
        d = draw(st.sampled_from(info.head_dims))
        return View(
            layout=Layout(
                kv_heads=draw(st.integers(1, 2)), head_dim=d, head_dim_v=draw(st.sampled_from(info.head_dims_v)),
                page_size=draw(st.sampled_from(info.page_sizes)), dtype=draw(st.sampled_from(info.dtypes)),
                witness_bands=draw(bands(info, d)), sketch=draw(st.integers(1, min(3, d))) if sketch else 0,
            ),
            lengths=tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=2))),
            group_heads=draw(st.integers(1, 2)),
            scheme=draw(st.sampled_from(schemes)),
            damage=draw(st.sampled_from((0.05, 0.3, 1.0))),
            equalised=draw(st.booleans()),
            soft_cap=draw(st.sampled_from((2.0, 20.0))) if cap else 0.0,
            sinks=sinks,
            splits=draw(st.integers(1, 4)) if splits else None,
            scale=draw(st.sampled_from((1.0, 0.2, 4.0))),
            along=draw(st.booleans()),
            seed=draw(st.integers(0, 999)),
        )  # fmt: skip

    return views


ALONG = View(scheme="aligned", along=True, damage=0.3)
OVERFLOWN = View(scheme="spiky", damage=1.0, equalised=True, factor=2.0**-12)
"""Residuals whose norm no float16 holds, in equalised coordinates."""
UNSKETCHED = View(layout=Layout(head_dim=8, witness_bands=2))
PINNED = (
    View(),
    ALONG,
    View(damage=1.0, equalised=True, along=True),
    View(scheme="aligned", along=True, damage=1.0, lengths=(3,)),
    View(scheme="shifted", damage=0.5),
)


@prop(
    "reconstructions_are_read_untouched",
    _views(True),
    theorems=("tv_softmax_le_known_add_meter",),
    needs=("observatory",),
    pinned=PINNED,
    examples=15,
)
def _untouched(adapter: Adapter, case: View) -> None:
    """A black-box scheme's output is attended to as it is: the sketch is not subtracted from it."""
    seen = look(adapter, case)
    read_is_untouched(seen, adapter.decode(seen.store, seen.read))


@prop(
    "one_part_meter_of_a_scheme",
    _views(False),
    theorems=("tierA_certificate", "abs_logit_error_le", "output_error_le"),
    needs=("observatory",),
    pinned=(
        UNSKETCHED,
        replace(UNSKETCHED, equalised=True, damage=0.3),
        replace(UNSKETCHED, lengths=(1,), scale=0.0),
        replace(OVERFLOWN, layout=UNSKETCHED.layout),
    ),
    examples=15,
)
def _one(adapter: Adapter, case: View) -> None:
    """Tier A for any scheme and any query: fp16 band norms, rounded up, of the stored numbers' residual."""
    seen = look(adapter, case)
    decoded = adapter.decode(seen.store, seen.read)
    covers(seen, decoded)
    useful(seen, decoded)
    if "value_error" in adapter.info.offers:
        value_error_covers(seen, decoded)


@prop(
    "two_part_meter_of_a_scheme",
    _views(True),
    theorems=("tv_softmax_le_known_add_meter", "tv_tilt_le_relative_deviation", "tv_triangle"),
    needs=("observatory",),
    pinned=PINNED,
    examples=20,
)
def _two(adapter: Adapter, case: View) -> None:
    """The known part is accounted under softmax(y − r), the rest bounded there; the smaller meter is reported."""
    seen = look(adapter, case)
    decoded = adapter.decode(seen.store, seen.read)
    covers(seen, decoded)
    useful(seen, decoded)


@prop(
    "two_part_meter_under_a_cap",
    _views(True, cap=True),
    theorems=("tv_softmax_le_known_add_meter", "abs_softcap_sub_le"),
    needs=("observatory", "soft_cap"),
    pinned=(
        replace(ALONG, soft_cap=2.0, scale=4.0),
        replace(ALONG, soft_cap=1.0, lengths=(3,)),
        replace(ALONG, soft_cap=1.0, lengths=(6,)),
    ),
    examples=10,
)
def _cap(adapter: Adapter, case: View) -> None:
    """r is g(u) − g(u − correction): the known part through the cap."""
    seen = look(adapter, case)
    decoded = adapter.decode(seen.store, seen.read)
    read_is_untouched(seen, decoded)
    covers(seen, decoded)
    useful(seen, decoded)


@prop(
    "two_part_meter_merges",
    _views(True, sinks=True, splits=True),
    theorems=("merge_splits", "tv_softmax_le_known_add_meter"),
    needs=("observatory", "splits", "sinks"),
    pinned=(
        replace(
            ALONG, layout=Layout(head_dim=8, witness_bands=2, sketch=1, page_size=1), splits=3, sinks=True, lengths=(6,)
        ),
    ),
    examples=10,
)
def _merge(adapter: Adapter, case: View) -> None:
    """The second set of moments merges by its own normaliser; a sink has r = 0."""
    seen = look(adapter, case)
    decoded = adapter.decode(seen.store, seen.read)
    covers(seen, decoded)
    useful(seen, decoded)


@prop(
    "observatory_writer",
    _views(True),
    theorems=("abs_logit_error_le", "abs_corrected_error_le"),
    needs=("observatory",),
    pinned=(*PINNED, View(scheme="spiky"), OVERFLOWN),
    examples=15,
)
def _writer(adapter: Adapter, case: View) -> None:
    """The scheme's number is stored in 16 bits; witness, value error and sketch cover what that lost, exactly."""
    seen = look(adapter, case)
    layout, observed = case.layout, seen.observed
    at = np.divmod(seen.slots, layout.page_size)
    single = seen.k_hat.astype(np.float32)
    with np.errstate(over="ignore"):
        wanted = single.astype(np.float16).astype(np.float64)
    if layout.dtype == "bfloat16":
        wanted = arrays.round_to(single.astype(np.float64), "bfloat16")
    kept = observed.k_hat[at]
    lost = ~finite(observed.witness[at])[..., None]
    require(
        ((np.abs(kept - wanted) <= 2.0**-7 * np.abs(wanted) + 2.0**-24) | lost).all(), "k_hat: not the scheme's number"
    )
    residual = Dyadic.of(np.where(lost, 0.0, kept)) - Dyadic.of(np.where(lost, 0.0, seen.k))
    band = np.eye(layout.witness_bands)[seen.band]
    for h in range(layout.kv_heads):
        f, u = seen.calibration.f[h], Dyadic.of(seen.calibration.u[h])
        # (k̂ − k)/f per channel: compare f-free by scaling each channel's square with its band's common denominator
        scaled = [
            [mpf_ratio(residual.ints[t, h, j], residual.exponent, f[j]) for j in range(layout.head_dim)]
            for t in range(len(kept))
        ]
        for t, row in enumerate(scaled):
            if lost[t, h]:
                continue
            for b in range(layout.witness_bands):
                norm = MP.sqrt(sum((x * x for x, on in zip(row, band[:, b], strict=True) if on), MP.zero))
                got = MP.mpf(float(observed.witness[at][t, h, b]))
                require(
                    got >= norm,
                    f"witness: got {MP.nstr(got, 10)} at token {t}, band {b}, wants at least {MP.nstr(norm, 10)}",
                )
                most = norm * (1 + MP.mpf(2) ** -9) + MP.mpf(2) ** -23
                require(
                    got <= most, f"witness: got {MP.nstr(got, 10)} at token {t}, band {b}, wants {MP.nstr(norm, 10)}"
                )
            unit = observed.sketch_scale[at][t, h]
            if np.isfinite(unit):
                for i in range(layout.sketch):
                    along = sum((x * MP.mpf(float(v)) for x, v in zip(row, u.near()[i], strict=True)), MP.zero)
                    code = MP.mpf(float(observed.sketch[at][t, h, i]))
                    off = abs(along - code * MP.mpf(float(unit)))
                    allowed = MP.mpf(float(unit)) / 2 * (1 + MP.mpf(adapter.info.sketch_widening))
                    require(
                        off <= allowed,
                        f"sketch: token {t}, direction {i} off by {MP.nstr(off / unit, 8)} units, wants half",
                    )
    off_v = np.linalg.norm(observed.v_hat[at] - seen.v, axis=-1)
    fine = np.where(np.isfinite(observed.v_error[at]), observed.v_error[at] >= off_v, True)
    require(fine.all(), "v_error: below the distance of a stored value")


def mpf_ratio(integer: int, exponent: int, denominator: float) -> mpf:
    """integer · 2^exponent / denominator."""
    return MP.mpf(int(integer)) * MP.mpf(2) ** exponent / MP.mpf(float(denominator))
