"""Queries that see the dither: Tier B's radius fails, half-step and witness do not (beyond section 4.2).

Tier B holds for queries that do not depend on the dither. Here they do: tokens are chosen, among samples of the model,
for the strain (error over radius) that their queries put on it; and, sharper, a query is taken from the span of a
head's real queries to point at one token's residual, where its strain is ‖Uᵀ r‖/(s √(L/6)), about √(d/2L) in the whole
space.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import activations, model, stores
from experiments.activations import Text
from experiments.cells import Account, Cells
from experiments.decoding import Array, Watch
from experiments.intervals import between, over_prompts
from experiments.result import Cell, Result, Row, Table, Violations
from experiments.stores import Attention, Layout
from experiments.synthetic import DELTA
from witcert import WitCertCache
from witcert.capture import shapes_of
from witcert.demo import prefill
from witcert.report import StepRecord
from witcert.truth import logits
from witcert_kernels import PackedPool
from witcert_kernels.philox import GRID_STEP
from witcert_ref.radius import delta_local

NAME = "adaptive"
LENGTH, DITHERS, PERIOD, EVERY = 1024, 2, 64, 4
RANKS = (1, 2, 4, 8, 16, 32, 64)
PREFIX, STEPS, CANDIDATES, REQUESTS = 192, 32, 8, 3
SEED = 0
RADIUS_HOLDS = "radius >= error, queries independent of the dither"
RADIUS_FAILS = "radius >= error, queries chosen after the dither"
HALF_STEP, WITNESS = "half-step >= error, any query", "witness >= error, any query"
METER = "meter of the any-query bounds >= true total variation"
METER_B = "meter of the radius >= true total variation, queries chosen after the dither"
SHIPPED = "meter of the cache >= true total variation, all trajectories"
CHOSEN, DRAWN = "radius >= error, trajectories chosen for strain", "radius >= error, trajectories drawn"
HALF_STEP_IN_MODEL = "half-step >= error, all trajectories"
WITNESS_IN_MODEL = "witness >= error, all trajectories"


def local() -> float:
    """δ of a cell: 0.01 over the model's layers, query heads and positions."""
    config = model.load()[0].config
    shape = shapes_of(config)
    return delta_local(DELTA, shape["layers"], shape["heads"], config.max_position_embeddings)


def strain(error: Tensor, c: Tensor, hidden: Tensor | None = None) -> Tensor:
    """The largest error over its bound of each query, [kv_heads, rows]."""
    ratio = error.abs() / c
    return (ratio if hidden is None else ratio.masked_fill(hidden, 0.0)).amax(-1)


def aimed(store: stores.Store, directions: Tensor) -> Tensor:
    """The query of a span that strains the radius most: directions [kv_heads, r, d] -> [kv_heads, 1, d]."""
    assert store.steps is not None
    inside = store.residual @ directions.transpose(1, 2)  # [kv_heads, tokens, r]
    token = (inside.norm(dim=-1) / store.steps[..., 0]).argmax(-1)
    chosen = inside[torch.arange(len(token)), token]
    return (chosen[:, None, :] @ directions) / chosen.norm(dim=-1)[:, None, None]


def offline(texts: list[Text], ranks: tuple[int, ...], quick: bool) -> Account:
    """Strains of real queries and of those aimed within the span of their first r principal directions."""
    account = Account()
    delta = local()
    for i, text in enumerate(texts):
        captured = activations.captured(text, None)
        for n in activations.layers(captured, quick):
            whole = Attention.of(captured, n)
            directions = torch.linalg.svd(whole.q, full_matrices=False).Vh
            attention = replace(whole, q=whole.q[:, ::EVERY], hidden=whole.hidden[::EVERY])
            norm = attention.q.norm(dim=-1).mean(-1)[:, None, None]
            for seed in range(DITHERS):
                store = stores.write(attention, n, Layout(dither=PERIOD, witness=1), None, seed + SEED)
                assert store.steps is not None
                queries = {"real queries": attention.q}
                queries |= {f"span of {r}": norm * aimed(store, directions[:, :r]) for r in ranks}
                for name, q in queries.items():
                    real = name == "real queries"
                    hidden = attention.hidden if real else None
                    error, radius = store.error(q), store.radius(q, delta)
                    half = attention.sm_scale * q.abs() @ store.steps.transpose(1, 2) / 2
                    witness = store.tier_a(q)
                    found = strain(error, radius, hidden)
                    account.check(
                        RADIUS_HOLDS if real else RADIUS_FAILS, [np.ones(found.numel())], [found.flatten().numpy()]
                    )
                    for claim, bound in ((HALF_STEP, half), (WITNESS, witness)):
                        account.check(claim, [bound.flatten().numpy()], [error.abs().flatten().numpy()])
                    values = {"strain": found.flatten().numpy()}
                    values |= {
                        "half-step": strain(error, half, hidden).flatten().numpy(),
                        "witness": strain(error, witness, hidden).flatten().numpy(),
                    }
                    if not real:
                        rows = torch.zeros(q.shape[1], attention.k.shape[1], dtype=torch.bool)
                        there = replace(attention, q=q, hidden=rows)
                        b, any_query = Cells(there, error, radius), Cells(there, error, torch.minimum(half, witness))
                        meter = b.values(["meter"])["meter"]
                        account.check(METER_B, [meter], [b.tv])
                        account.check(METER, any_query.values(["meter"]).values(), [any_query.tv])
                        values |= {"TV over meter": b.tv / meter}
                    account.add(name, i, values)
    return account


@dataclass
class Strained:
    """Strain of each replica in the step that goes on, and the largest of a request so far."""

    delta: float
    now: Tensor

    def __call__(self, record: StepRecord) -> dict[str, Tensor]:
        """What `Watch` keeps: true total variation, strain on radius, half-step and stored witness, [rows, heads]."""
        read, pool = record.read, record.read.store.pool
        assert isinstance(pool, PackedPool)
        layout = pool.layout
        true, strains, halves, witnesses = [], [], [], []
        for i, length in enumerate(read.lengths):
            exact, stored = logits(read, i)
            slots = read.store.slots(torch.full((length,), read.sequences[i]), torch.arange(length))
            s = pool.k_scale.flatten(0, 1)[slots].to(torch.float64).mean(-1)  # one scale a token
            q = read.q[i].to(torch.float64)
            scale = layout.head_dim**-0.5 if read.sm_scale is None else read.sm_scale
            log_term = np.log(2 * length / self.delta)
            unit = scale * (q.norm(dim=-1) * np.sqrt(log_term / 6) + q.abs().sum(-1) * GRID_STEP / 2)  # [heads]
            steps = s.T.repeat_interleave(len(q) // layout.kv_heads, 0)  # [heads, tokens]
            error = (stored - exact)[0].abs()
            true.append((exact[0].softmax(-1) - stored[0].softmax(-1)).abs().sum(-1) / 2)
            strains.append((error / (unit[:, None] * steps)).amax(-1))
            halves.append((error / (scale * q.abs().sum(-1)[:, None] * steps / 2)).amax(-1))
            # a byte of the one band is 1/508 of the steps' norm in it
            byte = pool.witness.flatten(0, 1)[slots].to(torch.float64)[..., 0]
            size = (byte * s * layout.head_dim**0.5 / 508).T.repeat_interleave(len(q) // layout.kv_heads, 0)
            witnesses.append((error / (scale * q.norm(dim=-1)[:, None] * size)).amax(-1))
        found = torch.stack(strains)
        self.now = torch.maximum(self.now, found.amax(-1))
        return {
            "true": torch.stack(true),
            "strain": found,
            "half-step": torch.stack(halves),
            "witness": torch.stack(witnesses),
        }


def trajectory(ids: Tensor, steps: int, adapt: bool, seed: int) -> tuple[Watch, list[int]]:
    """Decode a text's continuation: each token the sample of most strain, or the first one.

    The samples of a step are drawn from the model's distribution at temperature 1, so the first alone is an ordinary
    continuation. All are watched, [layers · steps, samples, heads]; with the one that each step goes on with.
    """
    network, _ = model.load()
    prefix = prefill(network, ids[None])
    cache = WitCertCache(network.config, "int8_dither", backing=True, seed=seed, witness_bands=1)
    cache.preload([(k.expand(CANDIDATES, -1, -1, -1), v.expand(CANDIDATES, -1, -1, -1)) for k, v in prefix.layers])
    strained = Strained(local(), torch.zeros(CANDIDATES, dtype=torch.float64))
    watch = Watch(cache, strained)
    draw = torch.Generator().manual_seed(seed)
    tokens, taken = prefix.next_token.expand(CANDIDATES, 1), []
    network.set_attn_implementation("witcert")
    with torch.inference_mode():
        for _ in range(steps):
            strained.now.zero_()
            out: Any = network(tokens, past_key_values=cache, use_cache=True).logits[:, -1]
            best = int(strained.now.argmax()) if adapt else 0
            taken.append(best)
            cache.batch_select_indices(torch.full((CANDIDATES,), best))
            chances = out[best].to(torch.float64).softmax(-1)
            tokens = torch.multinomial(chances, CANDIDATES, replacement=True, generator=draw)[:, None]
    network.set_attn_implementation("sdpa")
    return watch, taken


def run(quick: bool = False) -> Result:
    """Both attacks, each beside queries that do not depend on the dither."""
    network, tokenizer = model.load()
    head_dim = shapes_of(network.config)["head_dim"]
    length, prefix, steps, requests = (128, 64, 4, 1) if quick else (LENGTH, PREFIX, STEPS, REQUESTS)
    ranks = (*(r for r in RANKS if r < head_dim), head_dim)
    texts = [Text("prose", "story", length), Text("code", "queue", length)][: 1 if quick else 2]
    account = offline(texts, ranks, quick)
    sources = [Text("prose", "haystack", prefix), Text("code", "argparse", prefix), Text("prose", "licence", prefix)]
    followed = {
        adapt: [
            trajectory(activations.ids(text, tokenizer), steps, adapt, SEED + i)
            for i, text in enumerate(sources[:requests])
        ]
        for adapt in (True, False)
    }
    watches = {adapt: [watch for watch, _ in group] for adapt, group in followed.items()}
    broken, cells = map(sum, zip(*(w.violations() for group in watches.values() for w in group), strict=True))

    def path(adapt: bool, name: str) -> list[Array]:
        """A number along the tokens that were taken, [steps, layers · heads] of each request."""
        found = []
        for watch, taken in followed[adapt]:
            step, value = watch.all("step")[:, 0, 0], watch.all(name)
            found.append(
                np.stack([value[step == s, row].ravel() for s, row in zip(np.unique(step), taken, strict=True)])
            )
        return found

    def largest(adapt: bool, name: str = "strain") -> list[Array]:
        return [values.max(-1) for values in path(adapt, name)]

    def ratios(adapt: bool) -> list[float]:
        pairs = zip(path(adapt, "true"), path(adapt, "meter"), strict=True)
        return [float((true / meter).max()) for true, meter in pairs]

    log_term = float(np.log(2 * length / local()))
    free = f"span of {ranks[-1]}"

    def over(name: str, part: str, statistic: Any) -> tuple[float, tuple[float, float]]:
        return over_prompts(list(account(name, part)), statistic)

    table: list[tuple[Cell, ...]] = []
    for name in ("real queries", *(f"span of {r}" for r in ranks)):
        value = account(name, "strain").ravel()
        table.append(
            (
                name,
                value.size,
                float(np.median(value)),
                float(value.max()),
                float((value > 1).mean()),
                float(account(name, "half-step").max()),
                float(account(name, "witness").max()),
                None if name == "real queries" else float(account(name, "TV over meter").max()),
                *(between(over(name, "strain", statistic)[1]) for statistic in (np.median, np.max)),
            )
        )
    in_model: list[tuple[Cell, ...]] = [
        (
            "chosen for strain" if adapt else "drawn",
            sum(len(x) for x in largest(adapt)),
            float(np.median(np.concatenate(largest(adapt)))),
            float(max(x.max() for x in largest(adapt))),
            float(max(x.max() for x in largest(adapt, "half-step"))),
            float(max(x.max() for x in largest(adapt, "witness"))),
            max(ratios(adapt)),
            *(between(over_prompts(largest(adapt), statistic)[1]) for statistic in (np.median, np.max)),
        )
        for adapt in (True, False)
    ]

    def strained(claim: str, part: str, *adapt: bool) -> Violations:
        values = np.concatenate([w.all(part).ravel() for key in adapt for w in watches[key]])
        return Violations(claim, int((~(values <= 1)).sum()), values.size)

    return Result(
        NAME,
        "Queries that see the dither",
        "section 4.2, “Scope of the probabilistic guarantee”, and beyond",
        {
            "model": model.name(),
            "head_dim": head_dim,
            "texts": ", ".join(text.name for text in texts),
            "dithers": f"{DITHERS} of each text, a vector for 64 tokens; one of each trajectory, by its number",
            "delta_local": f"{DELTA} over the model's layers, query heads and positions: {local():.3g}",
            "trajectories": f"{requests} of {steps} steps after {prefix} tokens; of {CANDIDATES} samples a step at"
            " temperature 1, the one of most strain is chosen, or the first is drawn",
            "store": "int8_dither, a scale a token, one band of witness, no calibration",
        },
        unit="text, all its layers and kv heads",
        samples=len(texts),
        seed=SEED,
        rows=[
            Row(
                "trajectory chosen for strain: largest true TV over meter (paper: free decoding)",
                0.536,
                *over_prompts(np.array(ratios(True))[:, None], np.max),
            ),
            Row("trajectory drawn: largest strain", None, *over_prompts(largest(False), np.max)),
            Row("trajectory chosen for strain: largest strain", None, *over_prompts(largest(True), np.max)),
            Row("real queries: largest strain", None, *over("real queries", "strain", np.max)),
            Row("free query: largest strain", None, *over(free, "strain", np.max)),
            Row("free query: median strain", None, *over(free, "strain", np.median)),
            Row("free query: √(d/2L)", None, float(np.sqrt(head_dim / 2 / log_term))),
            Row("free query: share that violates the radius", None, *over(free, "strain", lambda x: (x > 1).mean())),
            Row("free query: largest error over half-step", None, *over(free, "half-step", np.max)),
            Row("free query: largest error over witness", None, *over(free, "witness", np.max)),
            Row("free query: largest true TV over the radius's meter", None, *over(free, "TV over meter", np.max)),
        ],
        violations=[
            Violations(SHIPPED, broken, cells),
            strained(CHOSEN, "strain", True),
            strained(DRAWN, "strain", False),
            strained(HALF_STEP_IN_MODEL, "half-step", True, False),
            strained(WITNESS_IN_MODEL, "witness", True, False),
            *account.violations(),
        ],
        differs=[
            "The paper decodes freely and counts cells whose true TV exceeds the certificate. A free text does not look"
            " for the dither, so this measures luck; here tokens and queries do look for it.",
            "A query that points at one token's residual breaks the radius of that token, not the meter: little of its"
            " attention goes there. Nothing proves that for every query, so a number that used the radius is labelled"
            " fixed_trajectory.",
        ],
        tables=[
            Table(
                "Queries of each layer, kv head and dither; strain is a query's largest error over radius",
                (
                    "queries",
                    "number",
                    "median strain",
                    "largest strain",
                    "share over 1",
                    "error over half-step",
                    "error over witness",
                    "TV over the radius's meter",
                    "median strain, 95 %",
                    "largest strain, 95 %",
                ),
                table,
            ),
            Table(
                "Trajectories; strain is the largest of a step",
                (
                    "tokens",
                    "steps",
                    "median strain",
                    "largest strain",
                    "error over half-step",
                    "error over witness",
                    "TV over meter",
                    "median strain, 95 %",
                    "largest strain, 95 %",
                ),
                in_model,
            ),
            Table(
                "√(d/2L), what a free query reaches, by head dimension",
                ("head dim", "strain"),
                [(d, float(np.sqrt(d / 2 / log_term))) for d in (32, 64, 128, 256)],
            ),
        ],
        quick=quick,
        points={
            "chosen for strain": [x.tolist() for x in largest(True)],
            "drawn": [x.tolist() for x in largest(False)],
        },
    )


def plot(result: Result) -> Figure:
    """Strain over the span that a query may come from, and along trajectories."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    spans = [row for row in result.tables[0].rows if str(row[0]).startswith("span")]
    points = np.array([[float(str(row[0]).split()[-1]), *row[2:4], *row[5:7]] for row in spans], float)
    left.plot(points[:, 0], points[:, 2], "C3o-", label="error over radius, largest")
    left.plot(points[:, 0], points[:, 1], "C3.--", label="median")
    left.plot(points[:, 0], points[:, 4], "C0.-", label="over witness, largest")
    left.plot(points[:, 0], points[:, 3], "C2.-", label="over half-step, largest")
    left.axhline(float(result.tables[0].rows[0][3] or 0), color="C1", linestyle=":", label="over radius, real queries")
    left.axhline(1, color="black", linewidth=0.8)
    left.set_xscale("log", base=2)
    left.set(xlabel="principal directions of the real queries", ylabel="error over bound", ylim=(0, None))
    left.legend(fontsize=7)
    for i, (name, requests) in enumerate(result.points.items()):
        for j, values in enumerate(requests):
            right.plot(values, f"C{i}-", linewidth=1, label=name if j == 0 else None)
    right.axhline(1, color="black", linewidth=0.8)
    right.set(xlabel="step", ylabel="largest error over radius", ylim=(0, 1.1))
    right.legend(fontsize=7)
    return figure
