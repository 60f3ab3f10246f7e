"""What a store keeps for each token, and how many bytes that is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import check_choice, check_flag, check_integer

ROPE_LAYOUTS = ("half", "interleaved")
MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rope_pairs(head_dim: int, layout: str, rotary_dim: int | None = None) -> torch.Tensor:
    """Channels of each RoPE pair, int64 ``[head_dim // 2, 2]``.

    ``half``: pair j is ``(j, j + rotary_dim / 2)`` (Llama, Qwen); ``interleaved``: ``(2j, 2j + 1)`` (GPT-J, GLM).
    Channels outside the rotary part (partial RoPE) are paired with their neighbours.
    """
    rotary = head_dim if rotary_dim is None else rotary_dim
    if layout == "half":
        first = torch.arange(rotary // 2)
        rotated = torch.stack([first, first + rotary // 2], dim=1)
    else:
        rotated = torch.arange(rotary).view(-1, 2)
    return torch.cat([rotated, torch.arange(rotary, head_dim).view(-1, 2)])


@dataclass(frozen=True)
class StoreLayout:
    """Layout of one layer's store. Sizes in channels or entries, page size in tokens.

    Args:
        kv_heads, head_dim, head_dim_v: shape of a token's key and value; head dims even.
        dtype: the model's dtype; bypass channels and exact pages are kept in it.
        page_size: tokens a page, a power of two from 1 to 256.
        group: channels that share a scale (must divide both head dims), ``None`` for one scale a token.
        sketch: query directions r whose residual coordinate is kept, one signed byte each.
        witness_bands: bands B whose residual norm is kept, one unsigned byte each.
        bypass: RoPE pairs m kept as they are.
        dither, dither_period: subtractive dither, one vector for each ``dither_period`` positions (a power of two).
        rope_layout, rotary_dim: how channels pair up, see :func:`rope_pairs`.

    Raises:
        TypeError, ValueError: an argument of another type or out of range, by name.
    """

    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype = torch.float32
    page_size: int = 64
    group: int | None = None
    sketch: int = 0
    witness_bands: int = 0
    bypass: int = 0
    dither: bool = False
    dither_period: int = 64
    rope_layout: str = "half"
    rotary_dim: int | None = None

    def __post_init__(self) -> None:
        check_integer("kv_heads", self.kv_heads, 1, 2**16)
        for name in ("head_dim", "head_dim_v"):
            if check_integer(name, getattr(self, name), 2, 1024) % 2:
                raise ValueError(f"{name}: got {getattr(self, name)}, wants an even number from 2 to 1024")
        check_choice("dtype", self.dtype, MODEL_DTYPES)
        check_integer("page_size", self.page_size, 1, 256)
        check_choice("page_size", self.page_size, [2**i for i in range(9)])
        if self.group is not None:
            group = check_integer("group", self.group, 1)
            if self.head_dim % group or self.head_dim_v % group:
                wanted = f"a divisor of head_dim {self.head_dim} and head_dim_v {self.head_dim_v}"
                raise ValueError(f"group: got {group}, wants {wanted}")
        check_integer("sketch", self.sketch, 0, self.head_dim)
        check_integer("witness_bands", self.witness_bands, 0, self.head_dim // 2)
        check_integer("bypass", self.bypass, 0, self.head_dim // 2)
        check_flag("dither", self.dither)
        check_integer("dither_period", self.dither_period, 1, 2**20)
        check_choice("dither_period", self.dither_period, [2**i for i in range(21)])
        check_choice("rope_layout", self.rope_layout, ROPE_LAYOUTS)
        if self.rotary_dim is not None and check_integer("rotary_dim", self.rotary_dim, 2, self.head_dim) % 2:
            raise ValueError(f"rotary_dim: got {self.rotary_dim}, wants an even number from 2 to {self.head_dim}")

    @property
    def groups(self) -> int:
        """Scales of a token's key."""
        return 1 if self.group is None else self.head_dim // self.group

    @property
    def groups_v(self) -> int:
        """Scales of a token's value."""
        return 1 if self.group is None else self.head_dim_v // self.group

    @property
    def group_of_channel(self) -> torch.Tensor:
        """Group of each key channel, int64 ``[head_dim]``."""
        return torch.arange(self.head_dim) // (self.head_dim // self.groups)

    @property
    def band_of_channel(self) -> torch.Tensor:
        """Witness band of each key channel, int64 ``[head_dim]``; a RoPE pair never straddles two bands."""
        return bands(self.head_dim, self.witness_bands, self.rope_layout, self.rotary_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value in one kv head, page norms not counted."""
        key = self.head_dim + 2 * self.groups + self.sketch + self.witness_bands
        return key + 2 * self.bypass * self.dtype.itemsize + self.head_dim_v + 2 * self.groups_v

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page of all kv heads: its tokens, and one float32 value norm a kv head."""
        return self.kv_heads * (self.page_size * self.bytes_per_token + 4)


def bands(head_dim: int, count: int, layout: str, rotary_dim: int | None = None) -> torch.Tensor:
    """Band of each channel, int64 ``[head_dim]``: contiguous runs of RoPE pairs, as even as they come."""
    pairs = rope_pairs(head_dim, layout, rotary_dim)
    band = torch.arange(len(pairs)) * max(count, 1) // len(pairs)
    out = torch.empty(head_dim, dtype=torch.int64)
    out[pairs.flatten()] = band.repeat_interleave(2)
    return out


@dataclass(frozen=True)
class ObservatoryLayout:
    """Layout of one layer's observatory: 16-bit reconstructions of any scheme with a witness (paper section 4.1).

    Args:
        kv_heads, head_dim, head_dim_v, page_size, rope_layout, rotary_dim: as in :class:`StoreLayout`.
        dtype: the model's dtype. Reconstructions are stored in it if it has 16 bits, else in float16.
        witness_bands: bands B whose residual norm is kept in fp16.
        sketch: query directions r, one signed byte each and one fp16 scale a token.

    Raises:
        TypeError, ValueError: an argument of another type or out of range, by name.
    """

    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype = torch.float32
    page_size: int = 64
    witness_bands: int = 16
    sketch: int = 0
    rope_layout: str = "half"
    rotary_dim: int | None = None

    def __post_init__(self) -> None:
        StoreLayout(
            self.kv_heads,
            self.head_dim,
            self.head_dim_v,
            self.dtype,
            self.page_size,
            sketch=self.sketch,
            witness_bands=self.witness_bands,
            rope_layout=self.rope_layout,
            rotary_dim=self.rotary_dim,
        )
        check_integer("witness_bands", self.witness_bands, 1, self.head_dim // 2)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the stored reconstructions."""
        return torch.float16 if self.dtype == torch.float32 else self.dtype

    @property
    def band_of_channel(self) -> torch.Tensor:
        """As :attr:`StoreLayout.band_of_channel`."""
        return bands(self.head_dim, self.witness_bands, self.rope_layout, self.rotary_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's reconstruction, witness, sketch and value error in one kv head."""
        key = 2 * self.head_dim + 2 * self.witness_bands + (self.sketch + 2 if self.sketch else 0)
        return key + 2 * self.head_dim_v + 2

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page of all kv heads: its tokens, and one float32 value norm a kv head."""
        return self.kv_heads * (self.page_size * self.bytes_per_token + 4)
