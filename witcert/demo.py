"""The main job: a real model answers needle questions over each compressed cache, metered, raw and gated."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import __version__
from .cache import WitCertCache
from .haystack import NeedlePrompt, prompts
from .model import cache_argument
from .report import StepRecord
from .schemes import Scheme
from .truth import true_tv

SCHEMES = ("fp8_raw", "rtn8", "kivi2", "rtn2", "int8", "int8_dither")
TAU = 0.2
NEW_TOKENS = 16
FIDELITY_TOKENS = 256

CELL = np.dtype(
    [
        ("layer", np.int32),
        ("head", np.int32),
        ("step", np.int32),
        ("meter", np.float64),
        ("eform", np.float64),
        ("true_tv", np.float64),
    ]
)
HEADER = (
    "scheme", "gate", "right", "cells", f"coverage τ={TAU}", "median meter", "max meter", "median true TV",
    "meter < TV", "guarantee", "pages repaired", "bytes/token/head", "tokens/s",
)  # fmt: skip

Progress = Callable[[str, int, int, float | None], None]


@dataclass
class Run:
    """One prompt answered over one cache. ``scheme`` is ``"uncompressed"`` for the model's own.

    ``bytes_per_token`` is of one kv head, as the scheme itself stores it; ``seconds`` are the decode's own.
    """

    prompt: str
    prompt_tokens: int
    scheme: str
    gated: bool
    answer: str
    right: bool
    tokens: int
    seconds: float
    guarantee: str
    cells: np.ndarray = field(default_factory=lambda: np.empty(0, CELL))
    pages_repaired: int = 0
    pages: int = 0
    bytes_per_token: float = 0.0


@dataclass
class Fidelity:
    """KL divergence (nats) and top-1 agreement of each next-token distribution along the uncompressed text."""

    scheme: str
    tokens: int
    mean_kl: float
    top1: float

    def __str__(self) -> str:
        return (
            f"{self.scheme}, {self.tokens} tokens decoded one at a time along the uncompressed text: "
            f"mean KL {self.mean_kl:.2e} nats, top-1 agreement {self.top1:.3f}"
        )


@dataclass
class Demo:
    """Everything that the demo measured."""

    runs: list[Run]
    meta: dict[str, str]
    fidelity: Fidelity | None = None
    header: tuple[str, ...] = HEADER

    def _groups(self) -> dict[tuple[str, bool], list[Run]]:
        groups: dict[tuple[str, bool], list[Run]] = {}
        for run in self.runs:
            groups.setdefault((run.scheme, run.gated), []).append(run)
        return groups

    def summary(self) -> list[dict[str, Any]]:
        """One entry a scheme and gate. A meter that is not finite counts as not covered."""
        entries = []
        for (scheme, gated), runs in self._groups().items():
            cells = np.concatenate([run.cells for run in runs])
            entry: dict[str, Any] = {
                "scheme": scheme,
                "gate": TAU if gated else None,
                "right": sum(run.right for run in runs),
                "prompts": len(runs),
                "cells": len(cells),
                "pages_repaired": sum(run.pages_repaired for run in runs),
                "pages": sum(run.pages for run in runs),
                "bytes_per_token": float(np.mean([run.bytes_per_token for run in runs])),
                "tokens_per_second": sum(run.tokens for run in runs) / sum(run.seconds for run in runs),
                "guarantee": runs[0].guarantee,
            }
            if len(cells):
                measured = cells[np.isfinite(cells["true_tv"])]
                entry |= {
                    "coverage": float((cells["meter"] <= TAU).mean()),
                    "meter_median": float(np.median(cells["meter"])),
                    "meter_max": float(cells["meter"].max()),
                    "true_tv_median": float(np.median(measured["true_tv"])) if len(measured) else None,
                    "violations": int((measured["meter"] < measured["true_tv"]).sum()),
                }
            entries.append(entry)
        return entries

    def rows(self) -> list[list[str]]:
        """The table, as text."""
        rows = []
        for e in self.summary():
            row = [
                e["scheme"],
                "—" if e["gate"] is None else f"τ={e['gate']}",
                f"{e['right']}/{e['prompts']}",
                f"{e['cells']}",
            ]
            if e["cells"]:
                true = e["true_tv_median"]
                row += [f"{e['coverage']:.4f}", f"{e['meter_median']:.3g}", f"{e['meter_max']:.3g}"]
                row += ["—" if true is None else f"{true:.3g}", f"{e['violations']}", e["guarantee"]]
            else:
                row += ["—"] * 6
            share = f"{e['pages_repaired']}/{e['pages']}" if e["gate"] is not None and e["pages"] else "—"
            rows.append([*row, share, f"{e['bytes_per_token']:.1f}", f"{e['tokens_per_second']:.2f}"])
        return rows

    def answers(self) -> list[list[str]]:
        """Prompt, scheme, gate, answer and verdict of each run."""
        return [
            [run.prompt, run.scheme, f"τ={TAU}" if run.gated else "—", run.answer, "yes" if run.right else "no"]
            for run in self.runs
        ]

    def write_json(self, path: Path) -> None:
        """``{"meta", "summary", "fidelity", "cells"}``, see the command line's documentation."""
        cells = [
            {
                "prompt": run.prompt,
                "scheme": run.scheme,
                "gate": TAU if run.gated else None,
                "layer": int(c["layer"]),
                "head": int(c["head"]),
                "step": int(c["step"]),
                "meter": float(c["meter"]),
                "eform": float(c["eform"]) if np.isfinite(c["eform"]) else None,
                "true_tv": float(c["true_tv"]) if np.isfinite(c["true_tv"]) else None,
                "guarantee": run.guarantee,
            }
            for run in self.runs
            for c in run.cells
        ]
        fidelity = None if self.fidelity is None else vars(self.fidelity)
        document = {"meta": self.meta, "summary": self.summary(), "fidelity": fidelity, "cells": cells}
        path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")


@dataclass
class Prefix:
    """A prompt's exact k, v ``[1, kv_heads, tokens, d]`` of each layer, computed once, and the next token."""

    layers: list[tuple[Tensor, Tensor]]
    next_token: Tensor


def prefill(model: Any, input_ids: Tensor) -> Prefix:
    """Run the prompt uncompressed, with the model's own attention."""
    from transformers import DynamicCache

    model.set_attn_implementation("sdpa")
    cache: Any = DynamicCache()
    with torch.inference_mode():
        logits = model(input_ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1).logits
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    return Prefix(layers, logits[:, -1:].argmax(-1))


def decode(model: Any, cache: Any, first: Tensor, limit: int, stop: set[int], each: Callable[[int], None]) -> list[int]:
    """Greedy tokens after ``first``, which is the first of them; ``each`` is told how many there are."""
    tokens, token = [int(first)], first
    with torch.inference_mode():
        while len(tokens) < limit and tokens[-1] not in stop:
            logits = model(token, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1).logits
            token = logits[:, -1:].argmax(-1)
            tokens.append(int(token))
            each(len(tokens))
    return tokens


class Watcher:
    """Collects every cell of one run, with the true total variation measured beside the meter."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.cells: list[tuple[int, int, int, float, float, float]] = []
        self.worst: float | None = None
        self.seconds = 0.0

    def __call__(self, record: StepRecord) -> None:
        """Measure one layer's decode step, which is not part of the decode's time."""
        began = time.perf_counter()
        certificate, step = record.certificate, record.step - self.prompt_tokens
        columns = [x[0].tolist() for x in (certificate.meter, certificate.eform, true_tv(record))]
        seen = record.reading.compressed_before[0].tolist()
        cells = [
            (record.layer, head, step, *cell) for head, cell in enumerate(zip(*columns, strict=True)) if seen[head]
        ]
        self.cells += cells
        self.worst = max((cell[3] for cell in cells), default=self.worst)
        self.seconds += time.perf_counter() - began


def answer(
    model: Any,
    tokenizer: Any,
    prompt: NeedlePrompt,
    prefix: Prefix,
    scheme: str | Scheme,
    tau: float | None,
    calibration: Any,
    new_tokens: int,
    progress: Callable[[int, float | None], None],
    seed: int | None = None,
) -> Run:
    """Decode one prompt's answer over one cache, gated at τ (None: not gated); ``seed``: the cache's."""
    stop = _stop_tokens(model, tokenizer)
    watcher = None
    if scheme == "uncompressed":
        from transformers import DynamicCache

        model.set_attn_implementation("sdpa")
        cache: Any = DynamicCache()
        for index, (k, v) in enumerate(prefix.layers):
            cache.update(k, v, index)
    else:
        model.set_attn_implementation("witcert")
        cache = WitCertCache(model.config, scheme, tau, calibration, backing=True, seed=seed)
        cache.preload(prefix.layers)
        watcher = cache.observer = Watcher(prompt.tokens)
    began = time.perf_counter()
    tokens = decode(
        model, cache, prefix.next_token, new_tokens, stop, lambda n: progress(n, watcher.worst if watcher else None)
    )
    seconds = time.perf_counter() - began - (watcher.seconds if watcher else 0.0)
    text = tokenizer.decode([t for t in tokens if t not in stop], skip_special_tokens=True).strip()
    run = Run(
        prompt=prompt.id,
        prompt_tokens=prompt.tokens,
        scheme=scheme.name if isinstance(scheme, Scheme) else scheme,
        gated=tau is not None,
        answer=text,
        right=prompt.is_answered_by(text),
        tokens=len(tokens),
        seconds=seconds,
        guarantee="exact",
    )
    if watcher is None:
        k, v = prefix.layers[0]
        run.bytes_per_token = (k.shape[-1] + v.shape[-1]) * k.element_size()
        return run
    report = cache.report()
    run.cells = np.array(watcher.cells, CELL)
    run.guarantee = report.guarantee
    run.pages_repaired, run.pages = report.pages_repaired, report.pages
    run.bytes_per_token = report.bytes_per_token
    return run


def _stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}


def fidelity(
    model: Any,
    prefix: Prefix,
    scheme: str,
    tokens: int,
    calibration: Any,
    progress: Callable[[int, float | None], None],
) -> Fidelity:
    """Compare next-token distributions along the uncompressed greedy text, one token at a time."""
    from transformers import DynamicCache

    exact: Any = DynamicCache()
    for index, (k, v) in enumerate(prefix.layers):
        exact.update(k, v, index)
    compressed = WitCertCache(model.config, scheme, calibration=calibration)
    compressed.preload(prefix.layers)
    token, kl, same, name = prefix.next_token, [], [], cache_argument(model)
    with torch.inference_mode():
        for step in range(tokens):
            model.set_attn_implementation("sdpa")
            wanted = model(token, **{name: exact}, use_cache=True).logits[0, -1].double().log_softmax(-1)
            model.set_attn_implementation("witcert")
            got = model(token, **{name: compressed}, use_cache=True).logits[0, -1].double().log_softmax(-1)
            kl.append(float((wanted.exp() * (wanted - got)).sum()))
            same.append(int(wanted.argmax()) == int(got.argmax()))
            token = wanted.argmax().view(1, 1)
            progress(step + 1, None)
    return Fidelity(scheme, tokens, float(np.mean(kl)), float(np.mean(same)))


def run_demo(
    model: Any,
    tokenizer: Any,
    progress: Progress,
    *,
    quick: bool = False,
    calibration: Any = None,
    schemes: Sequence[str] = SCHEMES,
    new_tokens: int = NEW_TOKENS,
    fidelity_tokens: int | None = None,
    needles: Sequence[NeedlePrompt] | None = None,
) -> Demo:
    """Answer every prompt uncompressed and over every scheme, raw and gated, on exact keys computed once a prompt.

    Args:
        model, tokenizer: a decoder-only transformers model in evaluation mode.
        progress: told what runs, how far of how much it is, and the largest meter so far.
        quick: two prompts instead of six, and a shorter fidelity check.
        calibration: as for :class:`WitCertCache`.
        schemes: names of :mod:`witcert.schemes`.
        new_tokens: most tokens of an answer.
        fidelity_tokens: tokens of the fidelity check, 0 for none.
        needles: prompts instead of the demo's own.
    """
    needles = prompts(tokenizer, quick=quick) if needles is None else list(needles)
    plan = [("uncompressed", False)] + [(scheme, gated) for scheme in schemes for gated in (False, True)]
    steps = (32 if quick else FIDELITY_TOKENS) if fidelity_tokens is None else fidelity_tokens
    total = len(needles) * len(plan) * new_tokens + steps
    runs: list[Run] = []
    done, prefix = 0, None
    for prompt in needles:
        progress(f"{prompt.id}: prompt", done, total, None)
        prefix = prefill(model, prompt.input_ids)
        if not runs:  # what is compiled at its first call is compiled before the clock runs
            for scheme in schemes:
                answer(model, tokenizer, prompt, prefix, scheme, None, calibration, 2, lambda n, worst: None)
        for scheme, gated in plan:
            name = f"{prompt.id}: {scheme}{' gated' if gated else ''}"
            base = done

            def tell(n: int, worst: float | None, name: str = name, base: int = base) -> None:
                progress(name, base + n, total, worst)

            tau = TAU if gated else None
            runs.append(answer(model, tokenizer, prompt, prefix, scheme, tau, calibration, new_tokens, tell))
            done += new_tokens
    close = None
    if steps and "int8" in schemes and prefix is not None:
        close = fidelity(
            model,
            prefix,
            "int8",
            steps,
            calibration,
            lambda n, worst: progress("int8: fidelity", done + n, total, worst),
        )
    import transformers

    meta = {
        "witcert": __version__,
        "model": Path(getattr(model.config, "name_or_path", "") or model.config.model_type).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompts": ", ".join(f"{p.id} ({p.tokens} tokens)" for p in needles),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }
    return Demo(runs, meta, close)
