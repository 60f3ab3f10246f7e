"""Every bound against the worst case on real activations: tightness, bits and page-ins (paper, section 6.4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from experiments import activations
from experiments.cells import EFORM, Account, Array, Cells, every_head, softmax
from experiments.intervals import Interval, between, columns, over_prompts, spread
from experiments.result import Cell, Result, Row, Table
from experiments.stores import SEED, Attention, Layout, Store, observe, write
from experiments.synthetic import BLOCK, BOUNDS, DELTA, TAU
from witcert.schemes import Scheme, get
from witcert_ref import bounds
from witcert_ref.radius import delta_local

NAME = "bounds"
BANDS, PAGE = 16, 64
PAPER = "min(e-form, two-sided)"
ANCHORED = "anchored meter"
DIFFERS: tuple[str, ...] = (
    "The paper's bits are those of Qwen2.5-1.5B. Here four pairs out of the way leave a c that is small and, with one"
    " scale for all tokens, the same for all of them, so that every shape needs fewer bits and the e-form gains little"
    " over the tanh. The tanh is the worst case of such a c where tokens may be split: the meter is no smaller, and"
    " needs one bit less than the e-form.",
    "Page-ins are counted for each cell by itself, not as the paper's traffic of requests, where repaired pages"
    " stay. At τ = 0.99 its finding returns for fp8_raw: the e-form repairs more than rc_tanh, and the meter nothing"
    " at all; for rtn8 rc_tanh repairs nothing either, so there is no ratio. At τ = 0.2 it is the other way round: a"
    " tanh is within τ only when nearly every page has been repaired, as a single large c decides it.",
)


def anchored(p: Array, c: Array) -> Array:
    """The smaller of the meter of c and that of errors relative to the heaviest token s: c_t + c_s, and 0 for s.

    A shift common to all logits does not change attention (`softmax_add_const`). In A and σ it is one factor e^c_s.
    """
    top = np.argmax(p, axis=-1)[..., None]
    relative = np.where(p > 0, c + np.take_along_axis(c, top, -1), 0.0)
    np.put_along_axis(relative, top, 0.0, -1)
    return np.minimum(bounds.meter(p, c), bounds.meter(p, relative))


SHAPES: dict[str, Callable[[Array, Array], Array]] = {
    "rc_tanh": bounds.rc_tanh,
    "tanh": bounds.tanh,
    EFORM: bounds.eform,
    "two_sided": bounds.two_sided,
    "phi": bounds.phi,
    "sharp": bounds.sharp,
    "meter": bounds.meter,
    ANCHORED: anchored,
}
WORST: dict[str, Callable[[Array, Array], Array]] = {
    "attained": BOUNDS["attained"],
    "relaxed": bounds.worst_case_relaxed,
}
BY_C = ("rc_tanh", "tanh")  # whose pages are repaired by their largest c
PLAIN = [name for name in SHAPES if name != ANCHORED]
ALL: dict[str, Callable[[Array, Array], Array]] = {**SHAPES, **WORST}
REGIMES = ("fp8_raw, witness", "rtn8, witness", "one scale, half_step", "default, half_step", "block, bypass 4, radius")
DEFAULT = Layout(equalizer=True, sketch=1)
CERTIFIED = Layout(block=BLOCK, bypass=4, dither=1)
WIDTHS = (4, 5, 6, 7, 8, 9, 10, 12, 14, 16)
GLOBAL = 2**30  # a block of all tokens: the paper's global scaling
FALLBACKS = (0.444, 0.22, 0.05)
GATES = (0.99, TAU)
LADDER = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # pages that are repaired
GATED = ("fp8_raw", "rtn8")


def run(quick: bool = False) -> Result:
    """Tightness in five regimes on all texts; bits and page-ins on half of them."""
    texts = activations.QUICK if quick else activations.TEXTS
    half = list(range(len(texts)))[::2]
    account = Account()
    for i, text in enumerate(texts):
        captured = activations.captured(text)
        steps, heads, _ = captured.layers[0].q.shape
        local = delta_local(DELTA, len(captured.layers), heads, steps)
        for n in activations.layers(captured, quick):
            attention = Attention.of(captured, n)
            regimes = _regimes(attention, n, quick, local)
            for name, (store, c) in regimes.items():
                cells = Cells(attention, store.error(attention.q), c)
                values = cells.values(SHAPES, SHAPES)
                worst = cells.values(WORST, WORST)
                account.check("every bound >= true total variation", values.values(), [cells.tv])
                account.check("every bound >= attained worst case", values.values(), [worst["attained"]])
                split = [values[name] for name in PLAIN]  # whose token may not be split
                account.check("every other bound >= relaxed worst case", split, [worst["relaxed"]])
                account.check(
                    "relaxed >= attained >= 0", [worst["relaxed"], worst["attained"]], [worst["attained"], 0 * cells.tv]
                )
                account.add(name, i, {"true": cells.tv, **values, **worst})
            if i in half:
                _bits(account, attention, n, i, steps, local)
                for name in GATED:
                    store, c = regimes[f"{name}, witness"]
                    for bound, pages in page_ins(Cells(attention, store.error(attention.q), c)).items():
                        account.add(name, i, {bound: pages})
    return Result(
        NAME,
        "Bound shapes: tightness, bits and page-ins",
        "sections 5 and 6.4.2",
        {
            **activations.settings(texts),
            "tau": TAU,
            "delta_req": DELTA,
            "delta_local": "delta_req / (layers · query heads · query rows)",
            "witness_bands": BANDS,
            "page": PAGE,
            "default": "equaliser, sketch 1",
        },
        unit="cell of each regime",
        samples=account(REGIMES[0], "true").size,
        seed=SEED,
        rows=_rows(account),
        violations=account.violations(),
        differs=list(DIFFERS),
        tables=_tables(account),
        quick=quick,
    )


def _regimes(attention: Attention, n: int, quick: bool, local: float) -> dict[str, tuple[Store, Tensor]]:
    q = attention.q
    black = [observe(attention, scheme, BANDS) for scheme in map(get, GATED) if isinstance(scheme, Scheme)]
    plain = write(attention, n, Layout())
    default = write(attention, n, DEFAULT, activations.calibration(quick, equalizer=True)[n])
    certified = write(attention, n, CERTIFIED)
    found = [
        *((store, store.tier_a(q)) for store in black),
        (plain, plain.half_step(q)),
        (default, default.half_step(q)),
    ]
    return dict(zip(REGIMES, [*found, (certified, certified.radius(q, local))], strict=True))


def _bits(account: Account, attention: Attention, n: int, i: int, steps: int, local: float) -> None:
    """Fallback of kv heads over the width of the codes, global scaling, four bypass pairs of the sequence."""
    kv_heads, q = len(attention.k), attention.q
    for bits in WIDTHS:
        store = write(attention, n, Layout(bits=bits, block=GLOBAL, bypass=4, dither=PAGE))
        error = store.error(q)
        for source, c in (("half_step", store.half_step(q)), ("radius", store.radius(q, local))):
            cells = Cells(attention, error, c)
            values = cells.values(PLAIN, SHAPES)
            account.check("every bound >= true total variation", values.values(), [cells.tv])
            passed = {**{name: value <= TAU for name, value in values.items()}, **worst_within(cells, values["meter"])}
            fell = {name: 1 - every_head(value, kv_heads, steps) for name, value in passed.items()}
            account.add(f"{bits} bits, {source}", i, fell)


def worst_within(cells: Cells, meter: Array) -> dict[str, NDArray[np.bool_]]:
    """Where the worst cases and the anchored meter are at most τ.

    None is above the meter and none is below the attained, so only cells that these two leave open are computed.
    """
    out, within = {}, meter <= TAU
    left = ~within
    for name in ("attained", "relaxed", ANCHORED):
        out[name] = within.copy()
        out[name][left] = ALL[name](cells.p_tilde[left], cells.c[left]) <= TAU
        left = out["attained"] & ~within
    return out


def page_ins(cells: Cells) -> dict[str, Array]:
    """Pages of each cell that a gate repairs, for each bound, worst case and gate: [cells].

    The largest first, by their share of A - 1, for the tanh by their largest c; attention is computed anew after each.
    """
    tokens = cells.c.shape[1]
    starts = np.arange(0, tokens, PAGE)
    with np.errstate(over="ignore"):
        share = np.add.reduceat(cells.p_tilde * np.expm1(cells.c), starts, axis=1)
    top = np.maximum.reduceat(cells.c, starts, axis=1)
    out: dict[str, Array] = {}
    for names, size in (([name for name in ALL if name not in BY_C], share), (BY_C, top)):
        rank = np.argsort(np.argsort(-size, axis=1, kind="stable"), axis=1)
        pages = {(name, gate): np.full(len(size), float(len(starts))) for name in names for gate in GATES}
        left = {name: np.full(len(size), True) for name in names}  # beyond the stricter gate, so far
        for count in (step for step in LADDER if step < len(starts)):
            exact = np.repeat(rank < count, PAGE, axis=1)[:, :tokens]
            p = softmax(cells.y - np.where(exact, cells.eps, 0.0))
            c = np.where(exact, 0.0, cells.c)
            for name, rows in left.items():
                if rows.any():
                    value = np.full(len(size), np.inf)
                    value[rows] = ALL[name](p[rows], c[rows])
                    for gate in GATES:
                        found = pages[name, gate]
                        found[value <= gate] = np.minimum(found, count)[value <= gate]
                    left[name] = rows & ~(value <= min(GATES))
        out |= {f"{name}, τ = {gate}": found for (name, gate), found in pages.items()}
    return out


def bits_at(fallback: float, found: Sequence[float]) -> float | None:
    """The width, between two of `WIDTHS`, whose fallback is this; None where none is as small."""
    for (narrow, more), (wide, less) in zip(
        zip(WIDTHS, found, strict=True), list(zip(WIDTHS, found, strict=True))[1:], strict=False
    ):
        if more > fallback >= less:
            return narrow + (wide - narrow) * (more - fallback) / (more - less)
    return None


def _bits_at(account: Account, bound: str, source: str, fallback: float) -> tuple[float | None, Interval | None]:
    """`bits_at` of the mean over texts, and its interval where all resamples have such a width."""
    shares = np.stack([account(f"{bits} bits, {source}", bound).mean(1) for bits in WIDTHS], axis=1)

    def statistic(drawn: Array) -> float:
        found = bits_at(fallback, drawn.reshape(-1, len(WIDTHS)).mean(0))
        return np.nan if found is None else found

    value, interval = over_prompts(shares, statistic)
    return (None, None) if np.isnan(value) else (value, None if np.isnan(interval).any() else interval)


def _rows(account: Account) -> list[Row]:
    asked = (
        (0.444, "rc_tanh", "half_step", 15.14),
        (0.22, EFORM, "radius", 11.71),
        (0.22, "rc_tanh", "half_step", None),
        (0.22, "meter", "half_step", None),
        (0.22, "meter", "radius", None),
    )
    rows = [
        Row(
            f"bits at a fallback of {100 * fallback:.1f} %, {bound} of {source}",
            paper,
            *_bits_at(account, bound, source, fallback),
        )
        for fallback, bound, source, paper in asked
    ]
    for scheme, paper in (("fp8_raw", 30.8 / 12.1), ("rtn8", 27.3 / 5.3)):
        eform, tanh = (float(account(scheme, f"{name}, τ = 0.99").sum()) for name in (EFORM, "rc_tanh"))
        rows.append(Row(f"{scheme}: pages at τ = 0.99, e-form over rc_tanh", paper, eform / tanh if tanh else None))
        meter = float(account(scheme, "meter, τ = 0.99").sum())
        rows.append(Row(f"{scheme}: pages at τ = 0.99, meter over rc_tanh", None, meter / tanh if tanh else None))
    for regime in REGIMES:
        ratio = account(regime, "meter") / account(regime, "attained")
        rows.append(Row(f"{regime}: meter over attained, median", None, *over_prompts(ratio, np.median)))
    return rows


def _tables(account: Account) -> list[Table]:
    shapes: list[tuple[Cell, ...]] = []
    for regime in REGIMES:
        bound = {name: account(regime, name) for name in (*SHAPES, *WORST, "true")}
        bound[PAPER] = np.minimum(bound[EFORM], bound["two_sided"])
        for name in (*BY_C, EFORM, "two_sided", PAPER, "phi", "sharp", "meter", ANCHORED, *WORST, "true"):
            shares = [spread((bound[name] <= gate).astype(float)) for gate in GATES]
            ratio = bound[name] / bound["attained"]
            middle = float(np.median(bound[name]))
            tight = (*spread(ratio, np.median), float(np.quantile(ratio, 0.9)))
            shapes.append((regime, name, *shares[0], *shares[1], middle, *tight))
    widths: list[tuple[Cell, ...]] = []
    for name in ALL:
        for source in ("half_step", "radius"):
            found = [float(account(f"{bits} bits, {source}", name).mean()) for bits in WIDTHS]
            authorised: list[Cell] = []
            for fallback in FALLBACKS:
                value, interval = _bits_at(account, name, source, fallback)
                authorised += [value, between(interval)]
            widths.append((name, source, *found, *authorised))
    pages: list[tuple[Cell, ...]] = []
    for scheme in GATED:
        for gate in GATES:
            for name in ALL:
                repaired = account(scheme, f"{name}, τ = {gate}")
                pages.append((scheme, gate, name, *spread(repaired), *spread((repaired > 0).astype(float))))
    return [
        Table(
            "Coverage, and each bound over the attained total variation (attained: no sound bound covers more; relaxed:"
            " at most so much above the exact worst case)",
            (
                "c of",
                "bound",
                *columns(*(f"coverage τ = {gate}" for gate in GATES)),
                "median",
                *columns("over attained, median"),
                "over attained, 90 % of cells",
            ),
            shapes,
        ),
        Table(
            f"Fallback of kv heads at τ = {TAU} over the width of the codes (a scale a channel for all tokens, four"
            " bypass pairs), and the bits at which it is as the last columns say",
            (
                "bound",
                "source",
                *(f"{bits} bits" for bits in WIDTHS),
                *columns(*(f"bits at {fallback:.1%}" for fallback in FALLBACKS)),
            ),
            widths,
        ),
        Table(
            f"Pages of {PAGE} tokens repaired a cell until the bound is within τ, and the share of cells with any"
            " (attained, relaxed: what a gate would repair that knew the worst case)",
            ("scheme", "τ", "bound", *columns("pages", "cells")),
            pages,
        ),
    ]


def plot(result: Result) -> Figure:
    """Coverage by each bound, fallback over bits, page-ins."""
    figure = Figure(figsize=(14, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    shapes, widths, pages = (table.rows for table in result.tables)
    places = np.arange(len(REGIMES))
    for i, name in enumerate((*BY_C, EFORM, "meter", ANCHORED, "attained")):
        shares = [row[2 + 2 * GATES.index(TAU)] for row in shapes if row[1] == name]
        left.barh(places + 0.14 * (i - 2.5), shares, 0.14, label=name, color=f"C{i}")
    left.set_yticks(places, REGIMES)
    left.invert_yaxis()
    left.set(xlabel=f"coverage at τ = {TAU}", title="Coverage (attained: none can have more)")
    left.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.4, -0.14), ncols=3)
    for i, name in enumerate((*BY_C, EFORM, "meter")):
        for row in widths:
            if row[0] == name:
                style = "o-" if row[1] == "half_step" else "x--"
                middle.plot(WIDTHS, row[2 : 2 + len(WIDTHS)], f"C{i}{style}", label=f"{name}, {row[1]}", markersize=4)
    middle.set(xlabel="bits of a code", ylabel="kv heads that fall back", title="Fallback over bits")
    middle.legend(fontsize="small")
    labels = [f"{scheme}\nτ = {gate}" for scheme in GATED for gate in GATES]
    for i, name in enumerate((*BY_C, EFORM, "two_sided", "meter", "attained")):
        counts = [row[3] for row in pages if row[2] == name]
        right.bar(np.arange(len(labels)) + 0.14 * (i - 2.5), counts, 0.14, label=name)
    right.set_xticks(np.arange(len(labels)), labels, fontsize="small")
    right.set(ylabel="pages repaired a cell", title="Page-ins", yscale="log")
    right.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    return figure
