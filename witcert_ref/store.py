"""The byte account of the stores, and which RoPE pairs a bypass keeps."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from witcert_ref._checks import floats, integer
from witcert_ref.rope import RopeLayout, pairs


@dataclass(frozen=True)
class Layout:
    """What a store keeps with each token of a kv head.

    head_dim channels of a key, head_dim_v (None: head_dim) of a value; group channels that share a scale (None or
    head_dim: one scale a token); sketch directions; witness_bands; bypass RoPE pairs, bypass_bytes a number (the
    model's own dtype). Raises ValueError for sizes out of range, or a group that does not divide both head dims.
    """

    head_dim: int
    head_dim_v: int | None = None
    group: int | None = None
    sketch: int = 0
    witness_bands: int = 0
    bypass: int = 0
    bypass_bytes: int = 2

    def __post_init__(self) -> None:
        integer("head_dim", self.head_dim, 1)
        integer("sketch", self.sketch, 0)
        integer("witness_bands", self.witness_bands, 0)
        integer("bypass", self.bypass, 0, self.head_dim // 2)
        integer("bypass_bytes", self.bypass_bytes, 1)
        for name, channels in (("head_dim", self.head_dim), ("head_dim_v", self.channels_v)):
            integer(name, channels, 1)
            if self.group is not None and self.group != self.head_dim and channels % integer("group", self.group, 1):
                raise ValueError(f"group: got {self.group}, want a divisor of {name} = {channels}")

    @property
    def channels_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def scales(self) -> tuple[int, int]:
        """Scales a token of keys and of values."""
        if self.group is None or self.group == self.head_dim:
            return 1, 1
        return self.head_dim // self.group, self.channels_v // self.group


class Bytes(NamedTuple):
    """Bytes of keys and of values."""

    k: int
    v: int


PAGE_BYTES = 4  # a page and kv head: the largest ‖v̂‖ + ρ, float32


def bytes_per_token(layout: Layout, observatory: bool = False) -> Bytes:
    """Bytes a token and kv head, `PAGE_BYTES` a page apart.

    Packed: int8 codes, float16 scales, one byte a sketch direction and a witness band, the bypass pairs. Observatory:
    16-bit k̂ and v̂, float16 witness norms, sketch bytes with their float16 unit, a float16 value error; it has no
    scales or bypass.
    """
    if observatory:
        sketch = layout.sketch + 2 if layout.sketch else 0
        return Bytes(2 * layout.head_dim + 2 * layout.witness_bands + sketch, 2 * layout.channels_v + 2)
    scales_k, scales_v = layout.scales
    bypass = 2 * layout.bypass * layout.bypass_bytes
    return Bytes(
        layout.head_dim + 2 * scales_k + layout.sketch + layout.witness_bands + bypass, layout.channels_v + 2 * scales_v
    )


def block_bytes(tokens: int, head_dim: int, bypass: int, block: int = 256) -> int:
    """Bytes of the paper body's key store (section 5): one scale for each channel of a block of tokens, one kv head.

    int8 codes; float16 scales; a block's bypass channels as int16 indices; their float16 values.
    """
    n, d = integer("tokens", tokens, 0), integer("head_dim", head_dim, 1)
    blocks, channels = -(-n // integer("block", block, 1)), 2 * integer("bypass", bypass, 0, d // 2)
    return n * d + blocks * d * 2 + blocks * channels * 2 + n * channels * 2


def select_bypass(scale: ArrayLike, bypass: int, layout: RopeLayout, rotary_dim: int | None = None) -> NDArray[np.intp]:
    """The RoPE pairs whose scales have the most energy, s_a² + s_b², ascending: [..., d] -> [..., bypass].

    scale [..., d] is a channel's scale, or its largest magnitude. Ties go to the lower pair.
    Raises ValueError where there are fewer pairs.
    """
    size = floats("scale", scale)
    if size.ndim == 0:
        raise ValueError("scale: got a number, want [..., d]")
    both = pairs(size.shape[-1], layout, rotary_dim)
    energy = np.square(size[..., both]).sum(-1)
    kept = np.argsort(-energy, axis=-1, kind="stable")[..., : integer("bypass", bypass, 0, len(both))]
    return np.sort(kept, axis=-1)


def bypass_channels(
    selected: ArrayLike, head_dim: int, layout: RopeLayout, rotary_dim: int | None = None
) -> NDArray[np.bool_]:
    """The channels of selected pairs, [..., bypass] -> bool [..., d]: the `exclude` of scales, equaliser and sketch."""
    chosen = np.asarray(selected, dtype=np.intp)
    both = pairs(integer("head_dim", head_dim, 1), layout, rotary_dim)
    mask = np.zeros((*chosen.shape[:-1], head_dim), bool)
    np.put_along_axis(mask, both[chosen].reshape(*chosen.shape[:-1], -1), True, -1)
    return mask
