"""Decode steps of the chosen model over compressed caches, the truth of every cell measured beside its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from experiments import activations, model
from witcert import WitCertCache
from witcert.calibration import Calibration, default_for
from witcert.report import StepRecord
from witcert.truth import read_tv

Array = NDArray[np.float64]
SOUND = "meter >= true total variation"


def calibration() -> Calibration | None:
    """The shipped calibration where it is the model's, as the command line takes it."""
    return default_for(model.load()[0])


def truth(record: StepRecord) -> dict[str, Tensor]:
    """The true total variation of a read, [rows, heads]."""
    return {"true": read_tv(record.read)}


class Watch:
    """The observer of a cache that keeps exact keys: every cell's meter, e-form and what `measure` says of it.

    A cell is a (layer, query head, decode step) that read at least one compressed token before any repair; all numbers
    are those after it. `guarantee` is the weakest of all cells.
    """

    def __init__(self, cache: WitCertCache, measure: Callable[[StepRecord], dict[str, Tensor]] = truth) -> None:
        self.cache, self.measure, self.guarantee = cache, measure, "any_query"
        self._parts: dict[str, list[Array]] = {}
        cache.observer = self

    def __call__(self, record: StepRecord) -> None:
        """Measure one layer's step; prefill rows are no cells."""
        if not record.read.is_decode:
            return
        certificate, reading = record.certificate, record.reading
        if certificate.guarantee == "fixed_trajectory":
            self.guarantee = certificate.guarantee
        measured = {
            "meter": certificate.meter,
            "eform": certificate.eform,
            **self.measure(record),
            "seen": reading.compressed_before,
            "layer": torch.full_like(reading.compressed_before, record.layer),
            "step": torch.full_like(reading.compressed_before, record.step),
        }
        for name, value in measured.items():
            self._parts.setdefault(name, []).append(value.to(torch.float64).numpy())

    def of(self, name: str) -> list[Array]:
        """`meter`, `eform`, `layer`, `step` or a name of `measure`: of each sequence's cells."""
        values, seen = self.all(name), self.all("seen")
        return [values[:, row][seen[:, row] > 0] for row in range(values.shape[1])]

    def all(self, name: str) -> Array:
        """[layers · steps, sequences, heads], read or not."""
        return np.stack(self._parts[name])

    def violations(self) -> tuple[int, int]:
        """(cells whose meter is below the truth, cells)."""
        pairs = list(zip(self.of("meter"), self.of("true"), strict=True))
        return sum(int((~(meter >= true)).sum()) for meter, true in pairs), sum(len(meter) for meter, _ in pairs)


@dataclass(frozen=True)
class Reference:
    """Texts read uncompressed.

    ids int64 [texts, tokens]; layers: k and v [texts, kv_heads, tokens - steps, d] of each layer, of the tokens before
    the steps; log_p float64 [texts, steps, vocabulary], what each of the last `steps` tokens makes of the next.
    """

    ids: Tensor
    layers: list[tuple[Tensor, Tensor]]
    log_p: Tensor

    @property
    def steps(self) -> int:
        """Tokens that are decoded one by one over a compressed cache."""
        return self.log_p.shape[1]


def reference(texts: Sequence[activations.Text], steps: int) -> Reference:
    """Read texts of one length; of each the last token is what the last step should say."""
    network, tokenizer = model.load()
    ids = torch.stack([activations.ids(text, tokenizer) for text in texts])
    network.set_attn_implementation("sdpa")
    caches, log_p = [], []
    for row in ids:
        cache = DynamicCache()
        with torch.inference_mode():
            logits = network(row[None, :-1], past_key_values=cache, use_cache=True, logits_to_keep=steps).logits
        caches.append(cache)
        log_p.append(logits.to(torch.float64).log_softmax(-1))
    layers = [
        tuple(torch.cat([getattr(c.layers[n], name)[:, :, :-steps] for c in caches]) for name in ("keys", "values"))
        for n in range(len(caches[0].layers))
    ]
    return Reference(ids, layers, torch.cat(log_p))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Forced:
    """What `Reference.ids` become over a compressed cache: log_p as there, and what was seen on the way."""

    reference: Reference
    log_p: Tensor
    watch: Watch

    @property
    def kl(self) -> Array:
        """KL(uncompressed ‖ compressed) of the next token in nats, [texts, steps]."""
        exact = self.reference.log_p
        return np.asarray((exact.exp() * (exact - self.log_p)).sum(-1).numpy())

    @property
    def top1(self) -> Array:
        """1 where the likeliest token is the same, [texts, steps]."""
        return np.asarray((self.reference.log_p.argmax(-1) == self.log_p.argmax(-1)).to(torch.float64).numpy())

    @property
    def top5(self) -> Array:
        """Share of the five likeliest tokens that is the same, [texts, steps]."""
        a, b = (x.topk(5, -1).indices for x in (self.reference.log_p, self.log_p))
        return np.asarray((a[..., :, None] == b[..., None, :]).any(-1).to(torch.float64).mean(-1).numpy())

    @property
    def lost(self) -> Array:
        """Nats by which the compressed cache says less of the token that came, [texts, steps]."""
        came = self.reference.ids[:, -self.reference.steps :, None]
        return np.asarray((self.reference.log_p - self.log_p).gather(-1, came)[..., 0].numpy())


def forced(
    reference: Reference, cache: WitCertCache, measure: Callable[[StepRecord], dict[str, Tensor]] = truth
) -> Forced:
    """Feed the texts' own last tokens, one step at a time, over an empty cache that gets the exact keys before them."""
    network, _ = model.load()
    cache.preload(reference.layers)
    watch, log_p, steps = Watch(cache, measure), [], reference.steps
    network.set_attn_implementation("witcert")
    with torch.inference_mode():
        for token in reference.ids[:, -steps - 1 : -1].unbind(1):
            logits = network(token[:, None], past_key_values=cache, use_cache=True).logits
            log_p.append(logits.to(torch.float64).log_softmax(-1))
    network.set_attn_implementation("sdpa")
    return Forced(reference, torch.cat(log_p, 1), watch)
