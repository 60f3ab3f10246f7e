"""The store and its writer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..adapter import CAPABILITIES, Account, Array, Calibration, Counts, Info, Ints, Layout, Mask, Observed, Stored
from ..exact import finite
from ..philox import dither

TINY = 2.0**-24


@dataclass
class TwinStore:
    """Named arrays, the page first: what :meth:`Writer.take_pages` and the byte account go over."""

    layout: Layout
    calibration: Calibration
    layer: int
    seed: int
    fields: dict[str, Array]
    back_k: Array  # [slots, kv_heads, d] the backing store
    back_v: Array
    observatory: bool = False
    exact: list[tuple[Array, Array]] = field(default_factory=list)
    counts: Counts = field(default_factory=lambda: Counts(0, 0, 0.0))

    def at(self, name: str, slots: Ints) -> Array:
        """A field at some slots, in float64."""
        page, offset = np.divmod(slots, self.layout.page_size)
        return self.fields[name][page, offset].astype(np.float64)

    def put(self, name: str, slots: Ints, values: Any) -> None:
        """Write a field at some slots."""
        page, offset = np.divmod(slots, self.layout.page_size)
        self.fields[name][page, offset] = values


def identity(layout: Layout) -> Calibration:
    """No equaliser, no sketch, no bypass."""
    kv, d = layout.kv_heads, layout.head_dim
    return Calibration(np.zeros((kv, d)), np.ones((kv, d)), np.zeros((kv, 0, d)), np.zeros((kv, 0), np.int64))


def half_up(x: Array) -> Array:
    """Round non-negative numbers up to float16; Inf on overflow."""
    with np.errstate(over="ignore"):
        y = np.asarray(x).astype(np.float16)
    return np.where(y.astype(np.float64) < x, np.nextafter(y, np.float16(np.inf)), y)


class Writer:
    """Required: create, quantize, stored, dequantize, account, allocated; and the observatory's writer."""

    @property
    def info(self) -> Info:
        return Info(
            name="twin",
            version="1",
            offers=frozenset(CAPABILITIES) - {"cuda_graphs"},
            dtypes=("float32", "float16"),
            versions={"numpy": np.__version__},
        )

    def create(
        self, layout: Layout, pages: int, calibration: Calibration | None = None, layer: int = 0, seed: int = 0
    ) -> TwinStore:
        self.check_calibration(layout, calibration)
        head = (pages, layout.page_size, layout.kv_heads)
        fields: dict[str, Array] = {
            "codes": np.zeros((*head, layout.head_dim), np.int8),
            "scale": np.zeros((*head, layout.groups), np.float16),
            "sketch": np.zeros((*head, layout.sketch), np.int8),
            "witness": np.zeros((*head, layout.witness_bands), np.uint8),
            "bypass": np.zeros((*head, 2 * layout.bypass), layout.dtype),
            "v_codes": np.zeros((*head, layout.head_dim_v), np.int8),
            "v_scale": np.zeros((*head, layout.groups_v), np.float16),
            "v_norm": np.zeros((pages, layout.kv_heads), np.float32),
        }
        return self._store(layout, pages, calibration, layer, seed, fields)

    def _store(
        self,
        layout: Layout,
        pages: int,
        calibration: Calibration | None,
        layer: int,
        seed: int,
        fields: dict[str, Array],
    ) -> TwinStore:
        slots = pages * layout.page_size
        return TwinStore(
            layout, identity(layout) if calibration is None else calibration, layer, seed, fields,
            np.zeros((slots, layout.kv_heads, layout.head_dim)), np.zeros((slots, layout.kv_heads, layout.head_dim_v)),
        )  # fmt: skip

    def check_calibration(self, layout: Layout, calibration: Calibration | None) -> None:
        """u = 0, mu = 0, f = 1 on bypass channels."""
        if calibration is not None and layout.bypass:
            channels = calibration.bypass_channels(layout)
            if np.take_along_axis(calibration.u, channels[:, None, :].repeat(calibration.u.shape[1], 1), 2).any():
                raise ValueError("calibration.u: got a direction on a bypass channel, wants 0 there")

    def check_write(self, store: TwinStore, k: Array, v: Array, slots: Ints) -> None:
        layout = store.layout
        for name, x, width in (("k", k, layout.head_dim), ("v", v, layout.head_dim_v)):
            if x.shape != (len(slots), layout.kv_heads, width):
                raise ValueError(f"{name}: got shape {x.shape}, wants {(len(slots), layout.kv_heads, width)}")
        if len(slots) and (slots.min() < 0 or slots.max() >= len(store.back_k)):
            raise ValueError(f"slots: got {slots.min()}..{slots.max()}, wants 0..{len(store.back_k) - 1}")
        if len(np.unique(slots)) != len(slots):
            raise ValueError("slots: got a slot twice, wants each once")

    def quantize(self, store: TwinStore, k: Array, v: Array, slots: Ints, positions: Ints) -> None:
        self.check_write(store, k, v, slots)
        if not len(slots):
            return
        layout = store.layout
        store.back_k[slots], store.back_v[slots] = self.backing(k), self.backing(v)
        x, lost = self.equalise(store, k)
        scale = self.key_scale(store, x, k, lost)
        lost = lost | ~finite(scale)
        step = np.where(lost[..., None], 1.0, scale.astype(np.float64)).repeat(layout.head_dim // layout.groups, -1)
        xi = self.write_xi(store, positions) if layout.dither else np.zeros_like(x)
        x = np.where(lost[..., None], 0.0, x)
        codes = self.to_int8(
            self.drop_bypass(store, self.round_codes(store, x / self.code_step(store, step, x, k), xi))
        )
        codes = np.where(lost[..., None], 0, codes)
        store.put("codes", slots, codes)
        store.put("scale", slots, np.where(lost[..., None], self.lost_scale(), scale))
        store.put("bypass", slots, np.where(lost[..., None], 0.0, self.kept(store, k)))
        residual = self.residual(store, step * (codes - xi) - x)
        residual = np.where(lost[..., None], 0.0, residual)
        if layout.sketch:
            store.put("sketch", slots, self.sketch_codes(store, residual, step))
        if layout.witness_bands:
            store.put("witness", slots, self.witness_codes(store, residual, step))
        self.write_values(store, v, slots)

    # keys

    def backing(self, exact: Array) -> Array:
        """What the backing store keeps."""
        return exact

    def equalise(self, store: TwinStore, k: Array) -> tuple[Array, Mask]:
        """((k − mu)/f with bypass channels 0, which keys are not finite (0 then))."""
        whole = finite(k)
        x = (np.where(whole[..., None], k, 0.0) - store.calibration.mu) / store.calibration.f
        return self.drop_bypass(store, x), ~whole

    def drop_bypass(self, store: TwinStore, x: Array) -> Array:
        """Bypass channels 0."""
        return np.where(self._bypassed(store), 0.0, x)

    def _bypassed(self, store: TwinStore) -> Mask:
        mask = np.zeros((store.layout.kv_heads, store.layout.head_dim), bool)
        np.put_along_axis(mask, store.calibration.bypass_channels(store.layout), True, 1)
        return mask

    def key_scale(self, store: TwinStore, x: Array, k: Array, lost: Mask) -> Array:
        """A scale a group: covers the group's amax, rounded up."""
        amax = np.abs(x).reshape(*x.shape[:-1], store.layout.groups, -1).max(-1)
        return self.round_scale(amax / self.levels(store))

    def levels(self, store: TwinStore) -> float:
        """Largest code whose scale covers the amax: a dither needs half a step more."""
        return 126.5 if store.layout.dither else 127.0

    def round_scale(self, scale: Array) -> Array:
        """Up to float16, at least its smallest positive number."""
        return np.maximum(half_up(scale), np.float16(TINY))

    def lost_scale(self) -> float:
        """Marks a key that is not finite."""
        return np.inf

    def code_step(self, store: TwinStore, step: Array, x: Array, k: Array) -> Array:
        """The step that codes are counted in: the stored one."""
        return step

    def write_xi(self, store: TwinStore, positions: Ints) -> Array:
        """The dither, ``[n, kv_heads, d]``."""
        period = (positions // store.layout.dither_period)[:, None]
        return dither(store.seed, store.layer, np.arange(store.layout.kv_heads)[None], period, store.layout.head_dim)

    def round_codes(self, store: TwinStore, ratio: Array, xi: Array) -> Array:
        """To the nearest code."""
        return np.rint(ratio + xi)

    def to_int8(self, codes: Array) -> Array:
        """As stored."""
        return codes.astype(np.int8).astype(np.float64)

    def kept(self, store: TwinStore, k: Array) -> Array:
        """The bypass channels' own bits."""
        return np.take_along_axis(
            k, np.broadcast_to(store.calibration.bypass_channels(store.layout), (len(k), *self._kept_shape(store))), -1
        )

    def _kept_shape(self, store: TwinStore) -> tuple[int, int]:
        return store.layout.kv_heads, 2 * store.layout.bypass

    def residual(self, store: TwinStore, residual: Array) -> Array:
        """x̂ − x, 0 on bypass channels."""
        return self.drop_bypass(store, residual)

    def sketch_unit(self, u: Array, step: Array) -> Array:
        """What a sketch code of 1 stands for, u ``[…, r, d]``, step ``[…, d]``."""
        return np.einsum("...rd,...d->...r", np.abs(u), step) / 254

    def sketch_codes(self, store: TwinStore, residual: Array, step: Array) -> Array:
        """The residual's coordinates, to the nearest code."""
        coordinate = np.einsum("hrd,nhd->nhr", store.calibration.u, residual)
        unit = self.sketch_unit(store.calibration.u[None], step)
        return self.round_sketch(np.divide(coordinate, unit, out=np.zeros_like(unit), where=unit > 0))

    def round_sketch(self, x: Array) -> Array:
        """To the nearest code."""
        return np.rint(x)

    def bands(self, layout: Layout) -> Ints:
        """Contiguous runs of RoPE pairs, as even as they come."""
        band = np.empty(layout.head_dim, np.int64)
        pairs = len(layout.pairs)
        band[layout.pairs.ravel()] = np.repeat(np.arange(pairs) * max(layout.witness_bands, 1) // pairs, 2)
        return band

    def _band_norms(self, x: Array, layout: Layout) -> Array:
        return np.sqrt(np.square(x) @ np.eye(layout.witness_bands)[self.bands(layout)])

    def witness_codes(self, store: TwinStore, residual: Array, step: Array) -> Array:
        """Band norms in units of √(Σ s²)/508, rounded up."""
        norm = self._band_norms(residual, store.layout) * (1 + 2.0**-40)
        return self.round_witness(norm / (self._band_norms(step, store.layout) / 508))

    def round_witness(self, x: Array) -> Array:
        """Up."""
        return np.ceil(x)

    # values

    def write_values(self, store: TwinStore, v: Array, slots: Ints) -> None:
        """Plain INT8 with a token scale a group; the page's largest ‖v̂‖ + ρ."""
        groups = store.layout.groups_v
        whole = finite(v)
        value = np.where(whole[..., None], v, 0.0)
        scale = self.round_scale(np.abs(value).reshape(*v.shape[:-1], groups, -1).max(-1) / 127)
        lost = ~(whole & finite(scale))[..., None]
        step = np.where(lost, 1.0, scale.astype(np.float64)).repeat(v.shape[-1] // groups, -1)
        codes = np.where(lost, 0.0, self.round_values(store, value / step))
        store.put("v_codes", slots, codes)
        store.put("v_scale", slots, np.where(lost, np.inf, scale))
        norm = np.linalg.norm(codes * step, axis=-1) + np.linalg.norm(step, axis=-1) / 2 * (1 + 2.0**-12)
        self._raise_norm(store, slots, np.where(lost[..., 0], 0.0, norm * (1 + 2.0**-20)))

    def round_values(self, store: TwinStore, ratio: Array) -> Array:
        """To the nearest code."""
        return np.rint(ratio)

    def _raise_norm(self, store: TwinStore, slots: Ints, norm: Array) -> None:
        np.maximum.at(store.fields["v_norm"], slots // store.layout.page_size, norm.astype(np.float32))

    # what is stored

    def stored(self, store: TwinStore) -> Stored:
        wide = {name: x.astype(np.float64) for name, x in store.fields.items() if name != "v_norm"}
        return Stored(**wide)

    def dequantize(self, store: TwinStore) -> tuple[Array, Array]:
        layout, wide = store.layout, self.stored(store)
        step = wide.scale.repeat(layout.head_dim // layout.groups, -1)
        with np.errstate(invalid="ignore"):
            k = wide.codes * step * store.calibration.f + store.calibration.mu
            v = wide.v_codes * wide.v_scale.repeat(layout.head_dim_v // layout.groups_v, -1)
        if layout.bypass and wide.bypass is not None:
            channels = store.calibration.bypass_channels(layout)
            np.put_along_axis(k, np.broadcast_to(channels, wide.bypass.shape), wide.bypass, -1)
        return k, v

    def account(self, store: TwinStore) -> Account:
        layout = store.layout
        if store.observatory:
            sketch = layout.sketch + 2 if layout.sketch else 0
            return Account(2 * layout.head_dim + 2 * layout.witness_bands + sketch, 2 * layout.head_dim_v + 2, 4)
        key = layout.head_dim + 2 * layout.groups + layout.sketch + layout.witness_bands
        return Account(key + 2 * layout.bypass * layout.itemsize, layout.head_dim_v + 2 * layout.groups_v, 4)

    def allocated(self, store: TwinStore) -> int:
        return sum(x.nbytes for x in store.fields.values())

    # the observatory

    def create_observatory(self, layout: Layout, pages: int, calibration: Calibration | None = None) -> TwinStore:
        head = (pages, layout.page_size, layout.kv_heads)
        fields: dict[str, Array] = {
            "k_hat": np.zeros((*head, layout.head_dim), np.float16),
            "witness": np.zeros((*head, layout.witness_bands), np.float16),
            "sketch": np.zeros((*head, layout.sketch), np.int8),
            "sketch_scale": np.zeros((*head, min(layout.sketch, 1)), np.float16),
            "v_hat": np.zeros((*head, layout.head_dim_v), np.float16),
            "v_error": np.zeros((*head, 1), np.float16),
            "v_norm": np.zeros((pages, layout.kv_heads), np.float32),
        }
        store = self._store(layout, pages, calibration, 0, 0, fields)
        store.observatory = True
        return store

    def observe(self, store: TwinStore, k: Array, v: Array, k_hat: Array, v_hat: Array, slots: Ints) -> None:
        self.check_write(store, k, v, slots)
        layout, calibration = store.layout, store.calibration
        store.back_k[slots], store.back_v[slots] = self.backing(k), self.backing(v)
        with np.errstate(over="ignore"):
            kept, kept_v = (x.astype(np.float16).astype(np.float64) for x in (k_hat, v_hat))
        lost = ~(finite(kept) & finite(k))[..., None]
        lost_v = ~(finite(kept_v) & finite(v))[..., None]
        kept, kept_v = np.where(lost, 0.0, kept), np.where(lost_v, 0.0, kept_v)
        residual = (kept - np.where(lost, 0.0, k)) / calibration.f
        store.put("k_hat", slots, kept)
        norm = self.round_norm(self._band_norms(residual, layout) * (1 + 2.0**-40))
        store.put("witness", slots, np.where(lost, np.inf, norm))
        if layout.sketch:
            coordinate = np.einsum("hrd,nhd->nhr", calibration.u, residual)
            unit = np.maximum(half_up(np.abs(coordinate).max(-1, keepdims=True) / 127), np.float16(TINY)).astype(
                np.float64
            )
            off = lost | ~np.isfinite(unit)
            store.put("sketch", slots, self.round_sketch(np.where(off, 0.0, coordinate / np.where(off, 1.0, unit))))
            store.put("sketch_scale", slots, np.where(off, np.inf, unit))
        store.put("v_hat", slots, kept_v)
        error = half_up(np.linalg.norm(kept_v - np.where(lost_v, 0.0, v), axis=-1) * (1 + 2.0**-40))[..., None]
        store.put("v_error", slots, np.where(lost_v, np.inf, error))
        norm_v = np.linalg.norm(kept_v, axis=-1) + np.where(lost_v, 0.0, error)[..., 0].astype(np.float64)
        self._raise_norm(store, slots, norm_v * (1 + 2.0**-20))

    def round_norm(self, norm: Array) -> Array:
        """Up to float16."""
        return half_up(norm)

    def observed(self, store: TwinStore) -> Observed:
        wide = {name: x.astype(np.float64) for name, x in store.fields.items()}
        scale = wide["sketch_scale"]
        return Observed(
            k_hat=wide["k_hat"], v_hat=wide["v_hat"], witness=wide["witness"], sketch=wide["sketch"],
            sketch_scale=scale[..., 0] if scale.shape[-1] else np.zeros(scale.shape[:-1]),
            v_error=wide["v_error"][..., 0],
        )  # fmt: skip
