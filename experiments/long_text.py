"""Coverage along long text that the model writes itself, over its compressed cache (paper, section 5.1, Table 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import decoding, model
from experiments.decoding import Array, Watch
from experiments.intervals import columns, over_prompts, spread
from experiments.result import Cell, Result, Row, Table, Violations
from experiments.synthetic import TAU
from witcert import WitCertCache
from witcert.capture import shapes_of
from witcert.report import StepRecord
from witcert.truth import logits

NAME = "long_text"
SEED = 0
TEMPERATURE, TOP_P = 0.8, 0.95
PAPER = ((4096, 0.857, 0.800, 3.79), (2617, 0.857, 0.800, 3.66), (1724, 0.857, 0.800, 3.50), (3995, 0.858, 0.798, 3.66))
PROMPTS = (
    "A farmer has 17 sheep and all but 9 run away. He buys twice as many as he has left. How many has he? Think aloud,"
    " step by step, and check every step.",
    "Explain at length how a lighthouse works, from the lamp to the lens to the keeper's daily round.",
    "Write a long story about two sisters who repair an old boat over one summer.",
    "Plan a vegetable garden of 10 by 6 metres. Reason aloud about what to plant where and when, in detail.",
)
PARTS = 8  # of a text, to see a trend


def measure(record: StepRecord) -> dict[str, Tensor]:
    """True total variation and entropy (nats) of exact attention, [rows, heads]."""
    true, entropy = [], []
    for i in range(len(record.read.sequences)):
        exact, stored = (x.softmax(-1) for x in logits(record.read, i))
        true.append((exact - stored).abs().sum(-1) / 2)
        entropy.append(torch.special.entr(exact).sum(-1))
    return {"true": torch.cat(true), "entropy": torch.cat(entropy)}


def encode(tokenizer: Any, prompts: tuple[str, ...]) -> dict[str, Tensor]:
    """Chat prompts, or plain ones for a tokenizer without a chat template, padded on the left."""
    rows = [
        tokenizer(prompt)["input_ids"]
        if tokenizer.chat_template is None
        else tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in prompts
    ]
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def write(prompts: tuple[str, ...], new_tokens: int) -> tuple[Tensor, Watch]:
    """Sampled continuations, int64 [prompts, new_tokens], and their cells, over the default compressed cache."""
    network, tokenizer = model.load()
    inputs = encode(tokenizer, prompts)
    cache = WitCertCache(network.config, "int8", None, decoding.calibration(), backing=True)
    watch = Watch(cache, measure)
    network.set_attn_implementation("witcert")
    torch.manual_seed(SEED)
    with torch.inference_mode():
        out = network.generate(
            **inputs,
            past_key_values=cache,
            do_sample=True,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            top_k=0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
    network.set_attn_implementation("sdpa")
    return out[:, inputs["input_ids"].shape[1] :], watch


def by_kv_head(values: Array, kv_heads: int) -> Array:
    """The largest of a kv head's query heads, [records, sequences, heads] -> [records, sequences, kv_heads]."""
    return np.asarray(values.reshape(*values.shape[:2], kv_heads, -1).max(-1))


def distinct(ids: Tensor, n: int = 4) -> float:
    """Share of the n-grams of [tokens] that did not come before: near 0 where a text repeats itself."""
    grams = [tuple(gram) for gram in ids.unfold(0, n, 1).tolist()]
    return len(set(grams)) / len(grams)


def run(quick: bool = False) -> Result:
    """Let the model write, and meter every step."""
    new_tokens, prompts = (24, PROMPTS[:2]) if quick else (512, PROMPTS)
    network, _ = model.load()
    ids, watch = write(prompts, new_tokens)
    kv_heads = shapes_of(network.config)["kv_heads"]
    within = {
        (bound, unit): (values <= TAU).astype(float)
        for bound in ("eform", "meter")
        for unit, values in (("query", watch.all(bound)), ("kv", by_kv_head(watch.all(bound), kv_heads)))
    }
    shares = {key: list(value.swapaxes(0, 1).reshape(len(prompts), -1)) for key, value in within.items()}
    entropy = list(watch.all("entropy").swapaxes(0, 1).reshape(len(prompts), -1))
    true = list(watch.all("true").swapaxes(0, 1).reshape(len(prompts), -1))
    steps = np.unique(watch.all("step"))
    parts = np.array_split(steps, PARTS)

    def along(values: Array) -> list[Array]:
        """Means over the parts of the text, [parts, sequences]."""
        step = watch.all("step")[:, 0, 0]
        return [values[np.isin(step, part)].mean((0, 2)) for part in parts]

    trends = {name: np.stack(along(within[name, "query"])) for name in ("eform", "meter")}
    drop = trends["meter"][-1] - trends["meter"][0]
    broken, cells = watch.violations()
    mean = [float(np.mean([paper[i] for paper in PAPER])) for i in (1, 2, 3)]
    return Result(
        NAME,
        "Table 2: coverage on long self-generated text",
        "section 5.1, Table 2",
        {
            "model": model.name(),
            "new_tokens": new_tokens,
            "sampling": f"temperature {TEMPERATURE}, top-p {TOP_P}, no end token before the last",
            "scheme": "int8, half-step and one sketch direction, the shipped calibration",
            "guarantee": watch.guarantee,
            "tau": TAU,
        },
        unit="text that the model wrote",
        samples=len(prompts),
        seed=SEED,
        rows=[
            Row("coverage by the e-form, query heads", mean[0], *over_prompts(shares["eform", "query"])),
            Row("coverage by the e-form, kv heads", mean[1], *over_prompts(shares["eform", "kv"])),
            Row("attention entropy, nats", mean[2], *over_prompts(entropy)),
            Row("coverage by the meter, query heads", None, *over_prompts(shares["meter", "query"])),
            Row("coverage by the meter, kv heads", None, *over_prompts(shares["meter", "kv"])),
            Row("median meter", None, *over_prompts(watch.of("meter"), np.median)),
            Row("median true TV", None, *over_prompts(true, np.median)),
            Row(f"coverage by the meter, last of {PARTS} parts less first", None, *over_prompts(drop[:, None])),
        ],
        violations=[Violations(decoding.SOUND, broken, cells)],
        differs=[
            "The paper's coverage is Tier B's, which holds for queries that do not depend on the dither: a text that is"
            " sampled over the cache is not such a trajectory. Ours is half-step's, which holds for any query.",
            "The paper's traces are a 7B reasoning model's, of 1,724 to 4,096 tokens. A smaller model repeats itself"
            " sooner: the share of new 4-grams says how much.",
        ],
        tables=[
            Table(
                "Each text",
                (
                    "text",
                    "tokens",
                    "coverage, query heads",
                    "coverage, kv heads",
                    "by the e-form",
                    "entropy",
                    "median meter",
                    "largest meter",
                    "median true TV",
                    "new 4-grams",
                ),
                [
                    (
                        " ".join(prompt.split()[:5]),
                        new_tokens,
                        float(shares["meter", "query"][i].mean()),
                        float(shares["meter", "kv"][i].mean()),
                        float(shares["eform", "query"][i].mean()),
                        float(entropy[i].mean()),
                        float(np.median(watch.of("meter")[i])),
                        float(watch.of("meter")[i].max()),
                        float(np.median(true[i])),
                        distinct(ids[i]),
                    )
                    for i, prompt in enumerate(prompts)
                ],
            ),
            Table(
                f"Coverage along the texts, in {PARTS} parts",
                (
                    "last step of the part",
                    *columns("meter", "e-form", "entropy", "median true TV"),
                ),
                [_part(watch, trends, i, part) for i, part in enumerate(parts)],
            ),
        ],
        quick=quick,
        points={"coverage by the meter, texts": trends["meter"].tolist()},
    )


def _part(watch: Watch, trends: dict[str, Array], i: int, part: Array) -> tuple[Cell, ...]:
    inside = np.isin(watch.all("step")[:, 0, 0], part)
    return (
        int(part[-1] - watch.all("step").min() + 1),
        *(x for name in ("meter", "eform") for x in spread(trends[name][i][:, None])),
        *spread(list(watch.all("entropy")[inside].swapaxes(0, 1))),
        *spread(list(watch.all("true")[inside].swapaxes(0, 1)), np.median),
    )


def plot(result: Result) -> Figure:
    """Coverage along the texts."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    ends = [float(row[0] or 0) for row in result.tables[1].rows]
    texts = np.array(result.points["coverage by the meter, texts"])
    for i, row in enumerate(result.tables[0].rows):
        axes.plot(ends, texts[:, i], "o-", markersize=4, label=str(row[0]) + " …")
    axes.plot(ends, [float(row[3] or 0) for row in result.tables[1].rows], "k.--", label="mean, by the e-form")
    axes.set(xlabel="tokens written", ylabel=f"coverage at τ = {TAU}", ylim=(0.5, 1.02))
    axes.legend(fontsize=8)
    return figure
