"""What a read means, from the stored bytes: logits and their bounds, exactly and in float64.

A :class:`Block` is one sequence and kv head: rows are its query rows times the query heads of the kv head, tokens are
those of the pool, then the rows' own chunk, then a sink.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from mpmath import mpf

from . import philox
from .adapter import Array, Budget, Info, Ints, Layout, Mask, Read, Stored, optional
from .exact import MP, Dyadic, finite

if TYPE_CHECKING:
    from .case import Scene


def delta_local(budget: Budget) -> float:
    """δ over layers, heads and steps (Lean ``WitCert.request_budget``)."""
    return budget.delta / (budget.layers * budget.heads * budget.steps)


def steps_of(stored: Stored, layout: Layout) -> Array:
    """Each channel's step, ``[pages, page_size, kv_heads, d]``, 0 for a lost key."""
    scale = np.where(np.isfinite(stored.scale), stored.scale, 0.0)
    return np.repeat(scale, layout.head_dim // scale.shape[-1], -1)


def bypass_mask(scene: Scene) -> Mask:
    """Bypassed channels, ``[kv_heads, d]``."""
    layout = scene.case.layout
    mask = np.zeros((layout.kv_heads, layout.head_dim), bool)
    np.put_along_axis(mask, scene.calibration.bypass_channels(layout), True, 1)
    return mask


def slot_dither(scene: Scene) -> Array:
    """ξ at every slot that was written, ``[pages, page_size, kv_heads, d]``, 0 elsewhere and without a dither."""
    layout = scene.case.layout
    pages = int(scene.slots.max(initial=-1)) // layout.page_size + 1
    xi = np.zeros((pages * layout.page_size, layout.kv_heads, layout.head_dim))
    if layout.dither and len(scene.slots):
        period = (scene.positions // layout.dither_period)[:, None]
        xi[scene.slots] = philox.dither(
            scene.seed, scene.layer, np.arange(layout.kv_heads)[None], period, layout.head_dim
        )
    return xi.reshape(pages, layout.page_size, layout.kv_heads, layout.head_dim)


def x_hat(scene: Scene, stored: Stored) -> Array:
    """Stored keys in equalised coordinates, bypass channels as kept, ``[pages, page_size, kv_heads, d]``. Exact."""
    layout = scene.case.layout
    codes = stored.codes.copy()
    if layout.dither:
        xi = slot_dither(scene)
        codes[: len(xi)] -= xi
    x = codes * steps_of(stored, layout)
    if layout.bypass and stored.bypass is not None:
        channels = np.broadcast_to(scene.calibration.bypass_channels(layout), stored.bypass.shape)
        np.put_along_axis(x, channels, stored.bypass, -1)
    return x


@dataclass(frozen=True)
class Block:
    """One sequence and kv head of a read. n pool tokens, T tokens in all, R rows."""

    info: Info
    layout: Layout
    read: Read
    rows: Ints  # [R] query row
    heads: Ints  # [R] query head
    q: Array  # [R, d]
    x: Array  # [n, d]
    steps: Array  # [n, d], 0 on bypass channels
    units: Array  # [n, d], steps on all channels: what the witness counts in
    mu: Array
    f: Array
    coded: Mask  # [d] channels that are not bypassed
    u: Array  # [r, d]
    sketch: Array  # [n, r]
    witness: Array  # [n, B]
    band: Ints  # [d]
    lost: Mask  # [n]
    repaired: Mask  # [n]
    key: Array  # [n + m, d] exact keys: what repaired and chunk tokens are read from
    true: Array  # [n + m, d] the keys that were to be stored
    v_hat: Array  # [n + m, d_v]
    v_true: Array
    rho: Array  # [n + m]
    lost_v: Mask  # [n + m]
    page_norm: float  # largest ‖v̂‖ + ρ on the sequence's pages
    sink: Array | None  # [R]
    bias: Array | None  # [R, n + m]
    attended: Mask  # [R, T]
    slack: Array  # [R] the implementation's error budget for a logit

    @property
    def n(self) -> int:
        """Tokens in the pool."""
        return len(self.x)

    @property
    def exact_tokens(self) -> Mask:
        """Tokens with c = 0 by their flag, ``[T]``."""
        flags = np.ones(self.attended.shape[1], bool)
        flags[: self.n] = self.repaired
        return flags

    @property
    def lost_rows(self) -> Mask:
        """Rows that attend to a compressed token whose key is not finite."""
        lost = np.zeros(self.attended.shape[1], bool)
        lost[: self.n] = self.lost & ~self.repaired
        return np.asarray((self.attended & lost).any(1))

    @property
    def empty(self) -> Mask:
        """Rows that attend to nothing."""
        return np.asarray(~self.attended.any(1))

    @cached_property
    def coefficients(self) -> Array:
        """z·u, ``[R, r]``."""
        return np.asarray((self.q * self.f) @ self.u.T)

    @property
    def sketch_unit(self) -> Array:
        """Σ_j |u_j| s_j / 254, ``[n, r]``."""
        return np.asarray(self.steps @ np.abs(self.u).T / 254)

    # in float64

    def _finish(self, linear: Array) -> Array:
        """Bias, cap, sink and mask of logits ``[R, n + m]``."""
        if self.bias is not None:
            linear = linear + self.bias
        cap = self.read.soft_cap
        y = cap * np.tanh(linear / cap) if cap else linear
        if self.sink is not None:
            y = np.concatenate([y, self.sink[:, None]], 1)
        return np.where(self.attended, y, -np.inf)

    @cached_property
    def y(self) -> Array:
        """Logits of the stored keys, ``[R, T]``, −Inf where not attended."""
        sm = self.read.sm_scale
        stored = (self.q * self.f) @ self.x.T + (self.q @ self.mu)[:, None]
        if self.u.size:
            stored = stored - self.coefficients @ (self.sketch * self.sketch_unit).T
        kept = self.q @ self.key.T
        kept[:, : self.n] = np.where(self.repaired, kept[:, : self.n], stored)
        return self._finish(sm * kept)

    @cached_property
    def x_true(self) -> Array:
        """Logits of the exact keys, ``[R, T]``."""
        return self._finish(self.read.sm_scale * (self.q @ self.true.T))

    @cached_property
    def bounds(self) -> tuple[Array, Array]:
        """c ``[R, T]`` with as few and as many tokens in the union bound as the contract allows."""
        sm, widen = self.read.sm_scale, 1 + self.info.step_widening
        w = np.abs(self.q * self.f * self.coded - self.coefficients @ self.u)
        base = sm * widen / 2 * (w @ self.steps.T)
        if self.witness.shape[1]:
            base = np.minimum(base, sm * (_band_norms(w, self) @ (self.witness * self._witness_unit).T))
        extra = np.zeros_like(base)
        if self.u.size:
            extra = sm * (1 + self.info.sketch_widening) / 2 * (np.abs(self.coefficients) @ self.sketch_unit.T)
        return tuple(self._with_exact(np.minimum(base, self._radius(w, s)) + extra) for s in self._union_sizes)  # type: ignore[return-value]

    @property
    def c(self) -> Array:
        """The smaller of :attr:`bounds`."""
        return self.bounds[0]

    def _with_exact(self, c: Array) -> Array:
        full = np.zeros(self.attended.shape)
        full[:, : self.n] = np.where(self.repaired, 0.0, c)
        return np.where(self.attended, full, 0.0)

    @property
    def _witness_unit(self) -> Array:
        band = np.eye(self.witness.shape[1])[self.band]
        return np.asarray(np.sqrt(np.square(self.units) @ band) / 508)

    @cached_property
    def _union_sizes(self) -> tuple[Ints, Ints]:
        compressed = self.attended[:, : self.n] & ~self.repaired
        return compressed.sum(1), np.full(len(self.rows), self.n)

    def _radius(self, w: Array, tokens: Ints) -> Array:
        """Tier B's radius, +Inf where it is not on offer."""
        if self.read.budget is None or not self.layout.dither:
            return np.full((len(w), self.n), np.inf)
        sm, widen = self.read.sm_scale, 1 + self.info.step_widening
        log_term = np.log(np.maximum(2 * tokens / delta_local(self.read.budget), 1.0))[:, None]
        proxy = np.square(w * widen) @ np.square(self.steps).T / 12
        return np.asarray(sm * (np.sqrt(2 * log_term * proxy) + (w * widen) @ self.steps.T / (2 * philox.GRID)))

    @cached_property
    def noise(self) -> Array:
        """What float64 itself may have done to a logit or a bound here, ``[R]``."""
        sm = self.read.sm_scale
        reach = np.abs(self.q) @ np.abs(np.concatenate([self.x * self.f + self.mu, self.steps * self.f, self.key])).max(
            0, initial=0
        )
        return np.asarray(2.0**-45 * (1 + sm * reach + np.abs(self.bias_finite).max(1, initial=0)))

    @property
    def bias_finite(self) -> Array:
        """The bias, 0 where it masks or is absent."""
        if self.bias is None:
            return np.zeros((len(self.rows), 0))
        return np.where(np.isfinite(self.bias), self.bias, 0.0)

    # exactly

    def linear_exact(self, r: int) -> Dyadic:
        """254 · (logits of the stored keys before bias and cap) of row r, ``[n + m]``."""
        q, sm = Dyadic.of(self.q[r]), Dyadic.of(self.read.sm_scale)
        z, u = q * Dyadic.of(self.f), Dyadic.of(self.u)
        times = Dyadic.of(254.0)
        stored = (Dyadic.of(self.x) @ z + (q * Dyadic.of(self.mu)).sum()) * times
        if self.u.size:
            unit = Dyadic.of(self.steps) @ abs(u).T
            stored = stored - (Dyadic.of(self.sketch) * unit) @ (u @ z)
        kept = (Dyadic.of(self.key) @ q) * times
        low = min(stored.exponent, kept.exponent)
        a, b = stored.ints * 2 ** (stored.exponent - low), kept.ints * 2 ** (kept.exponent - low)
        both = np.concatenate([np.where(self.repaired, b[: self.n], a), b[self.n :]])
        return Dyadic(both, low) * sm

    def error_exact(self, r: int) -> Dyadic:
        """254 · (logit error before bias and cap) of row r, ``[n + m]``."""
        true = Dyadic.of(self.true) @ Dyadic.of(self.q[r])
        return self.linear_exact(r) - true * Dyadic.of(254.0 * self.read.sm_scale)

    def half_step_exact(self, r: int) -> Dyadic:
        """254 · (half-step source + the sketch codes' own error) of row r, ``[n]``."""
        sm, u = Dyadic.of(self.read.sm_scale), Dyadic.of(self.u)
        z = Dyadic.of(self.q[r] * self.coded) * Dyadic.of(self.f)
        half = Dyadic.of(127.0 * (1 + self.info.step_widening))
        if not self.u.size:
            return (Dyadic.of(self.steps) @ abs(z)) * half * sm
        a = u @ z
        own = Dyadic.of((1 + self.info.sketch_widening) / 2)
        w = z - a @ u
        sketch = ((Dyadic.of(self.steps) @ abs(u).T) @ abs(a)) * own
        return ((Dyadic.of(self.steps) @ abs(w)) * half + sketch) * sm

    def logits_mp(self, r: int, linear: Dyadic | None = None) -> list[mpf]:
        """Logits of the attended tokens of row r."""
        values = (self.linear_exact(r) if linear is None else linear).real() / 254
        cap = MP.mpf(self.read.soft_cap)
        out = []
        for t in np.flatnonzero(self.attended[r]).tolist():
            if t == len(values):
                out.append(MP.mpf(float(self.sink[r])))  # type: ignore[index]
                continue
            x = values[t] if self.bias is None else values[t] + MP.mpf(float(self.bias[r, t]))
            out.append(cap * MP.tanh(x / cap) if cap else x)
        return out

    def true_logits_mp(self, r: int) -> list[mpf]:
        """Logits of the exact keys, of the attended tokens of row r."""
        true = (Dyadic.of(self.true) @ Dyadic.of(self.q[r])) * Dyadic.of(254.0 * self.read.sm_scale)
        return self.logits_mp(r, true)

    def bounds_mp(self, r: int, *, upper: bool = False) -> list[mpf]:
        """c of the attended tokens of row r."""
        sm = MP.mpf(self.read.sm_scale)
        z = Dyadic.of(self.q[r] * self.coded) * Dyadic.of(self.f)
        u = Dyadic.of(self.u)
        w = z - (u @ z) @ u if self.u.size else z
        both = self.half_step_exact(r).real() / 254
        steps, squares = Dyadic.of(self.steps), Dyadic.of(self.steps) * Dyadic.of(self.steps)
        widen = Dyadic.of(1 + self.info.step_widening)
        half = ((steps @ abs(w)) * widen * Dyadic.of(0.5)).real() * sm
        extra = both - half
        best = list(half)
        if self.witness.shape[1]:
            band = np.eye(self.witness.shape[1])[self.band]
            norms = [MP.sqrt(t) for t in ((w * w) @ Dyadic.of(band)).real()]
            units = (Dyadic.of(self.units) * Dyadic.of(self.units)) @ Dyadic.of(band)
            sizes = units.real()
            for t in range(self.n):
                ends = [MP.sqrt(sizes[t, b]) / 508 * MP.mpf(float(self.witness[t, b])) for b in range(len(norms))]
                best[t] = min(best[t], sm * sum((a * b for a, b in zip(norms, ends, strict=True)), MP.zero))
        if self.read.budget is not None and self.layout.dither:
            tokens = int(self._union_sizes[upper][r])
            log_term = MP.log(2 * max(tokens, 1) / MP.mpf(delta_local(self.read.budget)))
            proxies = (squares @ (w * w) * widen * widen).real() / 12
            bias = ((steps @ abs(w)) * widen).real() / (2 * philox.GRID)
            for t in range(self.n):
                best[t] = min(best[t], sm * (MP.sqrt(2 * log_term * proxies[t]) + bias[t]))
        out = []
        for t in np.flatnonzero(self.attended[r]).tolist():
            out.append(MP.zero if t >= self.n or self.repaired[t] else best[t] + extra[t])
        return out


def _band_norms(w: Array, block: Block) -> Array:
    band = np.eye(block.witness.shape[1])[block.band]
    return np.asarray(np.sqrt(np.square(w) @ band))


def slack(info: Info, layout: Layout, read: Read, q: Array, keys: Array, bias: Array) -> Array:
    """What rounding may add to a reported bound: interfaces section 7, plus what a bias and a cap add, ``[R]``."""
    reach = np.abs(keys).max(initial=0.0)
    base = 8 * (layout.head_dim + 16) * 2.0**-24 * read.sm_scale * np.abs(q).sum(-1) * reach
    added = 16 * 2.0**-24 * np.abs(bias).max(-1, initial=0.0) + 4 * info.tanh_error * read.soft_cap
    return np.asarray(base + added + 1e-5)


def attended_mask(read: Read, n: int, m: int, rows: int) -> Mask:
    """Who attends to whom, ``[rows, n + m]``: query row i of the sequence is at n + i (own chunk) or n − rows + i."""
    position = np.arange(rows)[:, None] + (n if read.k_new is not None else n - rows)
    token = np.arange(n + m)[None]
    mask = np.ones((rows, n + m), bool)
    if read.causal:
        mask &= token <= position
    if read.window_left >= 0:
        mask &= token >= position - read.window_left
    return mask


def blocks(scene: Scene, stored: Stored | None = None, read: Read | None = None) -> Iterator[Block]:
    """The blocks of a scene's read, sequence after sequence, kv head after kv head."""
    adapter, layout = scene.adapter, scene.case.layout
    read = scene.read if read is None else read
    stored = adapter.stored(scene.store) if stored is None else stored
    x_all, steps_all, skipped = x_hat(scene, stored), steps_of(stored, layout), bypass_mask(scene)
    rho_all, v_all = _values(stored, layout, adapter.info)
    band = optional(adapter).bands(layout) if layout.witness_bands else np.zeros(layout.head_dim, np.int64)
    batch, size = len(read.seq_lens), layout.page_size
    bounds = np.arange(batch + 1) if read.qo_indptr is None else read.qo_indptr
    group = read.q.shape[1] // layout.kv_heads
    for b, length in enumerate(read.seq_lens.tolist()):
        rows = np.arange(bounds[b], bounds[b + 1])
        page = read.page_table[b, np.arange(length) // size]
        offset = np.arange(length) % size
        mine = slice(scene.first[b], scene.first[b] + length)
        for h in range(layout.kv_heads):
            heads = np.arange(h * group, (h + 1) * group)
            flat_rows, flat_heads = np.repeat(rows, group), np.tile(heads, len(rows))
            chunk = read.k_new is not None and read.v_new is not None
            new_k = read.k_new[rows, h] if chunk else np.zeros((0, layout.head_dim))  # type: ignore[index]
            new_v = read.v_new[rows, h] if chunk else np.zeros((0, layout.head_dim_v))  # type: ignore[index]
            mask = np.repeat(attended_mask(read, length, len(new_k), len(rows)), group, 0)
            bias = None
            if read.bias is not None:
                bias = read.bias[flat_rows, flat_heads, : length + len(new_k)]
                mask &= bias > -np.inf
                bias = np.where(np.isfinite(bias), bias, 0.0)
            if read.sinks is not None:
                mask = np.concatenate([mask, np.ones((len(mask), 1), bool)], 1)
            slot = np.full(length, -1)
            if read.exact_pages is not None:
                slot = read.exact_pages[b, h, np.arange(length) // size]
            repaired = slot >= 0
            kept_k, kept_v = np.zeros((length, layout.head_dim)), np.zeros((length, layout.head_dim_v))
            kept_k[repaired] = scene.exact_k[slot[repaired], offset[repaired]]
            kept_v[repaired] = scene.exact_v[slot[repaired], offset[repaired]]
            x, v_hat, rho = x_all[page, offset, h], v_all[page, offset, h], rho_all[page, offset, h]
            lost = ~finite(stored.scale[page, offset, h])
            lost_v = ~finite(stored.v_scale[page, offset, h])
            v_hat = np.where(repaired[:, None], kept_v, v_hat)
            rho = np.where(repaired, 0.0, rho)
            q = read.q[flat_rows, flat_heads]
            f, mu = scene.calibration.f[h], scene.calibration.mu[h]
            reach = np.concatenate([x * f, x * f + mu, kept_k, new_k])
            pages = np.unique(page)
            norms = np.linalg.norm(v_all[pages, :, h], axis=-1) + rho_all[pages, :, h]
            none, exact_v = np.zeros((length, 0)), np.concatenate([kept_v, new_v])
            yield Block(
                info=adapter.info, layout=layout, read=read, rows=flat_rows, heads=flat_heads, q=q, x=x,
                steps=steps_all[page, offset, h] * ~skipped[h], units=steps_all[page, offset, h], mu=mu, f=f,
                coded=~skipped[h], u=scene.calibration.u[h],
                sketch=none if stored.sketch is None else stored.sketch[page, offset, h],
                witness=none if stored.witness is None else stored.witness[page, offset, h],
                band=band, lost=lost, repaired=repaired, key=np.concatenate([kept_k, new_k]),
                true=np.concatenate([scene.k[mine, h], new_k]), v_hat=np.concatenate([v_hat, new_v]),
                v_true=np.concatenate([scene.v[mine, h], new_v]), rho=np.concatenate([rho, np.zeros(len(new_k))]),
                lost_v=np.concatenate([lost_v & ~repaired, np.zeros(len(new_k), bool)]),
                page_norm=float(np.concatenate([norms.ravel(), np.linalg.norm(exact_v, axis=-1)]).max(initial=0)),
                sink=None if read.sinks is None else read.sinks[flat_heads], bias=bias, attended=mask,
                slack=slack(adapter.info, layout, read, q, reach, np.zeros((len(q), 0)) if bias is None else bias),
            )  # fmt: skip


def _values(stored: Stored, layout: Layout, info: Info) -> tuple[Array, Array]:
    """ρ ``[pages, page_size, kv_heads]`` and v̂ ``[…, d_v]``; 0 for lost values."""
    scale = np.where(np.isfinite(stored.v_scale), stored.v_scale, 0.0)
    steps = np.repeat(scale, layout.head_dim_v // scale.shape[-1], -1)
    return np.linalg.norm(steps, axis=-1) / 2 * (1 + info.step_widening), stored.v_codes * steps
