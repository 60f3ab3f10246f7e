"""Where c comes from: half-step, witness and radius, with and without equaliser, sketch and bypass, at 8 to 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import activations
from experiments.activations import LENGTHS, TEXTS, Text
from experiments.beside import every_bound
from experiments.cells import EFORM, Account, Array, Cells, covered
from experiments.intervals import INTERVAL, over_prompts, spread
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
RICH = Kept(Layout(equalizer=True, sketch=4, witness=1), "both")
PLAIN = Kept(Layout(dither=64), "radius")
BYPASS = Kept(Layout(bypass=4, dither=64), "radius")
WITNESS = Kept(Layout(witness=1), "witness")
EQUALIZER = Kept(Layout(equalizer=True), "half_step")
STORES = (
    Kept(Layout(), "half_step"),
    WITNESS,
    Kept(Layout(witness=4), "witness"),
    PLAIN,
    Kept(Layout(sketch=1), "half_step"),
    Kept(Layout(group=32), "half_step"),
    Kept(Layout(group=32, bypass=4, dither=64), "radius"),
    Kept(Layout(bypass=4), "half_step"),
    Kept(Layout(bypass=2, dither=64), "radius"),
    BYPASS,
    EQUALIZER,
    Kept(Layout(equalizer=True, dither=64), "radius"),
    Kept(Layout(equalizer=True, witness=4), "witness"),
    Kept(Layout(equalizer=True, witness=4), "both"),
    DEFAULT,
    Kept(Layout(equalizer=True, sketch=1, dither=64), "radius"),
    Kept(Layout(equalizer=True, sketch=1, witness=1), "witness"),
    Kept(Layout(equalizer=True, sketch=1, witness=1), "both"),
    RICH,
    Kept(Layout(equalizer=True, sketch=4, dither=64), "radius"),
    Kept(Layout(equalizer=True, sketch=4, witness=1, bypass=1), "both"),
)

NAMED = (STORES[0], WITNESS, PLAIN, BYPASS, EQUALIZER, DEFAULT, RICH)


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
                kind = "radius: " if kept.source == "radius" else "half_step and witness: "
                values = account.bounds(cells, every=kept in NAMED, kind=kind)
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
        for kept in (STORES[0], WITNESS, PLAIN, DEFAULT, BYPASS)
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


def _tables(account: Account, texts: Sequence[Text], whole: Sequence[int], half: Sequence[int]) -> list[Table]:
    d = activations.captured(texts[0]).layers[0].k.shape[2]

    def value(kept: Kept, name: str, prompts: Sequence[int]) -> Array:
        return account(_key(kept), name, prompts)

    def spreads(kept: Kept, prompts: Sequence[int]) -> tuple[Cell, ...]:
        meter = value(kept, "meter", prompts)
        shares = [(meter <= tau).astype(np.float64) for tau in TAUS]
        return (*spread(shares[0]), *spread(shares[1]), *spread(meter, np.median))

    def stored(kept: Kept) -> tuple[Cell, ...]:
        return (kept.name, kept.layout.bytes(d) - Layout().bytes(d), kept.source)

    def every_text(title: str, statistic: Callable[[Array], Any]) -> Table:
        rows: list[tuple[Cell, ...]] = []
        for i, text in enumerate(texts):
            length = len(activations.captured(text).layers[0].k)
            shown = (float(statistic(value(kept, "meter", [i]))) for kept in NAMED)
            rows.append((text.domain, text.source, length, *shown))
        named = [f"{kept.name}, {kept.source}" for kept in NAMED]
        return Table(f"Every text and length: {title}", ("domain", "text", "tokens", *named), rows)

    judged: dict[str, Callable[[Array], Any]] = {
        f"coverage at τ = {TAUS[0]}": lambda meter: (meter <= TAUS[0]).mean(),
        f"coverage at τ = {TAUS[1]}": lambda meter: (meter <= TAUS[1]).mean(),
        "the largest meter": np.max,
    }
    columns = ("coverage τ = 0.2", INTERVAL, "0.1", INTERVAL, "median meter", INTERVAL)
    eight = [
        (
            *stored(kept),
            *spreads(kept, whole),
            *spread(value(kept, "true", whole), np.median),
            *spread(covered(value(kept, EFORM, whole))),
            *spread(value(kept, "mean c", whole), np.median),
        )
        for kept in STORES
    ]
    narrow = [(*stored(kept), bits, *spreads(kept.at(bits), half)) for bits in WIDTHS for kept in STORES]
    groups = [
        (label, kept.name, kept.source, *spreads(kept, prompts), *spread(value(kept, "true", prompts), np.median))
        for label, prompts in _groups(texts, whole).items()
        for kept in NAMED
    ]
    dithers: list[tuple[Cell, ...]] = [
        (
            period,
            *spreads(kept, whole),
            *spread(value(kept, "true", whole), np.median),
            float(value(kept, "true", whole).max()),
        )
        for period, kept in ((period, Kept(Layout(dither=period), "radius")) for period in PERIODS)
    ]
    return [
        Table(
            "8 bits, all texts; bytes beyond the codes and one scale, for a 16-bit model; c as attention weighs it",
            (
                "store",
                "extra bytes",
                "source",
                *columns,
                "median true",
                INTERVAL,
                "coverage by e-form",
                INTERVAL,
                "median mean c",
                INTERVAL,
            ),
            eight,
        ),
        Table(
            "The width of the codes, every second text",
            ("store", "extra bytes", "source", "bits", *columns),
            narrow,
        ),
        Table(
            "Domains (2048 tokens or a needle prompt), and two texts at each length, whose interval is their range",
            ("texts", "store", "source", *columns, "median true", INTERVAL),
            groups,
        ),
        *(every_text(title, statistic) for title, statistic in judged.items()),
        Table(
            "Tokens that share a dither vector (plain store, radius)",
            ("tokens", *columns, "median true", INTERVAL, "largest true"),
            dithers,
        ),
        *every_bound(("store, 8 bits", "source"), {(k.name, k.source): account.beside(_key(k), whole) for k in NAMED}),
    ]


def _groups(texts: Sequence[Text], whole: Sequence[int]) -> dict[str, list[int]]:
    """Texts of a domain, and the same texts at each length, by what a table calls them."""
    found: dict[str, list[int]] = {}
    for i in whole:
        found.setdefault(texts[i].domain, []).append(i)
    longer = {(text.domain, text.source) for text in LENGTHS}
    for i, text in sorted(enumerate(texts), key=lambda pair: pair[1].length):
        if (text.domain, text.source) in longer:
            found.setdefault(f"{text.length:,} tokens", []).append(i)
    return found


def plot(result: Result) -> Figure:
    """Coverage against bytes at 8 bits, and against the width of the codes."""
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    marks = {"half_step": "o", "witness": "v", "both": "s", "radius": "x"}
    for source, mark in marks.items():
        rows = [row for row in result.tables[0].rows if row[2] == source]
        left.plot([row[1] for row in rows], [row[5] for row in rows], mark, label=source)
    left.set(xlabel="extra bytes a token and head", ylabel="coverage at τ = 0.1", title="8 bits")
    left.set_xscale("symlog", base=2, linthresh=1)
    left.set_xticks((0, 1, 2, 4, 8, 16), ("0", "1", "2", "4", "8", "16"))
    left.legend()
    for kept in NAMED:
        rows = [row for row in result.tables[1].rows if (row[0], row[2]) == (kept.name, kept.source)]
        style = {"radius": "x--", "witness": "v:"}.get(kept.source, "o-")
        right.plot([row[3] for row in rows], [row[4] for row in rows], style, label=f"{kept.name} ({kept.source})")
    right.set(xlabel="bits of a code", ylabel="coverage at τ = 0.2", xticks=WIDTHS, title="Width")
    right.invert_xaxis()
    right.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure
