"""One layer compressed badly, or some: what its meters say and what reaches the output (paper, section 6.4.1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor

from experiments import decoding, model, needles
from experiments.activations import Text
from experiments.decoding import Array, Forced
from experiments.intervals import columns, coverage, over_prompts, share_of, spread
from experiments.result import Cell, Result, Row, Table, Violations
from experiments.synthetic import TAU
from witcert import WitCertCache, haystack
from witcert.capture import shapes_of
from witcert.demo import Prefix, decode, prefill
from witcert.schemes import Scheme
from witcert.store import LayerStore

NAME = "pollution"
SCHEME = "kivi2"
FLOAT16 = Scheme("float16", lambda k: k, lambda v: v, bits=16)
SOURCES = (("prose", "story"), ("code", "queue"), ("prose", "haystack"))
LENGTH, STEPS = 263, 6
FRACTIONS = 6


class Polluted(WitCertCache):
    """A cache that compresses some layers by a black-box scheme and keeps the others in float16.

    Raises:
        ValueError: as :class:`WitCertCache`.
    """

    def __init__(self, config: Any, scheme: str, polluted: Iterable[int], calibration: Any) -> None:
        super().__init__(config, scheme, None, calibration, backing=True)
        self.polluted = frozenset(polluted)

    def _new_store(self, index: int, k: Tensor, v: Tensor, batch: int) -> LayerStore:
        store = super()._new_store(index, k, v, batch)
        if index not in self.polluted:
            store.scheme = FLOAT16
        return store


def answers(
    prompts: list[tuple[haystack.NeedlePrompt, Prefix]], polluted: Iterable[int], new_tokens: int
) -> list[bool]:
    """Which needle prompts are answered with these layers polluted."""
    network, tokenizer = model.load()
    network.set_attn_implementation("witcert")
    right, layers = [], frozenset(polluted)
    for prompt, prefix in prompts:
        cache = Polluted(network.config, SCHEME, layers, decoding.calibration())
        cache.preload(prefix.layers)
        stop = {tokenizer.eos_token_id}
        tokens = decode(network, cache, prefix.next_token, new_tokens, stop, lambda _: None)
        right.append(prompt.is_answered_by(tokenizer.decode(tokens, skip_special_tokens=True)))
    network.set_attn_implementation("sdpa")
    return right


def run(quick: bool = False) -> Result:
    """Pollute each layer alone, then more and more of them."""
    network, tokenizer = model.load()
    count = shapes_of(network.config)["layers"]
    length, steps, sources, specs = (
        (161, 2, SOURCES[:2], needles.SPECS[:1]) if quick else (LENGTH, STEPS, SOURCES, needles.SPECS[:2])
    )
    new_tokens = 13 if quick else needles.NEW_TOKENS
    texts = [Text(domain, source, length) for domain, source in sources]
    read = decoding.reference(texts, steps)
    prompts = [(p, prefill(network, p.input_ids)) for p in (haystack.prompt(tokenizer, spec) for spec in specs)]
    single = list(range(0, count, max(1, count // 3) if quick else 1))
    nested = sorted({round(count * i / FRACTIONS) for i in range(FRACTIONS + 1)}) if not quick else [0, count]
    sets = {f"layer {n}": [n] for n in single} | {f"first {n}": list(range(n)) for n in nested}
    found: dict[str, Forced] = {}
    right: dict[str, list[bool]] = {}
    for name, layers in sets.items():
        found[name] = decoding.forced(read, Polluted(network.config, SCHEME, layers, decoding.calibration()))
        right[name] = answers(prompts, layers, new_tokens)
    none, every = "first 0", f"first {count}"
    broken, cells = map(sum, zip(*(run.watch.violations() for run in found.values()), strict=True))

    def inside(name: str, part: str, polluted: bool) -> list[Array]:
        watch = found[name].watch
        return [
            value[np.isin(layer, sets[name]) == polluted]
            for value, layer in zip(watch.of(part), watch.of("layer"), strict=True)
        ]

    def share(drawn: Array) -> float:
        return float(drawn[::2].sum() / drawn[1::2].sum())

    alone = [f"layer {n}" for n in single]
    baseline = np.array(right[none])
    lost = [name for name in alone if (baseline & ~np.array(right[name])).any()]
    kl = {name: run.kl for name, run in found.items()}
    total = np.sum([kl[name] - kl[none] for name in alone], axis=0) * count / len(alone)
    meters = [float(np.mean(np.concatenate(inside(name, "meter", True)))) for name in alone]
    truths = [float(np.mean(np.concatenate(inside(name, "true", True)))) for name in alone]
    output = [float(kl[name].mean()) for name in alone]
    return Result(
        NAME,
        "One layer polluted, and more of them",
        "section 6.4.1",
        {
            "model": model.name(),
            "layers": count,
            "scheme": f"{SCHEME} in the polluted layers, float16 in the others",
            "texts": ", ".join(text.name for text in texts),
            "steps": steps,
            "prompts": ", ".join(spec.id for spec in specs),
            "tau": TAU,
        },
        unit="text, teacher-forced, under each set of polluted layers",
        samples=len(texts),
        seed=None,
        rows=[
            Row("single layers that lose an answer (paper: of 28)", 0, len(lost)),
            Row("all layers: right", 0.958, *coverage(right[every])),
            Row("no layer: right", None, *coverage(right[none])),
            Row("all layers: KL, nats", None, *over_prompts(kl[every])),
            Row("one layer: KL, mean over layers", None, *over_prompts(np.mean([kl[name] for name in alone], axis=0))),
            Row("one layer: KL, the worst layer", None, *over_prompts(kl[alone[int(np.argmax(output))]])),
            Row("no layer: KL, nats", None, *over_prompts(kl[none])),
            Row(
                "KL of all layers over the sum of single ones",
                None,
                *over_prompts(np.stack([kl[every], total], -1), share),
            ),
            Row(
                "one layer: cells of it with meter > τ",
                None,
                *over_prompts(
                    np.mean([[(m > TAU).mean() for m in inside(n, "meter", True)] for n in alone], 0)[:, None]
                ),
            ),
            Row(
                "one layer: cells of it with true TV > τ",
                None,
                *over_prompts(
                    np.mean([[(m > TAU).mean() for m in inside(n, "true", True)] for n in alone], 0)[:, None]
                ),
            ),
            Row(
                "one layer: cells of the others with meter > τ",
                None,
                *over_prompts(
                    np.mean([[(m > TAU).mean() for m in inside(n, "meter", False)] for n in alone], 0)[:, None]
                ),
            ),
            Row("rank correlation of a layer's mean meter and KL", None, float(spearmanr(meters, output)[0])),
            Row("rank correlation of a layer's mean true TV and KL", None, float(spearmanr(truths, output)[0])),
        ],
        violations=[Violations(decoding.SOUND, broken, cells)],
        differs=[
            "The paper counts answers of needle prompts only, so “loses nothing” has the resolution of an answer."
            " The KL of the next token shows what a single layer costs.",
            "The paper says that errors cancel across layers. The KL of all layers is about the sum of the single ones,"
            " as of uncorrelated errors; aligned ones would add in amplitude, to as many times that sum as there are"
            " layers. That is the cancellation there is, and a layer's own meter or truth hardly tells its share.",
        ],
        tables=[
            Table(
                "Polluted layers",
                (
                    "layers",
                    *columns("mean KL"),
                    "largest KL",
                    *columns("top-1", "right", "mean meter", "mean true TV", "true TV > τ"),
                ),
                [_entry(name, found[name], right[name], inside) for name in sets],
            )
        ],
        quick=quick,
    )


def _entry(name: str, run: Forced, right: list[bool], inside: Any) -> tuple[Cell, ...]:
    meter, true = (inside(name, part, True) for part in ("meter", "true"))
    return (
        name,
        *spread(run.kl),
        float(run.kl.max()),
        *spread(run.top1),
        *share_of(right),
        *spread(meter),
        *spread(true),
        *spread([(value > TAU).astype(float) for value in true]),
    )


def plot(result: Result) -> Figure:
    """KL and meters of single layers, and KL over how many are polluted."""
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    rows = [(str(row[0]).split(), row) for row in result.tables[0].rows]
    single = np.array([[float(name[1]), row[1], row[8], row[10]] for name, row in rows if name[0] == "layer"], float)
    nested = np.array([[float(name[1]), float(row[1] or 0)] for name, row in rows if name[0] == "first"], float)
    left.semilogy(single[:, 0], single[:, 1], "C3o-", label="KL of the next token, nats")
    left.semilogy(single[:, 0], single[:, 2], "C0.--", label="mean meter of the layer")
    left.semilogy(single[:, 0], single[:, 3], "C2.--", label="mean true TV of the layer")
    left.axhline(nested[-1, 1], color="C3", linewidth=0.8, linestyle=":", label="KL, all layers")
    left.set(xlabel="the one polluted layer")
    left.legend(fontsize=7)
    right.plot(nested[:, 0], nested[:, 1], "C3o-", label="KL")
    within = single[np.argsort(single[:, 0])]
    right.plot(within[:, 0] + 1, np.cumsum(within[:, 1]), "k:", label="sum of the single layers' KL")
    right.set(xlabel="layers polluted, from the first", ylabel="KL of the next token, nats")
    right.legend(fontsize=7)
    return figure
