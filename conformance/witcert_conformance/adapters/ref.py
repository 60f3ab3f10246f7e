"""``witcert_ref`` behind the suite's protocol: the reference's functions, with a paged store around them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import metadata

import numpy as np

import witcert_ref
from witcert_ref import attention, dither, equalizer, half_step, radius, rope, sketch, store, witness

from ..adapter import Account, Array, Budget, Calibration, Decoded, Info, Ints, Layout, Mask, Observed, Read, Stored
from ..exact import finite

ROUNDING = 2.0**-38
"""ζ over the size of the logits: float64 arithmetic of a few hundred operations."""


@dataclass
class _Store:
    layout: Layout
    calibration: Calibration
    layer: int
    seed: int
    fields: dict[str, Array]
    positions: Ints  # [slots], -1 where nothing was written
    k: Array  # [slots, kv_heads, d], the backing store
    v: Array
    observatory: bool = False
    exact: list[tuple[Array, Array]] = field(default_factory=list)

    def put(self, name: str, slots: Ints, values: Array) -> None:
        page, offset = np.divmod(slots, self.layout.page_size)
        self.fields[name][page, offset] = values

    def at(self, name: str, slots: Ints) -> Array:
        page, offset = np.divmod(slots, self.layout.page_size)
        return self.fields[name][page, offset].astype(np.float64)


@dataclass(frozen=True)
class _Tokens:
    """What a query head reads of some tokens: logits, bounds, values, in ``attention.part``'s terms."""

    y: Array
    c: Array
    v_hat: Array
    rho: Array
    zeta: Array
    known: Array | None = None
    c_known: Array | None = None


class Reference:
    """The reference. Values are quantised without a dither; everything is float64."""

    @property
    def info(self) -> Info:
        try:
            version = metadata.version("witcert")
        except metadata.PackageNotFoundError:
            version = "not installed"
        return Info(
            name=witcert_ref.__name__,
            version=version,
            offers=frozenset({
                "groups", "witness", "sketch", "equaliser", "bypass", "dither", "value_error", "risk", "splits",
                "extend", "sinks", "soft_cap", "window", "bias", "repair", "page_reuse", "reorder", "fit",
                "observatory",
            }),
            step_widening=2.0**-40,
            sketch_widening=2.0**-40,
            even_bands=True,
            cell_share=1 / 50,
            versions={"numpy": np.__version__},
        )  # fmt: skip

    def create(
        self, layout: Layout, pages: int, calibration: Calibration | None = None, layer: int = 0, seed: int = 0
    ) -> _Store:
        head = (pages, layout.page_size, layout.kv_heads)
        fields: dict[str, Array] = {
            "codes": np.zeros((*head, layout.head_dim), np.int8),
            "scale": np.ones((*head, layout.groups), np.float16),
            "sketch": np.zeros((*head, layout.sketch), np.int8),
            "witness": np.zeros((*head, layout.witness_bands), np.uint8),
            "bypass": np.zeros((*head, 2 * layout.bypass), np.float32),
            "v_codes": np.zeros((*head, layout.head_dim_v), np.int8),
            "v_scale": np.ones((*head, layout.groups_v), np.float16),
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
    ) -> _Store:
        kv, d, slots = layout.kv_heads, layout.head_dim, pages * layout.page_size
        if calibration is None:
            empty = np.zeros((kv, 0), np.int64)
            calibration = Calibration(np.zeros((kv, d)), np.ones((kv, d)), np.zeros((kv, 0, d)), empty)
        skipped = self._bypassed(calibration, layout)
        if (calibration.u * skipped[:, None, :]).any():
            raise ValueError("calibration.u: got a direction on a bypass channel, wants 0 there")
        return _Store(
            layout, calibration, layer, seed, fields, np.full(slots, -1), np.zeros((slots, kv, d)),
            np.zeros((slots, kv, layout.head_dim_v)),
        )  # fmt: skip

    @staticmethod
    def _bypassed(calibration: Calibration, layout: Layout) -> Mask:
        mask = np.zeros(calibration.mu.shape, bool)
        np.put_along_axis(mask, calibration.bypass_channels(layout), True, 1)
        return mask

    def quantize(self, store_: _Store, k: Array, v: Array, slots: Ints, positions: Ints) -> None:
        layout, calibration = store_.layout, store_.calibration
        store_.positions[slots], store_.k[slots], store_.v[slots] = positions, k, v
        levels = 126.5 if layout.dither else 127.0
        skipped = self._bypassed(calibration, layout)
        whole = finite(k)[..., None]
        x = equalizer.apply(np.where(whole, k, 0.0), calibration.mu, calibration.f)
        scale = dither.scale_of(x, layout.group or layout.head_dim, skipped, levels)
        scale = np.where(whole & finite(scale)[..., None], scale, np.float16(np.inf))
        xi = self._xi(store_, slots, np.arange(layout.kv_heads))
        codes = dither.quantize(x, scale, np.where(skipped, 0.0, xi), skipped)
        store_.put("codes", slots, codes)
        store_.put("scale", slots, scale)
        channels = np.broadcast_to(calibration.bypass_channels(layout), (len(k), layout.kv_heads, 2 * layout.bypass))
        store_.put("bypass", slots, np.take_along_axis(np.where(np.isinf(scale[..., :1]), 0.0, k), channels, -1))
        residual = np.where(skipped | np.isinf(scale[..., :1]), 0.0, dither.dequantize(codes, scale, xi) - x)
        step = dither.steps(scale, layout.head_dim)
        for h in range(layout.kv_heads):
            page, offset = np.divmod(slots, layout.page_size)
            if layout.sketch:
                store_.fields["sketch"][page, offset, h] = sketch.encode(residual[:, h], calibration.u[h], step[:, h])
            if layout.witness_bands:
                store_.fields["witness"][page, offset, h] = witness.witness(
                    residual[:, h], layout.witness_bands, layout.rope_layout, step[:, h], layout.rotary_dim
                )
        value = np.where(finite(v)[..., None], v, np.nan)
        v_scale = dither.scale_of(value, layout.group or layout.head_dim_v)
        v_scale = np.where(finite(v_scale)[..., None], v_scale, np.float16(np.inf))
        store_.put("v_codes", slots, dither.quantize(np.where(np.isfinite(value), value, 0.0), v_scale))
        store_.put("v_scale", slots, v_scale)

    def _xi(self, store_: _Store, slots: Ints, kv_heads: Ints) -> Array:
        """ξ of slots, ``[n, len(kv_heads), d]``."""
        layout = store_.layout
        if not layout.dither or not len(slots):
            return np.zeros((len(slots), len(kv_heads), layout.head_dim))
        period = np.maximum(store_.positions[slots], 0)[:, None, None] // layout.dither_period
        return dither.dither(store_.seed, store_.layer, kv_heads[None, :, None], period, np.arange(layout.head_dim))

    def stored(self, store_: _Store) -> Stored:
        return Stored(**{name: x.astype(np.float64) for name, x in store_.fields.items()})

    def dequantize(self, store_: _Store) -> tuple[Array, Array]:
        calibration, wide = store_.calibration, self.stored(store_)
        k = equalizer.invert(dither.dequantize(wide.codes, wide.scale), calibration.mu, calibration.f)
        if wide.bypass is not None:
            channels = np.broadcast_to(calibration.bypass_channels(store_.layout), wide.bypass.shape)
            np.put_along_axis(k, channels, wide.bypass, -1)
        return k, dither.dequantize(wide.v_codes, wide.v_scale)

    def account(self, store_: _Store) -> Account:
        layout = store_.layout
        sizes = store.Layout(
            layout.head_dim, layout.head_dim_v, layout.group, layout.sketch, layout.witness_bands, layout.bypass,
            layout.itemsize,
        )  # fmt: skip
        used = store.bytes_per_token(sizes, store_.observatory)
        return Account(used.k, used.v)

    def allocated(self, store_: _Store) -> int:
        return sum(x.nbytes for x in store_.fields.values())

    def bands(self, layout: Layout) -> Ints:
        out = np.zeros(layout.head_dim, np.int64)
        groups = rope.bands(
            np.zeros(layout.head_dim), max(layout.witness_bands, 1), layout.rope_layout, layout.rotary_dim
        )
        for i, channels in enumerate(groups):
            out[channels] = i
        return out

    def delta_local(self, budget: Budget) -> float:
        return radius.delta_local(budget.delta, budget.layers, budget.heads, budget.steps)

    def fit(self, keys: Array, layout: Layout) -> tuple[Array, Array]:
        mu, f = equalizer.fit(keys, layout.rope_layout, layout.rotary_dim)
        return mu, f

    # repair and pages

    def page_in(self, store_: _Store, page: int, kv_head: int) -> int:
        part = slice(page * store_.layout.page_size, (page + 1) * store_.layout.page_size)
        store_.exact.append((store_.k[part, kv_head].copy(), store_.v[part, kv_head].copy()))
        return len(store_.exact) - 1

    def free(self, store_: _Store, pages: Ints) -> None:
        store_.positions.reshape(-1, store_.layout.page_size)[pages] = -1

    def poison(self, store_: _Store, slots: Ints) -> None:
        for name, x in store_.fields.items():
            store_.put(name, slots, np.asarray(np.nan if x.dtype.kind == "f" else np.iinfo(x.dtype).max))

    def take_pages(self, store_: _Store, pages: Ints) -> None:
        size = store_.layout.page_size
        store_.fields = {name: x[pages].copy() for name, x in store_.fields.items()}
        for name in ("positions", "k", "v"):
            x = getattr(store_, name)
            setattr(store_, name, x.reshape(-1, size, *x.shape[1:])[pages].reshape(-1, *x.shape[1:]).copy())

    # the read

    def decode(self, store_: _Store, read: Read) -> Decoded:
        rows, heads = read.q.shape[:2]
        layout = store_.layout
        out, columns = np.zeros((rows, heads, layout.head_dim_v)), np.zeros((5, rows, heads))
        bounds = np.arange(len(read.seq_lens) + 1) if read.qo_indptr is None else read.qo_indptr
        for b, n in enumerate(read.seq_lens.tolist()):
            for i in range(bounds[b], bounds[b + 1]):
                for head in range(heads):
                    whole = self._row(store_, read, b, n, slice(bounds[b], bounds[b + 1]), i, head)
                    out[i, head] = whole.out
                    columns[:, i, head] = whole.lse, whole.meter, whole.eform, whole.risk, whole.value_error()
                    if not np.isfinite(read.q[i, head]).all() and whole.lse > -np.inf:
                        columns[1:4, i, head] = 1.0, np.inf, np.inf
        radius_used = read.budget is not None and layout.dither
        return Decoded(
            out,
            columns[0],
            columns[1],
            "fixed_trajectory" if radius_used else "any_query",
            columns[2],
            columns[3],
            columns[4],
        )

    def _row(self, store_: _Store, read: Read, b: int, n: int, own: slice, i: int, head: int) -> attention.Part:
        layout, size = store_.layout, store_.layout.page_size
        h = head // (read.q.shape[1] // layout.kv_heads)
        q = np.where(np.isfinite(read.q[i, head]).all(), read.q[i, head], 0.0)
        chunk = own.stop - own.start if read.k_new is not None else 0
        position = i - own.start + (n if chunk else n - (own.stop - own.start))
        token = np.arange(n + chunk)
        seen = np.ones(n + chunk, bool)
        if read.causal:
            seen &= token <= position
        if read.window_left >= 0:
            seen &= token >= position - read.window_left
        bias = np.zeros(n + chunk) if read.bias is None else read.bias[i, head, : n + chunk]
        seen &= bias > -np.inf
        parts = []
        pages = -(-n // size)
        each = max(-(-pages // (read.splits or 1)), 1) * size
        for start in range(0, max(n, 1), each):
            mine = np.flatnonzero(seen[start : min(start + each, n)]) + start
            parts.append(self._part(self._pool_tokens(store_, read, b, h, q, mine, bias[mine])))
        if chunk and read.k_new is not None and read.v_new is not None:
            mine = np.flatnonzero(seen[n:])
            k, v = read.k_new[own, h][mine], read.v_new[own, h][mine]
            parts.append(self._part(self._exact_tokens(read, q, k, v, bias[n + mine])))
        return attention.merge(parts, None if read.sinks is None else float(read.sinks[head]))

    def _part(self, tokens: _Tokens) -> attention.Part:
        part = attention.part(
            tokens.y, tokens.c, tokens.v_hat, rho=np.where(np.isinf(tokens.rho), 0.0, tokens.rho), zeta=tokens.zeta,
            known=tokens.known, c_known=tokens.c_known,
        )  # fmt: skip
        return replace(part, rho=np.inf) if np.isinf(tokens.rho).any() else part

    def _zeta(self, read: Read, q: Array, keys: Array, bias: Array) -> Array:
        reach = np.abs(keys).max(initial=0.0) * np.abs(q).sum() * read.sm_scale + np.abs(bias).max(initial=0.0)
        return np.full(len(bias), ROUNDING * (1 + reach))

    def _exact_tokens(self, read: Read, q: Array, k: Array, v: Array, bias: Array) -> _Tokens:
        lost, lost_v = ~finite(k), ~finite(v)
        k, v = np.where(lost[:, None], 0.0, k), np.where(lost_v[:, None], 0.0, v)
        y = attention.logits(q, k, read.sm_scale, bias=bias, logits_soft_cap=read.soft_cap)
        c = np.where(lost, np.inf, 0.0)
        return _Tokens(y, c, v, np.where(lost_v, np.inf, 0.0), self._zeta(read, q, k, bias))

    def _pool_tokens(self, store_: _Store, read: Read, b: int, h: int, q: Array, token: Ints, bias: Array) -> _Tokens:
        size, layout = store_.layout.page_size, store_.layout
        slots = read.page_table[b, token // size] * size + token % size
        tokens = (self._observed_tokens if store_.observatory else self._packed_tokens)(
            store_, read, h, q, slots, bias, int(read.seq_lens[b])
        )
        if read.exact_pages is None:
            return tokens
        slot = read.exact_pages[b, h, token // size]
        on = slot >= 0
        k, v = np.zeros((len(token), layout.head_dim)), np.zeros((len(token), layout.head_dim_v))
        for i in np.flatnonzero(on):
            k[i], v[i] = (x[token[i] % size] for x in store_.exact[slot[i]])
        exact = self._exact_tokens(read, q, k, v, bias)

        def either(x: Array | None, y: Array | None) -> Array | None:
            return None if x is None else np.where(on, 0.0 if y is None else y, x)

        return _Tokens(
            np.where(on, exact.y, tokens.y), np.where(on, exact.c, tokens.c),
            np.where(on[:, None], exact.v_hat, tokens.v_hat), np.where(on, exact.rho, tokens.rho),
            np.maximum(exact.zeta, tokens.zeta), either(tokens.known, None), either(tokens.c_known, None),
        )  # fmt: skip

    def _packed_tokens(
        self, store_: _Store, read: Read, h: int, q: Array, slots: Ints, bias: Array, length: int
    ) -> _Tokens:
        layout, sm = store_.layout, read.sm_scale
        f, mu, u = store_.calibration.f[h], store_.calibration.mu[h], store_.calibration.u[h, : layout.sketch]
        skipped = self._bypassed(store_.calibration, layout)[h]
        scale = store_.at("scale", slots)[:, h]
        scale = np.where(finite(scale)[:, None], scale, np.inf)
        steps = dither.steps(scale, layout.head_dim)
        xi = self._xi(store_, slots, np.array([h]))[:, 0]
        x = np.where(skipped, 0.0, dither.dequantize(store_.at("codes", slots)[:, h], scale, xi))
        x[:, store_.calibration.bypass_channels(layout)[h]] = store_.at("bypass", slots)[:, h]
        z = equalizer.fold(q, f)
        w, a = sketch.outside(np.where(skipped, 0.0, z), u)
        c = half_step.logit_bound(w, steps, sm)
        if layout.witness_bands:
            unit = witness.byte_unit(
                steps, layout.head_dim, layout.witness_bands, layout.rope_layout, layout.rotary_dim
            )
            norms = witness.decode(store_.at("witness", slots)[:, h], unit)
            c = np.minimum(c, witness.logit_bound(w, norms, sm, layout.rope_layout, layout.rotary_dim))
        if read.budget is not None and layout.dither and length:
            c = np.minimum(c, radius.radius(w, steps, sm, length, self.delta_local(read.budget)))
        linear = x @ z + q @ mu
        if layout.sketch:
            unit = sketch.unit(u, steps)
            linear = linear - sketch.correction(a, store_.at("sketch", slots)[:, h], u, steps)
            c = c + sketch.code_error(a, unit, sm)
        v_scale = store_.at("v_scale", slots)[:, h]
        v_scale = np.where(finite(v_scale)[:, None], v_scale, np.inf)
        v_hat = dither.dequantize(store_.at("v_codes", slots)[:, h], v_scale)
        rho = np.linalg.norm(dither.steps(v_scale, layout.head_dim_v), axis=1) / 2
        bounded = np.where(np.isinf(steps), 0.0, steps)
        zeta = self._zeta(read, q, np.concatenate([x * f, np.broadcast_to(mu, x.shape), bounded * f]), bias)
        return _Tokens(attention.soft_cap(sm * linear + bias, read.soft_cap), c, v_hat, rho, zeta)

    # the observatory

    def create_observatory(self, layout: Layout, pages: int, calibration: Calibration | None = None) -> _Store:
        head = (pages, layout.page_size, layout.kv_heads)
        fields: dict[str, Array] = {
            "k_hat": np.zeros((*head, layout.head_dim), np.float16),
            "witness": np.zeros((*head, layout.witness_bands), np.float16),
            "sketch": np.zeros((*head, layout.sketch), np.int8),
            "sketch_scale": np.zeros((*head, min(layout.sketch, 1)), np.float16),
            "v_hat": np.zeros((*head, layout.head_dim_v), np.float16),
            "v_error": np.zeros((*head, 1), np.float16),
        }
        made = self._store(layout, pages, calibration, 0, 0, fields)
        made.observatory = True
        return made

    def observe(self, store_: _Store, k: Array, v: Array, k_hat: Array, v_hat: Array, slots: Ints) -> None:
        layout, calibration = store_.layout, store_.calibration
        store_.k[slots], store_.v[slots] = k, v
        with np.errstate(over="ignore"):
            kept, kept_v = (x.astype(np.float16).astype(np.float64) for x in (k_hat, v_hat))
        residual = (kept - k) / calibration.f
        store_.put("k_hat", slots, np.where(finite(kept)[..., None], kept, 0.0))
        page, offset = np.divmod(slots, layout.page_size)
        for h in range(layout.kv_heads):
            norms = witness.witness(
                residual[:, h], layout.witness_bands, layout.rope_layout, rotary_dim=layout.rotary_dim
            )
            store_.fields["witness"][page, offset, h] = norms
            if layout.sketch:
                unit = sketch.own_unit(residual[:, h], calibration.u[h])
                store_.fields["sketch"][page, offset, h] = sketch.encode(
                    residual[:, h], calibration.u[h], unit_size=unit
                )
                store_.fields["sketch_scale"][page, offset, h] = unit
        store_.put("v_hat", slots, np.where(finite(kept_v)[..., None], kept_v, 0.0))
        # a norm is a witness with one band
        error = np.stack([witness.witness(_even(kept_v - v)[:, h], 1, "half") for h in range(layout.kv_heads)], 1)
        store_.put("v_error", slots, error)

    def _observed_tokens(
        self, store_: _Store, read: Read, h: int, q: Array, slots: Ints, bias: Array, length: int
    ) -> _Tokens:
        layout, sm = store_.layout, read.sm_scale
        f, u = store_.calibration.f[h], store_.calibration.u[h, : layout.sketch]
        k_hat, norms = store_.at("k_hat", slots)[:, h], store_.at("witness", slots)[:, h]
        raw = sm * (k_hat @ q) + bias
        y = attention.soft_cap(raw, read.soft_cap)
        z = equalizer.fold(q, f)
        c = witness.logit_bound(z, norms, sm, layout.rope_layout, layout.rotary_dim)
        error = store_.at("v_error", slots)[:, h, 0]
        tokens = _Tokens(y, c, store_.at("v_hat", slots)[:, h], error, self._zeta(read, q, k_hat, bias))
        if not layout.sketch:
            return tokens
        w, a = sketch.outside(z, u)
        unit = store_.at("sketch_scale", slots)[:, h]
        taken = sm * sketch.correction(a, store_.at("sketch", slots)[:, h], u, unit_size=unit)
        rest = witness.logit_bound(w, norms, sm, layout.rope_layout, layout.rotary_dim) + sketch.code_error(a, unit, sm)
        return replace(tokens, known=y - attention.soft_cap(raw - taken, read.soft_cap), c_known=rest)

    def observed(self, store_: _Store) -> Observed:
        wide = {name: x.astype(np.float64) for name, x in store_.fields.items()}
        scale = wide["sketch_scale"]
        return Observed(
            k_hat=wide["k_hat"],
            v_hat=wide["v_hat"],
            witness=wide["witness"],
            sketch=wide["sketch"],
            sketch_scale=scale[..., 0] if scale.shape[-1] else np.zeros(scale.shape[:-1]),
            v_error=wide["v_error"][..., 0],
        )


def _even(x: Array) -> Array:
    """An even number of channels."""
    return x if x.shape[-1] % 2 == 0 else np.concatenate([x, np.zeros((*x.shape[:-1], 1))], -1)
