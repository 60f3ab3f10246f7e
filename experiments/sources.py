"""Where c comes from: half-step, witness and radius, with and without equaliser, sketch and bypass, at 8 to 4 bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from experiments import activations
from experiments.activations import LENGTHS, TEXTS, Text
from experiments.cells import EFORM, Account, Array, Cells, covered
from experiments.intervals import over_prompts
from experiments.result import Cell, Result, Row, Table
from experiments.stores import SEED, Attention, Layout, write
from experiments.synthetic import DELTA, TAU
from witcert_kernels import LayerCalibration
from witcert_ref.radius import delta_local

NAME = "sources"
WIDTHS = (8, 6, 5, 4)
PERIODS = (1, 16, 64)
TAUS = (0.2, 0.1)


@dataclass(frozen=True)
class Kept:
    """A store and the source of its c: half_step, witness, both (any query), or radius (a dithered store; where half of
    a step is less, that)."""

    layout: Layout
    source: str

    @property
    def name(self) -> str:
        layout = self.layout
        parts = [
            f"{layout.group}-channel groups" if layout.group else "",
            "equaliser" if layout.equalizer else "",
            f"bypass {layout.bypass}" if layout.bypass else "",
            f"sketch {layout.sketch}" if layout.sketch else "",
            f"witness {layout.witness}" if layout.witness else "",
        ]
        return ", ".join(filter(None, parts)) or "plain"

    def at(self, bits: int) -> Kept:
        return replace(self, layout=replace(self.layout, bits=bits))


DEFAULT = Kept(Layout(equalizer=True, sketch=1), "half_step")
PLAIN = Kept(Layout(dither=64), "radius")
BYPASS = Kept(Layout(bypass=4, dither=64), "radius")
STORES = (
    Kept(Layout(), "half_step"),
    PLAIN,
    Kept(Layout(group=32), "half_step"),
    Kept(Layout(group=32, bypass=4, dither=64), "radius"),
    Kept(Layout(bypass=4), "half_step"),
    Kept(Layout(bypass=2, dither=64), "radius"),
    BYPASS,
    Kept(Layout(equalizer=True), "half_step"),
    Kept(Layout(equalizer=True, dither=64), "radius"),
    Kept(Layout(equalizer=True, witness=4), "both"),
    DEFAULT,
    Kept(Layout(equalizer=True, sketch=1, dither=64), "radius"),
    Kept(Layout(equalizer=True, sketch=1, witness=1), "witness"),
    Kept(Layout(equalizer=True, sketch=1, witness=1), "both"),
    Kept(Layout(equalizer=True, sketch=4, witness=1), "both"),
    Kept(Layout(equalizer=True, sketch=4, dither=64), "radius"),
    Kept(Layout(equalizer=True, sketch=4, witness=1, bypass=1), "both"),
)


def read(attention: Attention, n: int, kept: Kept, calibration: LayerCalibration | None, local: float) -> Cells:
    """Layer n's cells under a store, with the c of its source."""
    store, q = write(attention, n, kept.layout, calibration), attention.q
    c = {
        "half_step": store.half_step,
        "witness": store.tier_a,
        "both": store.any_query,
        "radius": lambda q: store.fixed_trajectory(q, local),
    }[kept.source](q)
    return Cells(attention, store.error(q), c)


def measure(account: Account, texts: Iterable[tuple[int, Text]], stores: Sequence[Kept], quick: bool) -> None:
    """Account for these stores over these numbered texts."""
    for i, text in texts:
        captured = activations.captured(text)
        steps, heads, _ = captured.layers[0].q.shape
        local = delta_local(DELTA, len(captured.layers), heads, steps)
        for n in activations.layers(captured, quick):
            attention = Attention.of(captured, n)
            for kept in stores:
                layout, fitted = kept.layout, None
                if layout.equalizer or layout.sketch or layout.bypass:
                    fitted = activations.calibration(quick, bypass=layout.bypass, equalizer=layout.equalizer)[n]
                cells = read(attention, n, kept, fitted, local)
                values = cells.values((EFORM, "meter"))
                kind = "radius" if kept.source == "radius" else "half_step and witness"
                account.check(f"{kind}: meter and e-form >= true total variation", values.values(), [cells.tv])
                account.check(f"{kind}: c >= every logit error", [cells.c], [np.abs(cells.eps)])
                mean = (cells.p_tilde * cells.c).sum(-1)
                account.add(_key(kept), i, {"true": cells.tv, "mean c": mean, **values})


def _key(kept: Kept) -> str:
    return repr(kept)


def run(quick: bool = False) -> Result:
    """All stores at 8 bits on all texts and lengths, narrower ones on half of the texts, and three dither periods."""
    texts = activations.QUICK if quick else TEXTS + LENGTHS
    whole = range(len(activations.QUICK) if quick else len(TEXTS))
    half = list(whole)[::2]
    account = Account()
    numbered = list(enumerate(texts))
    measure(account, numbered, STORES, quick)
    for bits in WIDTHS[1:]:
        measure(account, [numbered[i] for i in half], [kept.at(bits) for kept in STORES], quick)
    periods = [Kept(Layout(dither=period), "radius") for period in PERIODS]
    measure(account, [numbered[i] for i in whole], [kept for kept in periods if kept not in STORES], quick)
    rows = [
        Row(f"{kept.name}, {kept.source}: coverage", None, *over_prompts(covered(account(_key(kept), "meter", whole))))
        for kept in (STORES[0], PLAIN, DEFAULT, BYPASS)
    ]
    return Result(
        NAME,
        "Sources of c",
        "sections 4.1 and 4.2, and beyond",
        {
            **activations.settings(texts),
            "tau": TAU,
            "delta_req": DELTA,
            "delta_local": "delta_req / (layers · query heads · query rows)",
            "dither_period": "64 where not said",
        },
        unit="cell of each store",
        samples=account(_key(DEFAULT), "true", whole).size,
        seed=SEED,
        rows=rows,
        violations=account.violations(),
        tables=_tables(account, texts, whole, half),
        quick=quick,
    )


def _shares(meter: Array) -> list[float]:
    return [float((meter <= tau).mean()) for tau in TAUS]


def _tables(account: Account, texts: Sequence[Text], whole: Sequence[int], half: Sequence[int]) -> list[Table]:
    d = activations.captured(texts[0]).layers[0].k.shape[2]
    columns = ("coverage τ = 0.2", "0.1", "median meter", "median true")
    eight: list[tuple[Cell, ...]] = []
    narrow: list[tuple[Cell, ...]] = []
    lengths: list[tuple[Cell, ...]] = []
    dithers: list[tuple[Cell, ...]] = []

    def cells(kept: Kept, prompts: Sequence[int]) -> tuple[Array, Array]:
        return account(_key(kept), "meter", prompts), account(_key(kept), "true", prompts)

    for kept in STORES:
        extra = kept.layout.bytes(d) - Layout().bytes(d)
        meter, true = cells(kept, whole)
        eform = account(_key(kept), EFORM, whole)
        mean = float(np.median(account(_key(kept), "mean c", whole)))
        known = [*_shares(meter), float(np.median(meter)), float(np.median(true))]
        eight.append((kept.name, extra, kept.source, *known, float((eform <= TAU).mean()), mean))
        wide = [_shares(cells(kept.at(bits), half)[0]) for bits in WIDTHS]
        medians = [float(np.median(cells(kept.at(bits), half)[0])) for bits in WIDTHS[1:]]
        narrow.append(
            (kept.name, extra, kept.source, *(share[0] for share in wide), *(share[1] for share in wide), *medians)
        )
    for i, text in enumerate(texts):
        row: list[Cell] = [text.domain, text.source, len(activations.captured(text).layers[0].k)]
        for kept in (DEFAULT, BYPASS):
            meter, true = cells(kept, [i])
            row += [*_shares(meter), float(meter.max()), float(np.median(true))]
        lengths.append(tuple(row))
    for period in PERIODS:
        meter, true = cells(Kept(Layout(dither=period), "radius"), whole)
        dithers.append((period, *_shares(meter), float(np.median(meter)), float(np.median(true)), float(true.max())))
    return [
        Table(
            "8 bits, all texts; bytes beyond the codes and one scale, for a 16-bit model; c as attention weighs it",
            ("store", "extra bytes", "source", *columns, "coverage by e-form", "median mean c"),
            eight,
        ),
        Table(
            "Narrower codes, every second text: coverage at τ = 0.2, at 0.1, and the median meter",
            (
                "store",
                "extra bytes",
                "source",
                *(f"{bits} bits" for bits in WIDTHS),
                *(f"{bits} bits, 0.1" for bits in WIDTHS),
                *(f"{bits} bits, median" for bits in WIDTHS[1:]),
            ),
            narrow,
        ),
        Table(
            f"Text and length: {DEFAULT.name} of half_step (any query), then {BYPASS.name} of radius",
            ("domain", "text", "tokens", *("coverage τ = 0.2", "0.1", "largest meter", "median true") * 2),
            lengths,
        ),
        Table(
            "Tokens that share a dither vector (plain store, radius)",
            ("tokens", *columns, "largest true"),
            dithers,
        ),
    ]


def plot(result: Result) -> Figure:
    """Coverage against bytes at 8 bits, and against the width of the codes."""
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    marks = {"half_step": "o", "witness": "v", "both": "s", "radius": "x"}
    for source, mark in marks.items():
        rows = [row for row in result.tables[0].rows if row[2] == source]
        left.plot([row[1] for row in rows], [row[4] for row in rows], mark, label=source)
    left.set(xlabel="extra bytes a token and head", ylabel="coverage at τ = 0.1", title="8 bits")
    left.set_xscale("symlog", base=2, linthresh=1)
    left.set_xticks((0, 1, 2, 4, 8, 16), ("0", "1", "2", "4", "8", "16"))
    left.legend()
    for row in result.tables[1].rows:
        if row[0] in ("plain", "equaliser", DEFAULT.name, "equaliser, sketch 4, witness 1", BYPASS.name):
            style = "x--" if row[2] == "radius" else "o-"
            right.plot(WIDTHS, row[3 : 3 + len(WIDTHS)], style, label=f"{row[0]} ({row[2]})")
    right.set(xlabel="bits of a code", ylabel="coverage at τ = 0.2", xticks=WIDTHS, title="Width")
    right.invert_xaxis()
    right.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure
