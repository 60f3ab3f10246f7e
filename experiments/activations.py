"""Attention inputs of the chosen model over real texts, captured once and kept in build/activations.

Keys, values and queries are rounded to float16: that is the cache that is compressed, and what a bypass keeps exactly.
"""

from __future__ import annotations

import hashlib
import inspect
import pydoc_data.topics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import model
from witcert import haystack
from witcert.calibration import fit
from witcert.capture import Captured, CapturedLayer, ModelFingerprint, capture
from witcert_kernels import LayerCalibration

CACHE = Path("build") / "activations"
ROOT = Path(__file__).parent.parent
STEPS = 8  # query rows of a text, its last
FITTED = 2048  # tokens of a calibration


@dataclass(frozen=True)
class Text:
    """A text and how much of it is read: its first `length` tokens; a needle prompt is read whole."""

    domain: str
    source: str
    length: int = 2048

    @property
    def name(self) -> str:
        return f"{self.source}@{self.length}"


PROSE = ("story", "haystack", "licence", "language reference")
CODE = ("queue", "argparse", "heapq", "statistics")
NEEDLES = ("oslo-1000", "havana-1250", "cairo-1500", "vienna-1800")
TEXTS = (
    *(Text("prose", source) for source in PROSE),
    *(Text("code", source) for source in CODE),
    *(Text("needle", spec.id, spec.tokens) for spec in haystack.SPECS if spec.id in NEEDLES),
)
LENGTHS = tuple(
    Text(domain, source, length)
    for length in (512, 1024, 4096)
    for domain, source in (("prose", "language reference"), ("code", "argparse"))
)
QUICK = (Text("prose", "story", 512), Text("code", "queue", 512), Text("needle", "lisbon-400", 400))
DESCRIPTION = (
    "prose: a story (tests/data/prose.txt), stories (witcert/data/haystack.txt), the Apache licence (LICENSE), Python's"
    " language reference (pydoc_data.topics); code: Python's queue (tests/data/source_code.txt), argparse, heapq and"
    " statistics; needle: prompts of witcert.haystack"
)


def read(source: str) -> str:
    """The text of a source that is not a needle prompt."""
    if source == "story":
        return (ROOT / "tests" / "data" / "prose.txt").read_text(encoding="utf-8")
    if source == "queue":
        return (ROOT / "tests" / "data" / "source_code.txt").read_text(encoding="utf-8")
    if source == "licence":
        return (ROOT / "LICENSE").read_text(encoding="utf-8")
    if source == "language reference":
        return "\n".join(pydoc_data.topics.topics.values())
    if source in CODE:
        return inspect.getsource(import_module(source))
    return (files("witcert") / "data" / f"{source}.txt").read_text(encoding="utf-8")


def ids(text: Text, tokenizer: Any) -> Tensor:
    """Tokens int64 [length] of a text. Raises ValueError where it has fewer."""
    if text.domain == "needle":
        return {prompt.id: prompt.input_ids[0] for prompt in haystack.prompts(tokenizer)}[text.source]
    tokens = torch.tensor(tokenizer(read(text.source))["input_ids"][: text.length])
    if len(tokens) < text.length:
        raise ValueError(f"text: got {len(tokens)} tokens of {text.source}, want {text.length}")
    return tokens


def captured(text: Text, steps: int | None = STEPS) -> Captured:
    """The float16 attention inputs of a text, with its last query rows (None: all); from the cache if it has them."""
    network, tokenizer = model.load()
    tokens, fingerprint = ids(text, tokenizer), _fingerprint(model.chosen())
    key = hashlib.sha256(tokens.numpy().tobytes() + fingerprint.model_dump_json().encode()).hexdigest()[:16]
    path = CACHE / f"{key}-{steps or 'all'}.safetensors"
    if not path.exists():
        found = capture(network, tokens, steps=steps)
        half = replace(found, layers=[_half(layer) for layer in found.layers])
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        half.save(partial)
        partial.rename(path)
    return Captured.load(path)


@cache
def _fingerprint(path: Path | None) -> ModelFingerprint:
    return ModelFingerprint.of(model.load()[0])


def _half(layer: CapturedLayer) -> CapturedLayer:
    return replace(layer, **{name: getattr(layer, name).to(torch.float16) for name in ("q", "k", "v")})


def calibration_text(quick: bool) -> Captured:
    """All query rows of witcert/data/calibration.txt."""
    return _calibration_text(model.chosen(), 512 if quick else FITTED)


@cache
def _calibration_text(path: Path | None, length: int) -> Captured:
    return captured(Text("prose", "calibration", length), None)


def calibration(quick: bool, *, bypass: int = 0, equalizer: bool = False) -> list[LayerCalibration]:
    """Equaliser, query directions and bypass pairs of each layer, fitted to the calibration text."""
    return _calibration(model.chosen(), 512 if quick else FITTED, bypass, equalizer)


@cache
def _calibration(path: Path | None, length: int, bypass: int, equalizer: bool) -> list[LayerCalibration]:
    return fit(_calibration_text(path, length), bypass=bypass, equalizer=equalizer)


def layers(captured: Captured, quick: bool) -> range:
    """The layers that are measured: all, or every sixth."""
    return range(0, len(captured.layers), 6 if quick else 1)


def each(texts: Sequence[Text]) -> Iterator[tuple[int, Text, Captured]]:
    """The texts, numbered, with their attention inputs."""
    for i, text in enumerate(texts):
        yield i, text, captured(text)


def settings(texts: Sequence[Text]) -> dict[str, Any]:
    """What results say of the model and the texts."""
    tokenizer = model.load()[1]
    digest = hashlib.sha256()
    for text in texts:
        digest.update(ids(text, tokenizer).numpy().tobytes())
    return {
        "model": model.name(),
        "texts": ", ".join(text.name for text in texts),
        "text_sources": DESCRIPTION,
        "tokens_sha256": digest.hexdigest(),
        "calibration_text": f"witcert/data/calibration.txt, {FITTED} tokens",
        "query_rows": STEPS,
        "activations": "rounded to float16",
    }
