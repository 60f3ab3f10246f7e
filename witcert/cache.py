"""A transformers cache whose keys and values are compressed, metered, and repaired when the meter asks for it."""

from __future__ import annotations

import copy
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from witcert_kernels import (
    Budget,
    ObservatoryLayout,
    ObservatoryPool,
    PackedPool,
    StoreLayout,
    Telemetry,
)
from witcert_kernels.checks import check_flag, check_integer, check_range, check_tensor
from witcert_kernels.layout import MODEL_DTYPES

from . import schemes
from .capture import shapes_of
from .chunk import Chunk
from .configuration import CalibrationLike, layer_calibrations, windows
from .gate import read_gated
from .read import Read, read_once
from .report import BudgetState, Bytes, History, Report, StepRecord, versions
from .store import LayerStore

HISTORY = 100_000
DELTA = 1e-2
STEPS = 2**15


class Handle:
    """What ``WitCertCache.update`` returns in place of keys and values, for the attention function only.

    Attributes:
        k, v: the chunk, exact, ``[batch, kv_heads, n, head_dim]`` and ``[…, head_dim_v]``.
        cache, layer_idx: where it belongs.
    """

    __slots__ = ("cache", "k", "layer_idx", "v")

    def __init__(self, cache: WitCertCache, layer_idx: int, k: Tensor, v: Tensor) -> None:
        self.cache, self.layer_idx, self.k, self.v = cache, layer_idx, k, v

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise TypeError(
            f"WitCertCache: keys and values were used directly ({what}), but they exist in compressed form only; "
            'call model.set_attn_implementation("witcert") first'
        )

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(name)

    def __len__(self) -> int:
        self._refuse("len")

    def __iter__(self) -> NoReturn:
        self._refuse("iteration")

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse("indexing")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        cls._refuse(getattr(func, "__name__", str(func)))


def _check_chunk(store: LayerStore, k: Tensor, v: Tensor) -> None:
    """What the writer will ask of a chunk's tokens, before anything is written or spent."""
    layout = store.pool.layout
    for name, x, width in (("key", k, layout.head_dim), ("value", v, layout.head_dim_v)):
        check_tensor(name, x, (None, layout.kv_heads, width), layout.dtype, store.pool.device)


def _check_read(
    store: LayerStore, q: Tensor, k: Tensor, v: Tensor, sm_scale: float | None, cap: float, sinks: Tensor | None
) -> None:
    """What the reader will ask, likewise."""
    _check_chunk(store, k, v)
    layout = store.pool.layout
    check_tensor("query", q, (None, None, layout.head_dim), layout.dtype, store.pool.device)
    if q.shape[1] % layout.kv_heads:
        raise ValueError(f"query: got {q.shape[1]} heads, wants a multiple of the {layout.kv_heads} kv heads")
    if sm_scale is not None:
        check_range("scaling", sm_scale, 0.0, 1e6, open_low=True)
    check_range("softcap", cap, 0.0, 1e6)
    if sinks is not None:
        check_tensor("s_aux", sinks, (q.shape[1],), MODEL_DTYPES, store.pool.device)
        if sinks.device.type == "cpu" and not bool(sinks.isfinite().all()):
            raise ValueError("s_aux: got a number that is not finite, wants finite ones")


class WitCertLayer(CacheLayerMixin):
    """What transformers asks of one layer of a :class:`WitCertCache`; ``window``: positions of a sliding window."""

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.record_past = False
        self.store: LayerStore | None = None

    @property
    def batch_size(self) -> int:
        """Sequences, −1 before the first token."""
        return -1 if self.store is None else len(self.store.lengths)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: a layer's store is made when its first chunk is written."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a chunk belongs to the cache, which knows the other layers."""
        raise TypeError("WitCertLayer.update: wants WitCertCache.update")

    def get_seq_length(self) -> int:
        """Positions, padding counted."""
        return 0 if self.store is None else self.store.total

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers all positions, in a sliding layer too."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def activate_past_recording(self) -> None:
        """Keep what an exact roll-back by :meth:`crop` needs."""
        self.record_past = True

    def reset(self) -> None:
        """Forget everything."""
        self.store, self.record_past = None, False

    def select(self, rows: Sequence[int]) -> None:
        """Make sequence i the old sequence ``rows[i]``, in every part of the store."""
        store = self.store
        if store is not None:
            store.rearrange(rows, [store.lengths[i] for i in rows], [store.pads[i] for i in rows])

    def crop(self, tokens_to_remove: int) -> None:
        """As :meth:`WitCertCache.crop`."""
        store = self.store
        if store is not None:
            total = max(0, store.total + tokens_to_remove)
            pads = [min(pad, total) for pad in store.pads]
            store.rearrange(range(len(pads)), [total - pad for pad in pads], pads)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """As :meth:`WitCertCache.reorder_cache`."""
        self.select(beam_idx.tolist())


class WitCertCache(Cache):
    """A KV cache that holds compressed keys and values and bounds what that does to the attention.

    Args:
        config: the model's configuration.
        scheme: a name of ``witcert.schemes``, or a :class:`witcert.schemes.Scheme`.
        tau: threshold of the gate (τ < 1: certified; τ ≥ 1: risk-ranked); None for no gate.
        calibration: a file, ``"default"`` (the shipped one, of SmolLM2-135M-Instruct), a
            :class:`witcert.calibration.Calibration`, or one :class:`LayerCalibration` a layer.
        budget: failure budget of a dithered store; by default δ = 0.01 over as many steps as the model has positions.
        backing: keep exact keys and values too (16 or 32 bits); by default only for the gate.
        history: most cells that the report lists.
        telemetry: counters on the model's device, of any number of caches, that this one's cells are added to.
        seed: 64-bit key of the dither, for repeatable experiments; by default each request draws its own. Tier B holds
            only for queries that do not depend on the key, so a public constant voids it against whoever knows it.
        layout: options of :class:`StoreLayout` or :class:`ObservatoryLayout`, such as ``page_size``, ``group``,
            ``sketch``, ``witness_bands``, ``bypass``; by default what the calibration holds.

    Attributes:
        observer: called with a :class:`StepRecord` after each read of each layer's store, when not None.

    Raises:
        TypeError, ValueError: a model or an argument that is not supported, by name.

    Use with ``model.set_attn_implementation("witcert")`` and ``cache=cache`` (``past_key_values=cache`` in older
    transformers). Logical positions do not count left padding. A chunk of one position reads everything from the store;
    a longer one, and the first token of a sequence, attend to their own chunk exactly and to the rest from the store.
    No length is refused.
    """

    layers: list[WitCertLayer]  # type: ignore[assignment]

    def __init__(
        self,
        config: PreTrainedConfig,
        scheme: str | schemes.Scheme | schemes.PackedScheme = "int8",
        tau: float | None = None,
        calibration: CalibrationLike | None = None,
        *,
        budget: Budget | None = None,
        backing: bool | None = None,
        history: int = HISTORY,
        telemetry: Telemetry | None = None,
        seed: int | None = None,
        **layout: Any,
    ) -> None:
        super().__init__(layers=[WitCertLayer(window) for window in windows(config)])
        text = config.get_text_config(decoder=True)
        self.scheme = schemes.get(scheme) if isinstance(scheme, str) else scheme
        if not isinstance(self.scheme, schemes.Scheme | schemes.PackedScheme):
            raise TypeError(f"scheme: got {type(scheme).__name__}, wants a name or a Scheme")
        if tau is not None:
            check_range("tau", tau, 0.0, float("inf"), open_low=True)
        if backing is not None:
            check_flag("backing", backing)
        if tau is not None and backing is False:
            raise ValueError("backing: got False, wants True or None: the gate repairs from the backing store")
        history = check_integer("history", history, 0, 2**62)
        if telemetry is not None and not isinstance(telemetry, Telemetry):
            raise TypeError(f"telemetry: got {type(telemetry).__name__}, wants a witcert_kernels.Telemetry")
        if seed is not None:
            if not self.is_dithered:
                raise ValueError(f"seed: got one for scheme {self.scheme.name!r}, wants None without a dither")
            seed = check_integer("seed", seed, 0, 2**64 - 1)
        self.tau, self.history, self.telemetry = tau, history, telemetry
        self._fixed_seed = seed
        self._backing = tau is not None if backing is None else backing
        calibrations, chosen = layer_calibrations(calibration, config, len(self.layers))
        self._layout = self._complete(layout, chosen)
        r = self._layout.get("sketch", 0)
        self._calibrations = calibrations and [replace(layer, u=layer.u[:, :r].contiguous()) for layer in calibrations]
        self.budget = self._check_budget(budget, text)
        self.observer: Callable[[StepRecord], None] | None = None
        self._start()
        self._check_layout(text)

    @property
    def is_dithered(self) -> bool:
        """Whether the store draws a dither, so that its guarantee holds for a fixed trajectory."""
        return isinstance(self.scheme, schemes.PackedScheme) and self.scheme.dither

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Handles of a chunk for the attention function. Writes nothing.

        Args:
            key_states: ``[batch, kv_heads, n, head_dim]``. value_states: ``[batch, kv_heads, n, head_dim_v]``.
        """
        check_integer("layer_idx", layer_idx, 0, len(self.layers) - 1)
        handle = Handle(self, layer_idx, key_states, value_states)
        return handle, handle  # type: ignore[return-value]

    def attend(
        self,
        handle: Handle,
        query: Tensor,
        attention_mask: Tensor | None,
        *,
        sm_scale: float | None,
        window: int | None = None,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write a chunk and return its attention, ``[batch, n, heads, head_dim_v]``.

        Args:
            handle: what :meth:`update` returned. query: ``[batch, heads, n, head_dim]``.
            attention_mask: 2-D padding mask of all positions, or None.
            window: W of a sliding window over W positions, or None. Others: see the op.

        Raises:
            TypeError, ValueError: by name, before anything is written.
            BudgetExhausted: the dithered store's steps are used up; nothing is written.
        """
        index, layer = handle.layer_idx, self.layers[handle.layer_idx]
        check_tensor("query", query, (None, None, None, None))
        batch, _, n, _ = query.shape
        for name, x in (("key", handle.k), ("value", handle.v)):
            check_tensor(name, x, (batch, None, n, None))
        if layer.window != window:
            raise ValueError(f"sliding_window: got {window} in layer {index}, wants {layer.window}, as the config says")
        chunk = Chunk.of(layer.store, attention_mask, batch, n, query.device)
        # autocast leaves keys and values of two dtypes; the wider one holds both exactly
        dtype = torch.promote_types(torch.promote_types(query.dtype, handle.k.dtype), handle.v.dtype)
        q, k, v = (chunk.tokens(x.to(dtype)) for x in (query, handle.k, handle.v))
        store = layer.store or self._new_store(index, k, v, batch)
        _check_read(store, q, k, v, sm_scale, logits_soft_cap, sinks)
        if self.telemetry is not None and self.telemetry.device != q.device:
            raise ValueError(f"telemetry: got device {self.telemetry.device}, wants {q.device}")
        before = list(store.lengths)
        self._begin(index, n, max((c for c, old in zip(chunk.counts, before, strict=True) if old), default=0))
        options: dict[str, Any] = {
            "sm_scale": sm_scale,
            "logits_soft_cap": logits_soft_cap,
            "window_left": -1 if window is None else window - 1,
            "sinks": sinks,
            "budget": self.budget,
        }

        decoding = [b for b in range(batch) if n == 1 and before[b]]
        extending = [b for b in range(batch) if chunk.counts[b] and b not in decoding]
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        if decoding:
            self._write(layer, store, chunk, k, v)
            rows = chunk.rows_of(decoding, q.device)
            read = Read(store, decoding, [before[b] + 1 for b in decoding], q[rows], **options)
            out = out.index_copy(0, rows, self._read(index, read))
        if extending:
            rows = chunk.rows_of(extending, q.device)
            indptr = [0, *accumulate(chunk.counts[b] for b in extending)]
            lengths = [before[b] for b in extending]
            read = Read(store, extending, lengths, q[rows], indptr, k[rows], v[rows], **options)
            out = out.index_copy(0, rows, self._read(index, read))
        if not decoding:
            self._write(layer, store, chunk, k, v)
        return chunk.positions(out).to(handle.v.dtype)

    def preload(self, keys_values: Sequence[tuple[Tensor, Tensor]], attention_mask: Tensor | None = None) -> None:
        """Write a prompt's exact keys and values, computed elsewhere, into an empty cache.

        Args:
            keys_values: of each layer ``k [batch, kv_heads, n, head_dim]`` and ``v [batch, kv_heads, n, head_dim_v]``.
            attention_mask: ``[batch, n]`` padding mask, or None.

        Raises:
            TypeError, ValueError: the cache is not empty, or not tensors, or another number of layers, sequences or
                positions.
        """
        if len(keys_values) != len(self.layers):
            raise ValueError(f"keys_values: got {len(keys_values)} layers, wants {len(self.layers)}")
        for pair in keys_values:
            for name, x in zip(("key", "value"), pair, strict=True):
                check_tensor(f"keys_values, {name}", x, (None, None, None, None))
        if self.get_seq_length():
            raise ValueError(f"preload: got a cache of {self.get_seq_length()} positions, wants an empty one")
        batch, _, n, _ = keys_values[0][0].shape
        for x in (x for pair in keys_values for x in pair):
            if (x.shape[0], x.shape[2]) != (batch, n):
                raise ValueError(
                    f"keys_values: got shape {list(x.shape)}, wants [{batch}, kv_heads, {n}, d] everywhere"
                )
        ready = []
        for index, (layer, (key, value)) in enumerate(zip(self.layers, keys_values, strict=True)):
            chunk = Chunk.of(layer.store, attention_mask, batch, n, key.device)
            k, v = chunk.tokens(key), chunk.tokens(value)
            store = layer.store or self._new_store(index, k, v, batch)
            _check_chunk(store, k, v)
            ready.append((layer, store, chunk, k, v))
        for index, arguments in enumerate(ready):
            self._begin(index, n, 0)
            self._write(*arguments)

    def reset(self) -> None:
        """Begin a new request: no tokens, no cells, the budget unspent, another dither unless ``seed`` was given."""
        super().reset()
        if self.budget is not None:
            self.budget.spent = 0
        self._start()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` positions of every sequence.

        Raises:
            TypeError: no integer.
            ValueError: a positive number (the length to keep, in older transformers), or a group of tokens that were
                quantised together would be split and its exact tokens are gone (see :meth:`activate_past_recording`).
        """
        tokens_to_remove = check_integer("tokens_to_remove", tokens_to_remove, -(2**62), 2**62)
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: got {tokens_to_remove}, wants 0 or a negative number: minus the positions to remove"
            )
        for layer in self.layers:
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make sequence i the old sequence ``beam_idx[i]``, in every part of the store.

        Raises:
            TypeError, ValueError: not an index tensor, or an index out of range; nothing has changed then.
        """
        self._select("beam_idx", beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices`` (numbers, or a mask), in that order. Raises as :meth:`reorder_cache`."""
        check_tensor("indices", indices, (None,))
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._select("indices", indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times. Raises as :meth:`reorder_cache`."""
        repeats = check_integer("repeats", repeats, 1)
        self._select("indices", torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def report(self) -> Report:
        """What the meter saw since the cache was made or reset."""
        stores = [layer.store for layer in self.layers if layer.store is not None]
        parts: dict[str, int] = {"store": 0, "backing": 0, "exact": 0, "tail": 0}
        for store in stores:
            for name, size in store.nbytes.items():
                parts[name] += size
        layout = stores[0].pool.layout if stores else None
        nominal = getattr(self.scheme, "nominal_bytes", None)
        fingerprints = [layer.fingerprint for layer in self._calibrations or []]
        return Report(
            scheme=self.scheme.name,
            tau=self.tau,
            gate=None if self.tau is None else "certified" if self.tau < 1 else "risk_ranked",
            guarantee=self._history.guarantee,
            cells=self._history.cells(),
            pages=sum(store.pool.layout.kv_heads * sum(store.used_pages) for store in stores),
            pages_repaired=sum(store.repaired_pages for store in stores),
            bytes=Bytes(
                **parts,
                per_token=layout.bytes_per_token if layout else 0,
                nominal_per_token=nominal(layout.head_dim, layout.head_dim_v) if nominal and layout else None,
            ),
            seed=self._seed if self.is_dithered else None,
            calibration=hashlib.sha256("".join(fingerprints).encode()).hexdigest() if fingerprints else None,
            budget=BudgetState(delta=self.budget.delta, steps=self.budget.steps, spent=self.budget.spent)
            if self.budget
            else None,
            versions=versions(),
            **self._history.totals(),  # type: ignore[arg-type]
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> WitCertCache:
        """A copy that shares the observer, the telemetry and nothing else."""
        for shared in (self.observer, self.telemetry):
            memo[id(shared)] = shared
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            setattr(new, name, copy.deepcopy(value, memo))
        return new

    def _start(self) -> None:
        self._history = History(self.history)
        self._seed = secrets.randbits(64) if self._fixed_seed is None else self._fixed_seed
        self._step = -1

    def _complete(self, layout: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
        """Layout options, completed by what the calibration holds."""
        packed = isinstance(self.scheme, schemes.PackedScheme)
        kind = StoreLayout if packed else ObservatoryLayout
        known = set(kind.__dataclass_fields__) - {"kv_heads", "head_dim", "head_dim_v", "dtype", "dither"}
        unknown = set(layout) - known
        if unknown:
            raise TypeError(f"layout: got {', '.join(sorted(unknown))}, wants some of {', '.join(sorted(known))}")
        if packed:
            return chosen | layout | {"dither": self.is_dithered}
        return {name: chosen[name] for name in known - {"witness_bands"} if name in chosen} | layout

    def _check_layout(self, text: PreTrainedConfig) -> None:
        """Refuse layout options that no store of this model can have, before there is a token."""
        shape = shapes_of(text)
        sizes = (shape["kv_heads"], shape["head_dim"], shape["head_dim_v"])
        self._make_pool(0, *sizes, torch.float32, torch.device("cpu"))

    def _check_budget(self, budget: Budget | None, text: PreTrainedConfig) -> Budget | None:
        layers, heads = len(self.layers), text.num_attention_heads
        if not self.is_dithered:
            if budget is not None:
                raise ValueError(f"budget: got one for scheme {self.scheme.name!r}, wants None without a dither")
            return None
        if budget is None:
            return Budget(DELTA, layers, heads, getattr(text, "max_position_embeddings", None) or STEPS)
        if not isinstance(budget, Budget):
            raise TypeError(f"budget: got {type(budget).__name__}, wants a Budget")
        if (budget.layers, budget.heads) != (layers, heads):
            raise ValueError(
                f"budget: got {budget.layers} layers of {budget.heads} heads, wants the model's {layers} of {heads}"
            )
        return budget

    def _make_pool(
        self,
        index: int,
        kv_heads: int,
        head_dim: int,
        head_dim_v: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PackedPool | ObservatoryPool:
        calibration = self._calibrations[index] if self._calibrations else None
        options = self._layout
        if isinstance(self.scheme, schemes.PackedScheme):
            layout = StoreLayout(kv_heads, head_dim, head_dim_v, dtype, **options)
            return PackedPool(layout, 0, layer=index, calibration=calibration, seed=self._seed, device=device)
        bands = options.get("witness_bands", min(16, head_dim // 2))
        observatory = ObservatoryLayout(kv_heads, head_dim, head_dim_v, dtype, **(options | {"witness_bands": bands}))
        return ObservatoryPool(observatory, 0, layer=index, calibration=calibration, device=device)

    def _new_store(self, index: int, k: Tensor, v: Tensor, batch: int) -> LayerStore:
        """The store of a layer that has none; it joins the cache with its first chunk."""
        pool = self._make_pool(index, k.shape[1], k.shape[2], v.shape[2], k.dtype, k.device)
        scheme = self.scheme if isinstance(self.scheme, schemes.Scheme) else None
        return LayerStore(pool, scheme, batch, backing=self._backing)

    def _begin(self, index: int, n: int, reading_rows: int) -> None:
        """Check that all layers are at the same step; in the first layer, spend the budget of the step."""
        totals = [layer.get_seq_length() for layer in self.layers]
        wanted = totals[0] if index == 0 else totals[0] - n
        others = totals[1:] if index == 0 else [totals[index]]
        if any(total != wanted for total in others):
            raise ValueError(
                f"layers: got {max(others)} positions in a layer, wants {wanted} as in the first: a step was "
                "interrupted; call reset()"
            )
        if index == 0:
            if self.budget is not None:
                self.budget.spend(reading_rows)
            self._step += n

    def _write(self, layer: WitCertLayer, store: LayerStore, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        store.write(k, v, chunk.counts, keep_past=layer.record_past)
        store.pads, layer.store = chunk.pads, store

    def _read(self, index: int, read: Read) -> Tensor:
        """Read, gate decode rows, report."""
        if self.tau is None or not read.is_decode:
            reading = read_once(read, self.telemetry)
        else:
            reading = read_gated(read, self.tau)
            if self.telemetry is not None:  # the cells after repair
                last = reading.certificate
                counted = reading.compressed_before
                self.telemetry.add(last.meter, last.risk, last.value_error, counted, index)
        record = StepRecord(index, self._step, read, reading)
        if any(read.lengths):
            self._history.add(record)
        if self.observer is not None:
            self.observer(record)
        return reading.out

    def _select(self, name: str, indices: Tensor) -> None:
        check_tensor(name, indices, (None,), (torch.int64, torch.int32))
        batch, rows = self.batch_size, indices.tolist()
        if batch < 0:
            return
        if not rows or min(rows) < -batch or max(rows) >= batch:
            raise ValueError(f"{name}: got {rows}, wants numbers of the {batch} sequences")
        rows = [row % batch for row in rows]
        for layer in self.layers:
            layer.select(rows)
