"""Needles over every scheme, ungated and gated: what the meter says, and what the gate rescues (Figs. 3, 4 and 6)."""

from __future__ import annotations

from itertools import product

import numpy as np
from matplotlib.figure import Figure

from experiments import model, needles
from experiments.intervals import coverage, over_prompts
from experiments.result import Cell, Result, Row, Table, Violations
from experiments.synthetic import TAU
from witcert.schemes import names

NAME = "rescue"
LOOSE = 5.0
GATES = (None, TAU, LOOSE)
QUICK = ("fp8_raw", "rtn8", "kivi2", "kvquant4")
SAFE = 0.99  # coverage that counts as high


def run(quick: bool = False) -> Result:
    """Answer the needle prompts under every scheme and gate."""
    schemes = QUICK if quick else tuple(names())
    specs, new_tokens = (needles.SPECS[:1], 13) if quick else (needles.SPECS, needles.NEW_TOKENS)
    answers = needles.ask(specs, product(schemes, GATES), new_tokens)

    def within(scheme: str, bound: str) -> list[needles.Array]:
        return [(values <= TAU).astype(float) for values in answers.cells(scheme, None, bound)]

    danger = [(true > TAU).astype(float) for true in answers.cells("kivi2", None, "true_tv")]
    baseline = np.array(answers.right(needles.UNCOMPRESSED))
    missed = checked = 0
    for scheme in schemes:
        for share, answered, was in zip(within(scheme, "meter"), answers.right(scheme), baseline, strict=True):
            if was and share.mean() >= SAFE:
                missed, checked = missed + (not answered), checked + 1
    rows = [Row("uncompressed: right", None, *coverage(baseline))]
    for scheme, right, covered, gated, loose in (
        ("kivi2", 23 / 24, 5e-5, 1.0, None),
        ("fp8_raw", None, 0.019, 1.0, 1.0),
        ("rtn8", None, 0.207, 1.0, 1.0),
        ("kvquant4", 1.0, 0.00066, None, None),
    ):
        rows += [
            Row(f"{scheme}: right", right, *coverage(answers.right(scheme))),
            Row(f"{scheme}: coverage by the e-form", covered, *over_prompts(within(scheme, "eform"))),
            Row(f"{scheme}: coverage by the meter", None, *over_prompts(within(scheme, "meter"))),
            Row(f"{scheme}, gate at τ = {TAU}: right", gated, *coverage(answers.right(scheme, TAU))),
            Row(f"{scheme}, gate at τ = {LOOSE:g}: right", loose, *coverage(answers.right(scheme, LOOSE))),
        ]
    rows += [
        Row("kivi2: cells with true TV > 0.2", 0.219, *over_prompts(danger)),
        Row(f"wrong answers where coverage is at least {SAFE}", 0, missed),
        Row(f"answers where coverage is at least {SAFE}", None, checked),
    ]
    broken, cells = answers.violations()
    above, behind = answers.over()
    return Result(
        NAME,
        "Figures 3, 4 and 6: what the meter says of a needle, and what the gate rescues",
        "section 6.3.9, Figures 3, 4 and 6, Table 18",
        {
            "model": model.name(),
            "prompts": ", ".join(spec.id for spec in specs),
            "task": needles.DESCRIPTION,
            "new_tokens": f"at most {new_tokens}",
            "tau_of_coverage": TAU,
            "gates": f"τ = {TAU} (certified), {LOOSE:g} (risk-ranked)",
            "calibration": "the shipped one, fitted on another text",
            "dither": "of int8_dither, drawn anew by every request",
        },
        unit="prompt under each scheme and gate",
        samples=len(specs),
        seed=None,
        rows=rows,
        violations=[
            Violations("meter >= true total variation", broken, cells),
            Violations("meter within τ behind a gate with τ < 1", above, behind),
        ],
        differs=[
            "The paper's prompts are longer and its model is a 7B one, which a raw cast to FP8 breaks; this one it does"
            " not break. What breaks here are the schemes of one and two bits: the gate rescues all of them.",
            "The paper's coverages are of 150 RULER prompts, its answers of 24 needle prompts; here both are of the"
            " same prompts. This reader adds a sketch direction to the witness.",
        ],
        tables=[
            Table(
                f"Every scheme; coverage at τ = {TAU}, behind a gate after the repairs",
                (
                    "scheme",
                    "gate",
                    "right",
                    "coverage",
                    "median meter",
                    "median true TV",
                    f"true TV > {TAU}",
                    "pages paged in, %",
                    "cells",
                ),
                [_entry(answers, scheme, tau) for scheme, tau in product(schemes, GATES)],
            )
        ],
        quick=quick,
    )


def _entry(answers: needles.Answers, scheme: str, tau: float | None) -> tuple[Cell, ...]:
    meter, true = (np.concatenate(answers.cells(scheme, tau, name)) for name in ("meter", "true_tv"))
    runs = [answer.run for answer in answers(scheme, tau)]
    return (
        scheme,
        "none" if tau is None else f"τ = {tau:g}",
        float(np.mean(answers.right(scheme, tau))),
        float((meter <= TAU).mean()) if len(meter) else None,
        float(np.median(meter)) if len(meter) else None,
        float(np.median(true)) if len(true) else None,
        float((true > TAU).mean()) if len(true) else None,
        None if tau is None else 100 * sum(r.pages_repaired for r in runs) / sum(r.pages for r in runs),
        len(meter),
    )


def plot(result: Result) -> Figure:
    """Answers and coverage by scheme, and coverage against the score."""
    rows = [(str(row[0]), str(row[1]), float(row[2] or 0), float(row[3] or 0)) for row in result.tables[0].rows]
    plain = sorted((row for row in rows if row[1] == "none"), key=lambda row: (row[3], row[2]))
    schemes = [row[0] for row in plain]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    gates = list(dict.fromkeys(row[1] for row in rows))
    for i, gate in enumerate(gates):
        score = {row[0]: row[2] for row in rows if row[1] == gate}
        name = "no gate" if gate == "none" else f"gate at {gate}"
        left.bar(np.arange(len(schemes)) + 0.28 * (i - 1), [score[s] for s in schemes], 0.26, label=f"right, {name}")
    left.plot(range(len(schemes)), [row[3] for row in plain], "k.-", label="coverage, no gate")
    left.set_xticks(range(len(schemes)), schemes, rotation=60)
    left.set_ylim(0, 1.35)
    left.legend(ncols=2, fontsize=8, loc="upper left")
    left.set_ylabel("share of prompts, of cells")
    labels: dict[tuple[float, float], list[str]] = {}
    for scheme, _, answered, share in plain:
        labels.setdefault((round(share, 1), answered), []).append(scheme)
        right.scatter(share, answered, color="C0", s=20)
    for (share, answered), together in labels.items():
        top = answered > 0.9
        right.annotate(
            ", ".join(together),
            (share, answered),
            (0 if top else 6, 6 if top else 0),
            textcoords="offset points",
            fontsize=7,
            rotation=60 if top else 0,
        )
    right.set(xlabel=f"coverage at τ = {TAU}, no gate", ylabel="right, no gate", xlim=(-0.05, 1.25), ylim=(-0.05, 1.55))
    right.set_yticks(np.linspace(0, 1, 6))
    return figure
