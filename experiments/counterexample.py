"""Two plausible certificates that are not bounds (paper, sections 3 and 6.1.1)."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from experiments.result import Cell, Result, Row, Table, Violations
from witcert_ref import bounds
from witcert_ref.tv import tilt, total_variation

NAME = "counterexample"
HALVES, ERRORS = [0.5, 0.5], [0.1, -0.1]
RARE = float(np.exp(-20))  # mass of one token that nothing is known about


def run(quick: bool = False) -> Result:
    """Evaluate both at the errors that refute them; `quick` changes nothing."""
    c = np.abs(ERRORS)
    truth = float(total_variation(tilt(HALVES, ERRORS), HALVES))
    dispersion = float(bounds.dispersion_unsound(HALVES, c))
    spike, spike_c, spike_errors = [1 - RARE, RARE], [0.0, 20.0], [0.0, -20.0]
    moved = float(total_variation(tilt(spike, spike_errors), spike))
    averaged = float(bounds.variance_averaged_unsound(spike, spike_c))
    cases = (("dispersion", HALVES, c, truth), ("variance averaged", spike, spike_c, moved))
    table: list[tuple[Cell, ...]] = []
    broken = 0
    for name, p, bound, true in cases:
        values = [float(f(p, bound)) for f in (bounds.meter, bounds.eform, bounds.two_sided, bounds.rc_tanh)]
        broken += sum(value < true for value in values)
        table.append((name, true, bounds.worst_case(p, bound), *values))
    return Result(
        NAME,
        "The counterexample",
        "section 3, equation (1)",
        {"p_tilde": HALVES, "c": c.tolist(), "eps": ERRORS, "averaged_p_tilde": spike, "averaged_c": spike_c},
        unit="distribution over two tokens",
        samples=len(cases),
        seed=None,
        rows=[
            Row("true total variation", 0.049834, truth),
            Row("dispersion form", 0.006423, dispersion),
            Row("factor by which it fails", 7.8, truth / dispersion),
            Row("true total variation, one rare token with c = 20", None, moved),
            Row("variance-averaged form", None, averaged),
            Row("factor by which it fails, variance averaged", None, moved / averaged),
        ],
        violations=[
            Violations("dispersion form >= true total variation", int(dispersion < truth), 1),
            Violations("variance-averaged form >= true total variation", int(averaged < moved), 1),
            Violations("meter, eform, two_sided, rc_tanh >= true total variation", broken, 4 * len(cases)),
        ],
        tables=[
            Table(
                "What holds at the same errors",
                ("case", "true", "worst case", "meter", "eform", "two_sided", "rc_tanh"),
                table,
            )
        ],
        quick=quick,
    )


def plot(result: Result) -> Figure:
    """True total variation and both refuted forms."""
    values = {row.quantity: row.ours for row in result.rows}
    figure = Figure(figsize=(6, 3), layout="constrained")
    names = (
        "true total variation",
        "dispersion form",
        "true total variation, one rare token with c = 20",
        "variance-averaged form",
    )
    axes = figure.subplots()
    axes.barh(names, [values[name] for name in names], color=["C0", "C3", "C0", "C3"])
    axes.set_xscale("log")
    axes.invert_yaxis()
    return figure
