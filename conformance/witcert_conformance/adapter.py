"""What the suite asks of an implementation: NumPy arrays in, NumPy arrays out.

An adapter implements :class:`Adapter` and, for each capability group that it lists in ``info.offers``, the methods of
that group. A group that is not listed is reported as not offered. Numbers of a 16-bit model cross the boundary as
float32 arrays whose values that dtype holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""Numbers, float64 unless said."""

Ints: TypeAlias = NDArray[Any]
"""Integers, int64."""

Mask: TypeAlias = NDArray[Any]
"""Booleans."""

Dtype = Literal["float32", "float16", "bfloat16"]

CAPABILITIES: dict[str, str] = {
    "groups": "channel groups with a scale each",
    "witness": "band norms of the residual, a byte each",
    "sketch": "the residual's coordinates along query directions",
    "equaliser": "mu and f from a calibration",
    "bypass": "RoPE pairs kept as they are",
    "dither": "subtractive dither, the radius and its budget (Tier B)",
    "value_error": "a bound on the output's error",
    "risk": "log A and the paper's e-form",
    "splits": "split-KV partial results and their merge",
    "extend": "several query rows a sequence, behind a stored prefix or with their own exact chunk",
    "sinks": "a learnt logit in each head's denominator",
    "soft_cap": "a tanh cap on the logits",
    "window": "sliding-window attention",
    "bias": "an additive bias on the logits, -Inf masks",
    "repair": "exact pages from a backing store in place of compressed ones",
    "gate": "repair until no query head is over a threshold",
    "page_reuse": "pages that are freed and written again; slots with arbitrary bytes",
    "reorder": "gather, repeat and drop pages of a store",
    "binding": "a store that refuses another calibration than its writer's",
    "fit": "fitting an equaliser",
    "observatory": "reconstructions of any scheme, with a two-part meter",
    "telemetry": "counters of what was reported",
    "settings": "defaults of a framework, such as autocast, that a caller may have changed",
    "refusals": "errors that name the argument, before anything is written",
    "cuda_graphs": "runs on CUDA tensors without host synchronisation, inside a captured graph",
}
"""Capability groups, and what each one is."""


@dataclass(frozen=True)
class Info:
    """Who an implementation is and what it offers.

    Attributes:
        name, version, device: shown in the report.
        offers: keys of :data:`CAPABILITIES`.
        head_dims, head_dims_v, page_sizes, dtypes: what the suite may ask for.
        wide_heads: ``(head_dim, head_dim_v)`` of real models that it may ask for as well, a few times.
        levels, levels_dither: largest code whose scale covers the amax.
        step_widening, sketch_widening: documented relative rounding of the writer; both are in c.
        tanh_error: documented error of the soft cap, over the cap.
        even_bands: the bands of a witness must divide the pairs.
        cell_share: share of the half million cells that is affordable.
        slow: draw a tenth of the cases (an interpreter).
        versions: libraries that matter, name to version.
    """

    name: str
    version: str = "0"
    device: str = "cpu"
    offers: frozenset[str] = frozenset()
    head_dims: tuple[int, ...] = (2, 4, 8, 16)
    head_dims_v: tuple[int, ...] = (2, 4, 8)
    page_sizes: tuple[int, ...] = (1, 2, 4, 8)
    wide_heads: tuple[tuple[int, int], ...] = ((80, 80), (192, 128), (256, 256), (576, 512))
    dtypes: tuple[Dtype, ...] = ("float32",)
    levels: float = 127.0
    levels_dither: float = 126.5
    step_widening: float = 2.0**-12
    sketch_widening: float = 2.0**-5
    tanh_error: float = 2.0**-22
    even_bands: bool = False
    cell_share: float = 1.0
    slow: bool = False
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = self.offers - CAPABILITIES.keys()
        if unknown:
            raise ValueError(f"offers: got {sorted(unknown)}, wants names from {sorted(CAPABILITIES)}")


@dataclass(frozen=True)
class Layout:
    """What a store keeps of a token; sizes in channels or entries, ``page_size`` in tokens."""

    kv_heads: int = 1
    head_dim: int = 4
    head_dim_v: int = 4
    page_size: int = 4
    dtype: Dtype = "float32"
    group: int | None = None
    sketch: int = 0
    witness_bands: int = 0
    bypass: int = 0
    dither: bool = False
    dither_period: int = 4
    rope_layout: Literal["half", "interleaved"] = "half"
    rotary_dim: int | None = None

    @property
    def groups(self) -> int:
        """Scales of a token's key."""
        return 1 if self.group is None else self.head_dim // self.group

    @property
    def groups_v(self) -> int:
        """Scales of a token's value."""
        return 1 if self.group is None else self.head_dim_v // self.group

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the model."""
        return 4 if self.dtype == "float32" else 2

    @cached_property
    def pairs(self) -> Ints:
        """Channels of each RoPE pair, ``[head_dim / 2, 2]``; channels outside the rotary part pair with neighbours."""
        rotary = self.head_dim if self.rotary_dim is None else self.rotary_dim
        first = np.arange(rotary // 2)
        half = np.stack([first, first + rotary // 2], 1)
        rotated = half if self.rope_layout == "half" else np.arange(rotary).reshape(-1, 2)
        return np.concatenate([rotated, np.arange(rotary, self.head_dim).reshape(-1, 2)])


PLAIN = Layout()
"""One kv head, four channels, a scale a token."""


@dataclass(frozen=True)
class Calibration:
    """Equaliser, sketch directions, bypass pairs of a layer.

    mu, f ``[kv_heads, head_dim]`` (float32 values; mu = 0, f = 1 on bypass channels; f equal within a RoPE pair),
    u ``[kv_heads, r, head_dim]`` unit vectors (float32 values), bypass ``[kv_heads, m]`` indices of RoPE pairs.
    """

    mu: Array
    f: Array
    u: Array
    bypass: Ints

    def bypass_channels(self, layout: Layout) -> Ints:
        """``[kv_heads, 2 m]``: all first channels of the pairs, then all second ones."""
        return np.concatenate([layout.pairs[:, 0][self.bypass], layout.pairs[:, 1][self.bypass]], 1)


@dataclass(frozen=True)
class Stored:
    """A packed store read back, as exact float64 numbers; leading axes ``[pages, page_size, kv_heads]``.

    codes ``[…, head_dim]`` and scale ``[…, groups]`` (+Inf marks a key that is not finite); sketch ``[…, r]``, witness
    ``[…, B]``; bypass ``[…, 2 m]``; v_codes ``[…, head_dim_v]``, v_scale ``[…, groups_v]`` (+Inf likewise).
    """

    codes: Array
    scale: Array
    v_codes: Array
    v_scale: Array
    sketch: Array | None = None
    witness: Array | None = None
    bypass: Array | None = None


@dataclass(frozen=True)
class Observed:
    """An observatory read back; leading axes ``[pages, page_size, kv_heads]``.

    k_hat, v_hat the reconstructions that are attended to; witness ``[…, B]`` (+Inf marks a key that is not finite);
    sketch ``[…, r]`` codes and their ``sketch_scale`` ``[…]`` (+Inf where they say nothing); v_error ``[…]``.
    """

    k_hat: Array
    v_hat: Array
    witness: Array
    sketch: Array
    sketch_scale: Array
    v_error: Array


@dataclass(frozen=True)
class Budget:
    """A request's failure probability and what it is divided by."""

    delta: float
    layers: int
    heads: int
    steps: int


@dataclass(frozen=True)
class Read:
    """Arguments of a decode, FlashInfer's names and layouts.

    q ``[rows, heads, head_dim]``; page_table ``[batch, max_pages]``; seq_lens ``[batch]``, tokens read from the pool;
    qo_indptr ``[batch + 1]`` (None: one row a sequence); k_new, v_new ``[rows, kv_heads, …]`` the rows' own chunk,
    exact, behind the pool's tokens (None: the rows are the last ones of the pool); exact_pages ``[batch, kv_heads,
    max_pages]``, -1 or a slot from ``page_in``; sinks ``[heads]``; a row at position p attends from
    p - window_left (< 0: no window); bias ``[rows, heads, tokens]``.
    """

    q: Array
    page_table: Ints
    seq_lens: Ints
    qo_indptr: Ints | None = None
    k_new: Array | None = None
    v_new: Array | None = None
    causal: bool = True
    exact_pages: Ints | None = None
    sm_scale: float = 1.0
    sinks: Array | None = None
    soft_cap: float = 0.0
    window_left: int = -1
    bias: Array | None = None
    budget: Budget | None = None
    splits: int | None = None


@dataclass(frozen=True)
class Decoded:
    """What a decode reports. out ``[rows, heads, head_dim_v]``, the others ``[rows, heads]``.

    ``lse`` natural log, of the true logits. ``eform`` and ``risk`` with the group ``risk``, ``value_error`` with its
    own. ``guarantee``: ``"any_query"`` or ``"fixed_trajectory"``.
    """

    out: Array
    lse: Array
    meter: Array
    guarantee: str = "any_query"
    eform: Array | None = None
    risk: Array | None = None
    value_error: Array | None = None


@dataclass(frozen=True)
class Account:
    """Bytes of a token's key and value in one kv head, and of what a page of a kv head adds to its tokens."""

    key: int
    value: int
    page: int = 0


@dataclass(frozen=True)
class Gated:
    """A gated decode: the last certificate, the pages exact by then ``[batch, kv_heads, max_pages]`` (bool), and every
    page-in as ``(sequence, kv head, page of the sequence)`` in order."""

    decoded: Decoded
    repaired: Mask
    page_ins: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Counts:
    """Telemetry: cells reported, cells that were not finite, and the largest meter seen."""

    cells: int
    nonfinite: int
    max_meter: float


Store = Any
"""An implementation's own handle of one layer's store."""


class Adapter(Protocol):
    """Required of every implementation."""

    @property
    def info(self) -> Info:
        """Name and capabilities."""
        ...

    def create(
        self, layout: Layout, pages: int, calibration: Calibration | None = None, layer: int = 0, seed: int = 0
    ) -> Store:
        """A store of ``pages`` pages. ``layer`` and the 64-bit ``seed`` key the dither."""
        ...

    def quantize(self, store: Store, k: Array, v: Array, slots: Ints, positions: Ints) -> None:
        """Write tokens ``[n, kv_heads, …]`` to slots (page · page_size + offset); positions are logical ones."""
        ...

    def stored(self, store: Store) -> Stored:
        """The bytes of the store."""
        ...

    def dequantize(self, store: Store) -> tuple[Array, Array]:
        """``(k_hat, v_hat)`` in the coordinates of k and v, ``[pages, page_size, kv_heads, …]``."""
        ...

    def decode(self, store: Store, read: Read) -> Decoded:
        """Attention over the store with its certificate."""
        ...

    def account(self, store: Store) -> Account:
        """What a token costs, by design."""
        ...

    def allocated(self, store: Store) -> int:
        """Bytes of the store's tensors, exact pages not counted."""
        ...


class OffersWitness(Protocol):
    """Group ``witness``."""

    def bands(self, layout: Layout) -> Ints:
        """Band of each key channel, ``[head_dim]``."""
        ...


class OffersRepair(Protocol):
    """Group ``repair``."""

    def page_in(self, store: Store, page: int, kv_head: int) -> int:
        """Fetch one page of one kv head from the implementation's own backing store; its slot for ``exact_pages``."""
        ...


class OffersGate(Protocol):
    """Group ``gate``."""

    def gate(self, store: Store, read: Read, tau: float) -> Gated:
        """Decode, repair and decode again until no query head of a kv head is over ``tau`` (< 1: the meter)."""
        ...


class OffersPages(Protocol):
    """Groups ``page_reuse`` (``free``, ``poison``) and ``reorder`` (``take_pages``)."""

    def free(self, store: Store, pages: Ints) -> None:
        """Give pages back; they are written again later."""
        ...

    def poison(self, store: Store, slots: Ints) -> None:
        """Fill slots with the most harmful bytes (NaN where a field can hold it)."""
        ...

    def take_pages(self, store: Store, pages: Ints) -> None:
        """Replace the pages by copies of ``pages``, repeats allowed."""
        ...


class OffersBinding(Protocol):
    """Group ``binding``."""

    def read_with(self, store: Store, calibration: Calibration, read: Read) -> Decoded:
        """Decode the store's bytes under this calibration; ValueError unless it is the one that wrote them."""
        ...


class OffersFit(Protocol):
    """Group ``fit``."""

    def fit(self, keys: Array, layout: Layout) -> tuple[Array, Array]:
        """Equaliser ``(mu, f)`` ``[kv_heads, head_dim]`` of keys ``[tokens, kv_heads, head_dim]``."""
        ...


class OffersObservatory(Protocol):
    """Group ``observatory``; ``decode`` and ``account`` take its stores as well."""

    def create_observatory(self, layout: Layout, pages: int, calibration: Calibration | None = None) -> Store:
        """A store of reconstructions; of the layout, ``sketch`` and ``witness_bands`` apply."""
        ...

    def observe(self, store: Store, k: Array, v: Array, k_hat: Array, v_hat: Array, slots: Ints) -> None:
        """Write reconstructions of tokens, with the witness of what they lost."""
        ...

    def observed(self, store: Store) -> Observed:
        """The bytes of the store."""
        ...


class OffersTelemetry(Protocol):
    """Group ``telemetry``."""

    def telemetry(self, store: Store) -> Counts:
        """Counts over all decodes of the store."""
        ...


class OffersSettings(Protocol):
    """Group ``settings``."""

    def settings(self) -> Mapping[str, AbstractContextManager[Any]]:
        """Name to a context in which a framework's default is another one; made anew by each call."""
        ...


class OffersBudget(Protocol):
    """Group ``dither``."""

    def delta_local(self, budget: Budget) -> float:
        """Failure probability of one certificate."""
        ...


class OffersGraphs(Protocol):
    """Group ``cuda_graphs``."""

    def replay(self, store: Store, reads: list[Read], order: list[int]) -> list[Decoded]:
        """Capture one graph a read (all of one shape) and replay them in ``order``; what each replay reported."""
        ...

    def synchronisations(self, store: Store, read: Read) -> int:
        """Host synchronisations that one decode makes."""
        ...


def optional(adapter: Adapter) -> Any:
    """The same adapter, for calls of its optional groups' methods."""
    return adapter


def load(name: str) -> Adapter:
    """One of ours by name, or ``package.module:Class``, installed or in the current folder.

    Raises:
        ValueError: an unknown name, or one whose library is not installed.
    """
    import importlib
    import sys
    from pathlib import Path

    from .adapters import OURS

    here = str(Path.cwd())
    if name not in OURS and here not in sys.path:
        sys.path.append(here)  # commands, unlike `python -m`, leave it out
    target = OURS.get(name, name)
    module, _, attribute = target.partition(":")
    if not attribute:
        raise ValueError(f"impl: got {name!r}, wants one of {', '.join(OURS)} or package.module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
        adapter: Adapter = found()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"impl: cannot load {target!r}: {error}") from error
    if not isinstance(getattr(adapter, "info", None), Info):
        raise ValueError(f"impl: got {target!r}, whose info is not an Info, wants an Adapter")
    return adapter
