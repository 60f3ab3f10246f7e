"""Left padding: what the attention mask says about where each sequence begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from .transfer import to_device


def padding_mask(
    *, attention_mask: Tensor | None = None, mask_function: Any = causal_mask_function, **kwargs: Any
) -> Tensor | None:
    """The mask function of ``attn_implementation="witcert"``: the 2-D padding mask itself, of the whole length.

    The causal pattern and a sliding window are the attention function's own business.

    Raises:
        ValueError: the model overlays a pattern that is neither (packed sequences, blocks, bidirectional, chunked).
    """
    plain = mask_function is causal_mask_function or kwargs.get("local_size") is not None
    if not plain or kwargs.get("use_vmap") or not kwargs.get("allow_is_causal_skip", False):
        raise ValueError("attention_mask: got another pattern than causal attention with a window and left padding")
    return attention_mask


def left_padding(mask: Tensor | None, batch: int, total: int) -> list[int]:
    """Positions of padding before each sequence's first token.

    Args:
        mask: ``[batch, total]``, non-zero for tokens, or None where there is no padding.
        total: positions so far, this chunk's included.

    Raises:
        TypeError: not a tensor. ValueError: another shape, or zeros after a one.
    """
    if mask is None:
        return [0] * batch
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask: got {type(mask).__name__}, wants a tensor")
    if mask.ndim != 2:
        raise ValueError(f"attention_mask: got {mask.ndim} dimensions, wants a padding mask [batch, length]")
    if tuple(mask.shape) != (batch, total):
        raise ValueError(
            f"attention_mask: got shape {list(mask.shape)}, wants {[batch, total]}, all positions that the cache holds"
        )
    tokens = mask != 0
    if bool((tokens[:, 1:] < tokens[:, :-1]).any()):
        raise ValueError("attention_mask: got zeros after a one, wants left padding only: zeros, then ones")
    return [int(n) for n in (~tokens).sum(1).tolist()]


def continue_padding(mask: Tensor | None, pads: list[int], lengths: list[int], total: int) -> list[int]:
    """Padding of sequences that hold ``lengths`` tokens behind ``pads`` already.

    A sequence without a token may be padded further. On an accelerator the check runs there once all sequences have
    begun, so that the host does not wait.

    Raises:
        TypeError: not a tensor. ValueError: the mask contradicts what the cache holds.
    """
    if mask is None:
        if any(pads):
            raise ValueError(
                "attention_mask: got None, wants the mask of all positions, since the cache holds padded sequences"
            )
        return list(pads)
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask: got {type(mask).__name__}, wants a tensor")
    if mask.device.type != "cpu" and all(lengths) and tuple(mask.shape) == (len(pads), total):
        expected = torch.arange(total, device=mask.device) >= to_device(pads, mask.device)[:, None]
        torch._assert_async(((mask != 0) == expected).all(), "attention_mask: contradicts the padding in the cache")
        return list(pads)
    new = left_padding(mask, len(pads), total)
    for b, (before, length, after) in enumerate(zip(pads, lengths, new, strict=True)):
        if after != before and (length or after < before):
            raise ValueError(
                f"attention_mask: got {after} padded positions in sequence {b}, wants {before} as in the cache"
            )
    return new
