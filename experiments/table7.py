"""The quad report without its latencies (paper, section 6.3.1, Table 7)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from experiments.beside import every_bound
from experiments.intervals import bootstrap, columns, coverage, share_of, spread
from experiments.result import Cell, Result, Row, Table, Violations, comparison
from experiments.synthetic import (
    BLOCK,
    BOUNDS,
    DELTA,
    DITHER_LEVELS,
    NEAREST_LEVELS,
    QUERIES,
    SCALES,
    SPLITS,
    TAU,
    Array,
    Store,
    attend,
    block_store,
    gaussian,
    split_of,
    token_dither,
    unsound,
)
from witcert_ref.radius import delta_local
from witcert_ref.store import block_bytes

NAME = "table7"
HEAD_DIM, GROUP_HEADS, PAIRS, SEED = 128, 6, 4, 0
INT4_LEVELS = 7.0
METHODS = {"RTN-INT8": (8.5e-3, 129.0), "RTN-INT4": (1.6e-1, 65.0), "WitCert-INT8": (9.0e-3, 145.1)}
Setting = tuple[float, str]  # scale of the queries, split of the budget
PLAIN: Setting = (1.0, "24 cells")
INFERRED: Setting = (3.0, "model")  # from the errors of Table 14


def stores(k: Array, xi: Array) -> dict[str, Store]:
    """The keys [tokens, d] as each method reads them."""
    return {
        "RTN-INT8": block_store(k, levels=NEAREST_LEVELS),
        "RTN-INT4": block_store(k, levels=INT4_LEVELS),
        "WitCert-INT8": block_store(k, bypass=PAIRS, levels=DITHER_LEVELS, xi=xi),
    }


def any_of(passed: np.ndarray) -> np.ndarray:
    """Where a group of 6 query heads needs its kv head: [n] -> [n / 6]."""
    return np.asarray(~passed.reshape(-1, GROUP_HEADS).all(-1))


def compare(found: dict[tuple[Setting, str, str], Array], at: Setting, tokens: int) -> list[Row]:
    """The rows of the table, in one setting."""
    size = {
        "RTN-INT8": block_bytes(tokens, HEAD_DIM, 0) / tokens,
        "RTN-INT4": block_bytes(tokens, HEAD_DIM, 0) / tokens - HEAD_DIM / 2,  # two codes a byte
        "WitCert-INT8": block_bytes(tokens, HEAD_DIM, PAIRS) / tokens,
    }
    rows: list[Row] = []
    for method, (error, per_token) in METHODS.items():
        rows.append(Row(f"{method}: relative output error", error, *bootstrap(found[at, method, "error"], np.mean)))
        rows.append(Row(f"{method}: bytes a token", per_token, size[method]))
    mean = {method: float(found[at, method, "error"].mean()) for method in METHODS}
    eform, meter = (found[at, "WitCert-INT8", name] <= TAU for name in ("eform (paper)", "meter"))
    return [
        *rows,
        Row("RTN-INT4 over RTN-INT8, errors", 1.6e-1 / 8.5e-3, mean["RTN-INT4"] / mean["RTN-INT8"]),
        Row("WitCert-INT8 over RTN-INT8, errors", 9.0e-3 / 8.5e-3, mean["WitCert-INT8"] / mean["RTN-INT8"]),
        Row("WitCert-INT8: coverage", 0.792, *coverage(eform)),
        Row("WitCert-INT8: fallback, any of 6", 0.75, *coverage(any_of(eform))),
        Row("WitCert-INT8: coverage by the meter", None, *coverage(meter)),
        Row("RTN-INT8: coverage by the meter of half-step", None, *coverage(found[at, "RTN-INT8", "meter"] <= TAU)),
    ]


def run(quick: bool = False) -> Result:
    """Output error, bytes and coverage of three methods, over the scale of the queries and the split of δ."""
    tokens, n_stores = (4096, 1) if quick else (32768, 4)
    settings = [(scale, split) for scale in SCALES for split in SPLITS]
    parts: dict[tuple[Setting, str, str], list[Array]] = {}
    broken = bounded = outside = checks = 0
    for seed in range(SEED, SEED + n_stores):
        rng = np.random.default_rng(seed)
        k, base = gaussian(rng, tokens, HEAD_DIM), rng.standard_normal((QUERIES, HEAD_DIM))
        for method, store in stores(k, token_dither(seed, tokens, HEAD_DIM)).items():
            for scale, split in settings:
                q, local = scale * base, delta_local(DELTA, *SPLITS[split])
                c = store.radius(q, local) if method == "WitCert-INT8" else store.half_step(q)
                cells = attend(q, k, store, c)
                values = {name: BOUNDS[name](cells.p_tilde, cells.c) for name in BOUNDS}
                broken, bounded = map(sum, zip((broken, bounded), unsound(values, cells.tv), strict=True))
                outside, checks = outside + int(cells.outside().sum()), checks + QUERIES
                for name, value in {"true": cells.tv, "error": cells.output_error, **values}.items():
                    parts.setdefault(((scale, split), method, name), []).append(value)
    found = {key: np.concatenate(values) for key, values in parts.items()}
    kept = [(at, m) for at in settings for m in METHODS if m == "WitCert-INT8" or at[1] == PLAIN[1]]
    sweep: list[tuple[Cell, ...]] = [
        (
            at[0],
            at[1] if method == "WitCert-INT8" else None,
            method,
            *spread(found[at, method, "error"]),
            *(x for name in ("true", "eform (paper)", "meter") for x in spread(found[at, method, name], np.median)),
            *(x for name in ("eform (paper)", "meter") for x in share_of(any_of(found[at, method, name] <= TAU))),
        )
        for at, method in kept
    ]
    beside = {
        (at[0], at[1] if method == "WitCert-INT8" else None, method): {n: found[at, method, n] for n in BOUNDS}
        for at, method in kept
    }
    return Result(
        NAME,
        "Table 7: error, bytes and coverage of three methods",
        "section 6.3.1, Table 7",
        {
            "tokens": tokens,
            "head_dim": HEAD_DIM,
            "queries": QUERIES,
            "stores": n_stores,
            "block": BLOCK,
            "bypass_pairs": PAIRS,
            "tau": TAU,
            "delta_req": DELTA,
            "delta_local": f"{split_of(PLAIN[1])}; split “model”: {split_of(INFERRED[1])}",
            "keys": "N(0, 1), float16 precision",
            "queries_drawn": "N(0, 1) times the scale; 1 in the first comparison",
            "c": "radius for WitCert-INT8 (queries that do not depend on the dither), half-step for RTN (any query)",
        },
        unit="query over one of the stores",
        samples=n_stores * QUERIES,
        seed=SEED,
        rows=compare(found, PLAIN, tokens),
        violations=[
            Violations("every bound >= true and attained total variation", broken, bounded),
            Violations("all logit errors within c", outside, checks),
        ],
        differs=[
            "The paper states neither the scale of its queries and keys nor how its harness splits δ, so the first"
            " comparison takes standard normal ones and splits δ over the 24 cells at hand; the second has the scale"
            " and the split that are inferred at Table 14.",
            "The paper's 0.792 is 19 of 24 queries, whose own 95 % interval is 0.578 – 0.929.",
            "Latencies and the error of a float16 kernel are the paper's hardware's: the reference here is float64.",
        ],
        tables=[
            replace(comparison(compare(found, INFERRED, tokens)), title="At scale 3, δ split over a model"),
            Table(
                "Scale of the queries and split of δ (half-step has none)",
                (
                    "scale",
                    "split",
                    "method",
                    *columns(
                        "error",
                        "median true",
                        "median eform (paper)",
                        "median meter",
                        "fallback, eform, any of 6",
                        "fallback, meter, any of 6",
                    ),
                ),
                sweep,
            ),
            *every_bound(("scale", "split", "method"), beside),
        ],
        quick=quick,
    )


def plot(result: Result) -> Figure:
    """Output error against the scale of the queries."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for i, (method, (error, _)) in enumerate(METHODS.items()):
        rows = [row for row in result.tables[1].rows if row[1] in (None, PLAIN[1]) and row[2] == method]
        points = np.array([(row[0], row[3]) for row in rows], float)
        axes.semilogy(points[:, 0], points[:, 1], f"C{i}o-", label=method)
        axes.axhline(error, color=f"C{i}", linestyle=":")
    axes.set(xlabel="scale of the queries", ylabel="relative output error (dotted: paper)")
    axes.legend()
    return figure
