"""The model that experiments run: SmolLM2-135M-Instruct, or what `--model` names."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import witcert.model

SMOLLM2 = "SmolLM2-135M-Instruct"
_chosen: Path | None = None


def choose(path: Path | None) -> None:
    """Run the model of a local directory or .gguf file from now on; None: the default."""
    global _chosen
    _chosen = path


def chosen() -> Path | None:
    """The model's path; None for the default."""
    return _chosen


def name() -> str:
    """What results call the model."""
    if _chosen is None:
        return SMOLLM2
    return _chosen.stem if _chosen.suffix == ".gguf" else _chosen.resolve().name


def load() -> tuple[Any, Any]:
    """The chosen model, in evaluation mode, and its tokenizer; each model is loaded once."""
    return _load(_chosen)


@cache
def _load(path: Path | None) -> tuple[Any, Any]:
    return witcert.model.load(path)
