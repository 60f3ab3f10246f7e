"""The attention function behind ``attn_implementation="witcert"``: write the chunk, read the store, gate, report."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .cache import Handle
from .padding import padding_mask

NAME = "witcert"

UNSUPPORTED = (
    "position_bias", "head_mask", "alibi", "cu_seq_lens_q", "cu_seq_lens_k", "indices", "block_indices",
)  # fmt: skip


def attention(
    module: nn.Module,
    query: Tensor,
    key: Handle | Tensor,
    value: Handle | Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a chunk's queries over a :class:`WitCertCache`, which the chunk is written into.

    Args:
        query: ``[batch, heads, n, head_dim]``.
        key, value: the handles that ``WitCertCache.update`` returned.
        attention_mask: what :func:`witcert.padding.padding_mask` returned.
        scaling, sliding_window, softcap, s_aux: of the model; a window of W positions, sinks ``[heads]``.

    Returns:
        ``[batch, n, heads, head_dim_v]``, 0 in padded rows, and None.

    Raises:
        TypeError: the model's cache is not a WitCertCache.
        ValueError: something that this attention does not support, by name, before anything is written.
    """
    if not isinstance(key, Handle) or value is not key:
        raise TypeError(
            f"past_key_values: got keys of type {type(key).__name__}, wants a witcert.WitCertCache: with "
            'attn_implementation="witcert" pass past_key_values=WitCertCache(model.config, …), or set another attention'
        )
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: got {type(kwargs[name]).__name__}, wants None: a WitCertCache has no use for it")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: got True, wants False: attention weights are never materialised")
    if module.training or dropout:
        raise ValueError("training: got a module in training mode or dropout, wants model.eval()")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal and query.shape[2] > 1:
        raise ValueError("is_causal: got False, wants causal self-attention")
    out = key.cache.attend(
        key,
        query,
        attention_mask,
        sm_scale=scaling,
        window=sliding_window,
        logits_soft_cap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.detach(),
    )
    return out, None


def register() -> None:
    """Make ``model.set_attn_implementation("witcert")`` known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)
