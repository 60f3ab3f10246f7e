"""Streaming generation over a compressed cache, for the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .cache import WitCertCache
from .model import cache_argument


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    scheme: str,
    tau: float | None,
    calibration: Any,
    max_new_tokens: int,
    write: Callable[[str], object],
) -> str:
    """Answer ``prompt`` greedily, hand over text as it comes, and return one line of what the meter saw.

    Raises:
        ValueError: an empty prompt, or one that leaves the model's window no room.
    """
    from transformers import TextStreamer

    if not prompt.strip():
        raise ValueError("prompt: got an empty text, wants at least one word")
    if tokenizer.chat_template is None:
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    length = inputs["input_ids"].shape[1]
    window = getattr(model.config, "max_position_embeddings", None)
    if window is not None and length + max_new_tokens > window:
        raise ValueError(
            f"prompt: got {length} tokens and {max_new_tokens} new ones, wants at most the model's window of {window}"
        )

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    cache = WitCertCache(model.config, scheme=scheme, tau=tau, calibration=calibration)
    model.set_attn_implementation("witcert")
    with torch.inference_mode():
        model.generate(
            **inputs,
            **{cache_argument(model): cache},
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    return cache.report().summary_line(0.2 if tau is None else tau)
