"""The reader: partial results of splits, their merge, the meter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..adapter import Array, Budget, Decoded, Ints, Layout, Mask, Read
from ..exact import finite
from ..philox import GRID, dither
from .writer import TwinStore, Writer

RELATIVE = 2.0**-21
"""Relative error that the moments may have, as in a float32 kernel."""


@dataclass(frozen=True)
class Query:
    """Query rows of one sequence and kv head: R = rows · query heads a kv head."""

    store: TwinStore
    read: Read
    b: int
    h: int
    rows: Ints
    heads: Ints
    q: Array  # [R, d], 0 where not finite
    bad: Mask  # [R]
    position: Ints  # [R]
    z: Array  # q∘f
    a: Array  # [R, r]
    w: Array  # z outside the directions, 0 on bypass channels
    path: str  # "decode", "ragged" or "extend"

    @property
    def layout(self) -> Layout:
        return self.store.layout

    @property
    def u(self) -> Array:
        return self.store.calibration.u[self.h, : self.layout.sketch]


@dataclass(frozen=True)
class Set:
    """Moments relative to e^m: l of e^y, a1 and a2 of e^y (e^c − 1) and its square; the largest c."""

    m: Array
    l: Array  # noqa: E741
    a1: Array
    a2: Array
    c_max: Array


@dataclass(frozen=True)
class Part:
    """A partial result over some tokens, ``[R]`` each but acc ``[R, d_v]``.

    rho Σ e^y ρ; zeta the largest rounding of a logit; m_a, l_a log-sum-exp of y + c; norm the largest ‖v̂‖ + ρ; known
    the set under y − r with sums ``[3, R]``, those of e^(y−r) times e^r, e^r − 1 and its square; share each page's part
    of a1.
    """

    moments: Set
    acc: Array
    rho: Array
    zeta: Array
    m_a: Array
    l_a: Array
    norm: Array
    bad: Mask
    bad_v: Mask
    compressed: Ints
    known: Set | None = None
    sums: Array | None = None
    share: tuple[tuple[Ints, Array, Array], ...] = ()


def weight(m: Array, top: Array) -> Array:
    """e^(m − top), 0 for an empty part."""
    return np.where(m == -np.inf, 0.0, np.exp(m - np.where(top == -np.inf, 0.0, top)))


class Reader(Writer):
    """Required: decode."""

    def decode(self, store: TwinStore, read: Read) -> Decoded:
        return self.decode_with_shares(store, read)[0]

    def decode_with_shares(self, store: TwinStore, read: Read) -> tuple[Decoded, Array]:
        """The report, and the largest share of a1 that each page has, ``[batch, kv_heads, max_pages]``."""
        self.check_read(store, read)
        rows, heads = read.q.shape[:2]
        out = np.zeros((rows, heads, store.layout.head_dim_v))
        columns = np.zeros((5, rows, heads))
        columns[0] = -np.inf
        shares = np.zeros((len(read.seq_lens), store.layout.kv_heads, read.page_table.shape[1]))
        for b in range(len(read.seq_lens)):
            for h in range(store.layout.kv_heads):
                query = self.query(store, read, b, h)
                part = self.all_parts(query)
                report = self.finish(query, part)
                at = self.report_rows(query), query.heads
                out[at] = report.out
                for column, value in zip(
                    columns, (report.lse, report.meter, report.eform, report.risk, report.value_error), strict=True
                ):
                    column[at] = value
                self._add_shares(shares[b, h], part)
        with np.errstate(over="ignore"):
            single = columns.astype(np.float32)
        up = np.where(single < columns, np.nextafter(single, np.float32(np.inf)), single).astype(np.float64)
        decoded = Decoded(
            out=self.cast(store, out), lse=single[0].astype(np.float64),
            meter=self.stored_meter(up[1]), guarantee=self.guarantee(store, read), eform=up[2],
            risk=up[3], value_error=up[4],
        )  # fmt: skip
        self.count(store, decoded)
        return decoded, shares

    def check_read(self, store: TwinStore, read: Read) -> None:
        """Page table, lengths and exact pages in range."""
        size, batch = store.layout.page_size, len(read.seq_lens)
        if read.page_table.shape[0] != batch:
            raise ValueError(f"page_table: got {read.page_table.shape[0]} sequences, wants {batch}")
        if batch and (read.seq_lens.min() < 0 or read.seq_lens.max() > read.page_table.shape[1] * size):
            raise ValueError(f"seq_lens: got {read.seq_lens.max()}, wants 0..{read.page_table.shape[1] * size}")
        used = np.arange(read.page_table.shape[1])[None] * size < read.seq_lens[:, None]
        pages = read.page_table[used]
        count = len(store.back_k) // size
        if pages.size and (pages.min() < 0 or pages.max() >= count):
            raise ValueError(f"page_table: got a page outside 0..{count - 1}")
        if read.budget is not None and not 0 < read.budget.delta <= 1:
            raise ValueError(f"budget.delta: got {read.budget.delta}, wants a number in (0, 1]")

    def cast(self, store: TwinStore, out: Array) -> Array:
        """The output in the model's dtype, clamped: v̂ may be larger than the largest number of it."""
        top = float(np.finfo(store.layout.dtype).max)
        return np.clip(out, -top, top).astype(store.layout.dtype).astype(np.float64)

    def stored_meter(self, meter: Array) -> Array:
        """The meter as it is kept for the report: float32."""
        return meter

    def report_rows(self, query: Query) -> Ints:
        """Where the query's rows are reported."""
        return query.rows

    def guarantee(self, store: TwinStore, read: Read) -> str:
        """The weakest guarantee that was used."""
        return "fixed_trajectory" if read.budget is not None and store.layout.dither else "any_query"

    def count(self, store: TwinStore, decoded: Decoded) -> None:
        """Telemetry."""

    # the query

    def group_heads(self, h: int, group: int, kv_heads: int) -> Ints:
        """Query heads of a kv head."""
        return np.arange(h * group, (h + 1) * group)

    def query(self, store: TwinStore, read: Read, b: int, h: int) -> Query:
        heads = self.group_heads(h, read.q.shape[1] // store.layout.kv_heads, store.layout.kv_heads)
        bounds = np.arange(len(read.seq_lens) + 1) if read.qo_indptr is None else read.qo_indptr
        rows = np.arange(bounds[b], bounds[b + 1])
        q = read.q[np.repeat(rows, len(heads)), np.tile(heads, len(rows))]
        bad = ~finite(q)
        q = np.where(bad[:, None], 0.0, q)
        z = self.fold(store, q, h)
        u = store.calibration.u[h, : store.layout.sketch]
        a = z @ u.T
        w = np.where(self._bypassed(store)[h], 0.0, z - self.inside(a, u))
        n = int(read.seq_lens[b])
        position = np.arange(len(rows)) + (n if read.k_new is not None else n - len(rows))
        path = "decode" if read.qo_indptr is None else "ragged" if read.k_new is None else "extend"
        return Query(
            store, read, b, h, np.repeat(rows, len(heads)), np.tile(heads, len(rows)), q, bad,
            np.repeat(position, len(heads)), z, a, w, path,
        )  # fmt: skip

    def fold(self, store: TwinStore, q: Array, h: int) -> Array:
        """z = q∘f."""
        return q * store.calibration.f[h]

    def inside(self, a: Array, u: Array) -> Array:
        """What the query has in the directions."""
        return a @ u

    def sm_scale(self, query: Query) -> float:
        """Of a logit, on each path."""
        return query.read.sm_scale

    # parts

    def all_parts(self, query: Query) -> Part:
        n = int(query.read.seq_lens[query.b])
        parts = [
            self.pool_part(query, tokens)
            for tokens in self.split_tokens(n, query.read.splits or 1, query.layout.page_size)
        ]
        if query.read.k_new is not None:
            parts.append(self.chunk_part(query))
        if query.read.sinks is not None:
            parts.extend(self.sink_parts(query, len(parts)))
        merged = parts[0]
        for part in parts[1:]:
            merged = self.merge(merged, part)
        return merged

    def split_tokens(self, n: int, splits: int, page_size: int) -> list[Ints]:
        """Tokens of each split, whole pages; late ones may be empty."""
        pages = -(-n // page_size)
        each = -(-pages // splits) * page_size
        return [np.arange(i * each, min(max(n, i * each), (i + 1) * each)) for i in range(splits)]

    def slots(self, query: Query, tokens: Ints) -> Ints:
        """Slots of tokens."""
        size = query.layout.page_size
        return query.read.page_table[query.b, tokens // size] * size + tokens % size

    def mask(self, query: Query, tokens: Ints) -> Mask:
        """Who attends to tokens at these positions, ``[R, T]``."""
        allowed = np.ones((len(query.rows), len(tokens)), bool)
        if query.read.causal:
            allowed &= tokens <= query.position[:, None]
        if query.read.window_left >= 0:
            allowed &= tokens >= query.position[:, None] - query.read.window_left
        return allowed

    def bias(self, query: Query, tokens: Ints) -> tuple[Array, Mask]:
        """(bias ``[R, T]``, 0 where it masks; what it leaves)."""
        if query.read.bias is None:
            zero = np.zeros((len(query.rows), len(tokens)))
            return zero, zero == 0
        bias = query.read.bias[query.rows[:, None], query.heads[:, None], tokens]
        return np.where(bias > -np.inf, bias, 0.0), bias > -np.inf

    def cap(self, query: Query, x: Array) -> Array:
        """Soft cap."""
        cap = query.read.soft_cap
        return cap * np.tanh(x / cap) if cap else x

    def capped(self, query: Query, raw: Array, bias: Array) -> Array:
        """The logit: the bias is inside the cap."""
        return self.cap(query, raw + bias)

    def mixed(self, query: Query) -> bool:
        """Whether something uncentred meets the centred logits, so that q·mu must be in each of them."""
        return any((
            query.read.k_new is not None, query.read.sinks is not None, query.read.soft_cap != 0,
            self.repaired_pages(query).any(),
        ))  # fmt: skip

    def shift(self, query: Query) -> Array:
        """sm_scale · q·mu, ``[R]``."""
        return self.sm_scale(query) * (query.q @ query.store.calibration.mu[query.h])

    def repaired_pages(self, query: Query) -> Mask:
        """Which of the sequence's pages are exact."""
        table = query.read.exact_pages
        return np.zeros(0, bool) if table is None else table[query.b, query.h] >= 0

    def repaired(self, query: Query, tokens: Ints) -> Mask:
        """Which tokens are read exactly."""
        pages = self.repaired_pages(query)
        return pages[tokens // query.layout.page_size] if pages.size else np.zeros(len(tokens), bool)

    def pool_part(self, query: Query, tokens: Ints) -> Part:
        store, slots = query.store, self.slots(query, tokens)
        bias, kept = self.bias(query, tokens)
        allowed = self.mask(query, tokens) & kept
        exact = self.repaired(query, tokens)
        known = None
        if store.observatory:
            raw = self.sm_scale(query) * (query.q @ store.at("k_hat", slots)[:, query.h].T)
            witness = store.at("witness", slots)[:, query.h]
            lost = ~finite(witness)
            c = self.observatory_bound(query, query.z, np.where(np.isfinite(witness), witness, 0.0))
        else:
            scale = store.at("scale", slots)[:, query.h]
            lost = ~finite(scale)
            steps = np.where(lost[:, None], 0.0, scale).repeat(query.layout.head_dim // query.layout.groups, -1)
            raw = self.logits(query, slots, tokens, steps)
            c = self.bound(query, slots, steps)
        lost &= ~exact
        raw = np.where(lost, 0.0, raw)
        keys, values = self.exact_tokens(query, tokens, exact)
        if exact.any():
            raw = np.where(exact, self.repaired_logits(query, keys, slots), raw)
        y = self.capped(query, raw, bias)
        c = np.where(lost, 0.0, np.where(exact, self.exact_c(query, slots, c), c))
        if store.observatory and store.layout.sketch:
            r, c_two = self.known_part(query, slots, raw + bias, exact, np.where(np.isfinite(witness), witness, 0.0))
            known = np.where(lost, 0.0, r), np.where(lost, 0.0, c_two)
        v_hat, rho, lost_v = self.values(query, slots)
        v_hat, rho, lost_v = np.where(exact[:, None], values, v_hat), np.where(exact, 0.0, rho), lost_v & ~exact
        part = self.part(query, y, c, allowed, v_hat, rho, known)
        page = tokens // query.layout.page_size
        norm = store.fields["v_norm"][np.unique(slots // query.layout.page_size), query.h].max(initial=0)
        return replace(
            part,
            bad=query.bad & allowed.any(1) | (lost & self.counted(allowed)).any(1),
            bad_v=np.asarray((lost_v & allowed).any(1)),
            norm=np.full(len(query.rows), max(float(norm), np.linalg.norm(values, axis=1).max(initial=0))),
            compressed=(allowed & ~exact).sum(1),
            share=tuple((page, share, part.moments.m) for share in [self._excess(y, c, allowed)]),
        )

    def counted(self, allowed: Mask) -> Mask:
        """Which lost tokens make a row bad: those that it attends to."""
        return allowed

    def exact_tokens(self, query: Query, tokens: Ints, exact: Mask) -> tuple[Array, Array]:
        """Exact keys and values of repaired tokens, 0 elsewhere."""
        layout = query.layout
        k, v = np.zeros((len(tokens), layout.head_dim)), np.zeros((len(tokens), layout.head_dim_v))
        for i in np.flatnonzero(exact):
            slot = int(query.read.exact_pages[query.b, query.h, tokens[i] // layout.page_size])  # type: ignore[index]
            k[i], v[i] = (x[tokens[i] % layout.page_size] for x in query.store.exact[slot])
        return k, v

    def exact_logits(self, query: Query, keys: Array) -> Array:
        """Logits of exact keys before bias and cap."""
        return self.sm_scale(query) * (query.q @ keys.T)

    def repaired_logits(self, query: Query, keys: Array, slots: Ints) -> Array:
        """Those of repaired tokens: nothing of the compressed ones is left."""
        return self.exact_logits(query, keys)

    def exact_c(self, query: Query, slots: Ints, c: Array) -> Array:
        """c of repaired tokens: 0 by their flag."""
        return np.zeros_like(c)

    def logits(self, query: Query, slots: Ints, tokens: Ints, steps: Array) -> Array:
        """Logits of stored keys before bias and cap, ``[R, T]``; the shift only where the read is mixed."""
        store, layout = query.store, query.layout
        codes = store.at("codes", slots)[:, query.h]
        x = self.dot(query, codes, steps)
        if layout.dither:
            x = x - query.z @ (self.read_xi(query, tokens) * steps).T
        if layout.bypass:
            channels = store.calibration.bypass_channels(layout)[query.h]
            x = x + query.q[:, channels] @ store.at("bypass", slots)[:, query.h].T
        if layout.sketch:
            x = x - self.correction(query, slots, steps)
        return self.sm_scale(query) * x + (self.shift(query)[:, None] if self.mixed(query) else 0.0)

    def dot(self, query: Query, codes: Array, steps: Array) -> Array:
        """z·(s∘code), ``[R, T]``; bypass codes are 0."""
        return query.z @ (codes * steps).T

    def read_xi(self, query: Query, tokens: Ints) -> Array:
        """The dither, ``[T, d]``."""
        store, period = query.store, tokens // query.layout.dither_period
        xi = dither(store.seed, store.layer, np.asarray(query.h), period, query.layout.head_dim)
        return np.where(self._bypassed(store)[query.h], 0.0, xi)

    def stored_sketch(self, query: Query, slots: Ints) -> Array:
        """Sketch codes, ``[T, r]``."""
        return query.store.at("sketch", slots)[:, query.h]

    def correction(self, query: Query, slots: Ints, steps: Array) -> Array:
        """Σ_i a_i p_i, ``[R, T]``."""
        unit = self.sketch_unit(query.u[None], steps)
        return query.a @ (self.stored_sketch(query, slots) * unit).T

    # c

    def bound(self, query: Query, slots: Ints, steps: Array) -> Array:
        """The smallest source on offer and the sketch's own rounding, ``[R, T]``."""
        coded = np.where(self._bypassed(query.store)[query.h], 0.0, steps)
        best = self.half_step(query, coded)
        if query.layout.witness_bands:
            best = np.minimum(best, self.witness_bound(query, slots, steps))
        if query.read.budget is not None and query.layout.dither:
            best = np.minimum(best, self.radius(query, coded, self.delta_local(query.read.budget)))
        return self.sm_scale(query) * (best + self.sketch_error(query, steps))

    def half_step(self, query: Query, steps: Array) -> Array:
        """Σ_j |w_j| s_j / 2."""
        return np.abs(query.w) @ steps.T / 2 * (1 + 2.0**-12)

    def witness_bound(self, query: Query, slots: Ints, steps: Array) -> Array:
        """Σ_b ‖w_b‖ ω_b."""
        size = self._band_norms(steps, query.layout) / 508
        return self._band_norms(query.w, query.layout) @ (query.store.at("witness", slots)[:, query.h] * size).T

    def radius(self, query: Query, steps: Array, delta: float) -> Array:
        """√(2 L Σ w² s²/12) + Σ |w| s h/2."""
        log_term = self.log_term(int(query.read.seq_lens[query.b]), delta)
        w = query.w * (1 + 2.0**-12)
        return np.sqrt(2 * log_term * (np.square(w) @ np.square(steps).T) / 12) + np.abs(w) @ steps.T / (2 * GRID)

    def log_term(self, tokens: int, delta: float) -> float:
        """log(2 S / δ)."""
        return float(np.log(2 * max(tokens, 1) / delta))

    def delta_local(self, budget: Budget) -> float:
        """δ over layers, heads and steps."""
        return budget.delta / (budget.layers * budget.heads * budget.steps)

    def sketch_error(self, query: Query, steps: Array) -> Array:
        """Σ_i |a_i| δ_i, δ half a unit."""
        unit = self.sketch_unit(query.u[None], steps)
        return np.abs(query.a) @ unit.T / 2 * (1 + 2.0**-5)

    def observatory_bound(self, query: Query, part: Array, witness: Array) -> Array:
        """sm_scale Σ_b ‖part_b‖ ω_b, ``[R, T]``."""
        return self.sm_scale(query) * (self._band_norms(part, query.layout) @ witness.T) * (1 + 2.0**-40)

    def known_part(self, query: Query, slots: Ints, raw: Array, exact: Mask, witness: Array) -> tuple[Array, Array]:
        """(r, the bound on what is left of the error without it); both 0 for exact tokens. The read is not touched."""
        unit = query.store.at("sketch_scale", slots)[:, query.h, 0]
        clamped = ~np.isfinite(unit)
        unit = np.where(clamped, 0.0, unit)[:, None]
        taken = self.sm_scale(query) * (query.a @ (self.stored_sketch(query, slots) * unit).T)
        r = self.cap(query, raw) - self.cap(query, raw - taken)
        own = self.sm_scale(query) * np.abs(query.a).sum(1, keepdims=True) * unit.T / 2 * (1 + 2.0**-5)
        c = self.observatory_bound(query, query.w, witness) + own
        return np.where(exact, 0.0, r), np.where(exact, 0.0, np.where(clamped, np.inf, c))

    # moments

    def values(self, query: Query, slots: Ints) -> tuple[Array, Array, Mask]:
        """(v̂, ρ, which values are not finite)."""
        store = query.store
        if store.observatory:
            error = store.at("v_error", slots)[:, query.h, 0]
            lost = ~np.isfinite(error)
            return store.at("v_hat", slots)[:, query.h], np.where(lost, 0.0, error), lost
        scale = store.at("v_scale", slots)[:, query.h]
        lost = ~finite(scale)
        steps = np.where(lost[:, None], 0.0, scale).repeat(query.layout.head_dim_v // query.layout.groups_v, -1)
        return store.at("v_codes", slots)[:, query.h] * steps, np.linalg.norm(steps, axis=1) / 2 * (1 + 2.0**-12), lost

    def _excess(self, y: Array, c: Array, allowed: Mask) -> Array:
        """e^(y − m) (e^c − 1), no overflow where the product has none."""
        y, c = np.where(allowed, y, -np.inf), np.where(allowed, c, 0.0)
        top = y.max(1, initial=-np.inf)[:, None]
        shifted = y - np.where(top == -np.inf, 0.0, top)
        with np.errstate(over="ignore"):
            return np.where(c < 30, np.exp(shifted) * np.expm1(np.minimum(c, 30)), np.exp(shifted + c))

    def moments(self, y: Array, c: Array, allowed: Mask) -> tuple[Set, Array]:
        """The set over the attended tokens, and the weights e^(y − m)."""
        excess = self._excess(y, c, allowed)
        y, c = np.where(allowed, y, -np.inf), np.where(allowed, c, 0.0)
        m = y.max(1, initial=-np.inf)
        p = np.exp(y - np.where(m == -np.inf, 0.0, m)[:, None])
        with np.errstate(over="ignore", invalid="ignore"):
            square = np.where(
                c < 30, excess * np.expm1(np.minimum(c, 30)), np.where(excess > 0, excess * np.exp(c), 0.0)
            )
        return Set(m, p.sum(1), excess.sum(1), square.sum(1), c.max(1, initial=0)), p

    def part(
        self,
        query: Query,
        y: Array,
        c: Array,
        allowed: Mask,
        v_hat: Array,
        rho: Array,
        known: tuple[Array, Array] | None,
    ) -> Part:
        zeta = self.rounding(query, y, allowed)
        c = c + zeta[:, None]
        moments, p = self.moments(y, c, allowed)
        with np.errstate(over="ignore"):
            wide = moments.a1 < 1e200
            far = np.where(allowed, y + c, -np.inf)
            top = far.max(1, initial=-np.inf)
            m_a = np.where(wide, moments.m, top)
            l_a = np.where(
                wide, moments.l + moments.a1, np.exp(far - np.where(top == -np.inf, 0.0, top)[:, None]).sum(1)
            )
        none = np.zeros(len(y), bool)
        part = Part(moments, self.weighted(p, v_hat), p @ rho, zeta, m_a, l_a, np.zeros(len(y)), none, none, none * 0)
        if query.store.observatory and query.layout.sketch:
            base, sums = self.known_moments(y, c, allowed, known, zeta)
            part = replace(part, known=base, sums=sums)
        return part

    def rounding(self, query: Query, y: Array, allowed: Mask) -> Array:
        """What float64 may have done to a logit, ``[R]``: the shift's terms may have cancelled."""
        shift = np.abs(query.q) @ np.abs(query.store.calibration.mu[query.h])
        return (
            2.0**-40 * (1 + np.abs(np.where(allowed, y, 0.0)).max(1, initial=0))
            + 2.0**-48 * query.read.sm_scale * shift
        )

    def weighted(self, p: Array, v_hat: Array) -> Array:
        """Σ e^(y − m) v̂ over the attended tokens; others have weight 0 and finite v̂."""
        return p @ v_hat

    def known_moments(
        self, y: Array, c: Array, allowed: Mask, known: tuple[Array, Array] | None, zeta: Array
    ) -> tuple[Set, Array]:
        """The two-part meter's sums under softmax(y − r); exact tokens have r = 0."""
        r, c_two = (np.zeros_like(y), c) if known is None else (known[0], known[1] + 4 * zeta[:, None])
        base, p_w = self.moments(self.known_base(y, r), c_two, allowed)
        r = np.where(allowed, r, 0.0)
        return base, np.stack([(p_w * x).sum(1) for x in (np.exp(r), np.expm1(r), np.square(np.expm1(r)))])

    def known_base(self, y: Array, r: Array) -> Array:
        """The logits whose softmax the known part's moments are taken under."""
        return y - r

    def chunk_part(self, query: Query) -> Part:
        """The rows' own chunk: exact keys behind the pool's tokens."""
        read = query.read
        assert read.k_new is not None and read.v_new is not None
        bounds = np.arange(len(read.seq_lens) + 1) if read.qo_indptr is None else read.qo_indptr
        own = slice(bounds[query.b], bounds[query.b + 1])
        keys, values = read.k_new[own, query.h], read.v_new[own, query.h]
        tokens = np.arange(len(keys)) + int(read.seq_lens[query.b])
        lost, lost_v = ~finite(keys), ~finite(values)
        keys, values = np.where(lost[:, None], 0.0, keys), np.where(lost_v[:, None], 0.0, values)
        bias, kept = self.bias(query, tokens)
        allowed = self.mask(query, tokens) & kept
        y = self.capped(query, self.exact_logits(query, keys), bias)
        part = self.part(query, y, self.chunk_c(y), allowed, values, np.zeros(len(keys)), None)
        return replace(
            part,
            bad=query.bad & allowed.any(1) | (lost & allowed).any(1),
            bad_v=np.asarray((lost_v & allowed).any(1)),
            norm=np.full(len(y), np.linalg.norm(values, axis=1).max(initial=0)),
        )

    def chunk_c(self, y: Array) -> Array:
        """c of the rows' own chunk: 0."""
        return np.zeros_like(y)

    def sink_parts(self, query: Query, parts: int) -> list[Part]:
        """The sink once, a token with value 0 and c = 0."""
        assert query.read.sinks is not None
        y = query.read.sinks[query.heads][:, None]
        zero = np.zeros((1, query.layout.head_dim_v))
        return [self.part(query, y, np.zeros_like(y), np.ones_like(y, bool), zero, np.zeros(1), None)]

    # merge

    def merge_sets(self, x: Set, y: Set) -> Set:
        m = np.maximum(x.m, y.m)
        mine, theirs = self.merge_weights(x, y, m)

        def add(a: Array, b: Array) -> Array:
            with np.errstate(invalid="ignore"):
                return np.where(np.isinf(a), a, a * mine) + np.where(np.isinf(b), b, b * theirs)

        return Set(m, x.l * mine + y.l * theirs, add(x.a1, y.a1), add(x.a2, y.a2), self.merge_max(x.c_max, y.c_max))

    def merge_weights(self, x: Set, y: Set, m: Array) -> tuple[Array, Array]:
        """The parts' LSE weights."""
        return weight(x.m, m), weight(y.m, m)

    def merge_max(self, x: Array, y: Array) -> Array:
        """c_max of two parts."""
        return np.maximum(x, y)

    def merge(self, x: Part, y: Part) -> Part:
        """Two disjoint sets of tokens."""
        moments = self.merge_sets(x.moments, y.moments)
        mine, theirs = self.merge_weights(x.moments, y.moments, moments.m)
        m_a = np.maximum(x.m_a, y.m_a)
        known, sums = None, None
        if x.known is not None and y.known is not None and x.sums is not None and y.sums is not None:
            known = self.merge_sets(x.known, y.known)
            sums = x.sums * weight(x.known.m, known.m) + y.sums * weight(y.known.m, known.m)
        return Part(
            moments, x.acc * mine[:, None] + y.acc * theirs[:, None], x.rho * mine + y.rho * theirs,
            np.maximum(x.zeta, y.zeta), m_a, x.l_a * weight(x.m_a, m_a) + y.l_a * weight(y.m_a, m_a),
            np.maximum(x.norm, y.norm), x.bad | y.bad, x.bad_v | y.bad_v, x.compressed + y.compressed, known, sums,
            x.share + y.share,
        )  # fmt: skip

    def _add_shares(self, shares: Array, part: Part) -> None:
        for page, excess, m in part.share:
            with np.errstate(invalid="ignore"):
                mass = np.nan_to_num(excess * (weight(m, part.moments.m) / np.maximum(part.moments.l, 1e-300))[:, None])
            for i, p in enumerate(page):
                shares[p] += mass[:, i].max(initial=0)

    # the report

    def variance(self, a2_up: Array, a1_low: Array, a1_up: Array) -> Array:
        """σ² from an upper a2 and a lower a1."""
        return np.maximum(a2_up - np.square(a1_low), 0.0)

    def meter_of(self, moments: Set, zeta: Array) -> tuple[Array, Array]:
        """(meter, upper a1) of merged moments; zeta is in c already."""
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            seen = np.maximum(moments.l, 1e-300)
            a1, a2 = moments.a1 / seen, moments.a2 / seen
            up = a1 * (1 + RELATIVE)
            sigma = np.sqrt(self.variance(a2 * (1 + RELATIVE), a1 * (1 - RELATIVE), up))
            phi = np.where(up <= 1, up / (1 + up), 1 / (1 + np.square(2 / (1 + up))))
            sharp = (up + sigma / 2) / (up + 2)
        return np.minimum(np.minimum(phi, np.where(np.isnan(sharp), 1.0, sharp)), np.tanh(moments.c_max / 2)), up

    def finish(self, query: Query, part: Part) -> Decoded:
        """The report of a merged part, ``[R]`` each but out."""
        seen = part.moments.l > 0
        safe = np.where(seen, part.moments.l, 1.0)
        bound, a1 = self.meter_of(part.moments, part.zeta)
        if part.known is not None and part.sums is not None:
            bound = np.minimum(bound, self.two_parts(part.known, part.sums, part.zeta))
        meter = np.minimum((bound + np.tanh(part.zeta / 2)) * (1 + 2.0**-20), 1.0)
        meter = self.report_meter(query, np.where(part.bad, 1.0, np.where(seen, meter, 0.0)), part)
        lse = self.lse(query, np.where(seen, part.moments.m + np.log(safe), -np.inf))
        with np.errstate(over="ignore", invalid="ignore"):
            log_mass = np.where(
                seen, part.m_a + np.log(np.maximum(part.l_a, 1e-300)) - part.moments.m - np.log(safe), 0.0
            )
            eform = a1 + np.square(a1) / 2
        out = np.where(seen[:, None], part.acc / safe[:, None], 0.0)
        return Decoded(
            out=out,
            lse=lse,
            meter=meter,
            eform=np.where(part.bad, np.inf, np.where(seen, eform, 0.0)),
            risk=np.where(part.bad, np.inf, np.maximum(log_mass, 0.0)),
            value_error=self.value_error(query, meter, part, seen, safe),
        )

    def report_meter(self, query: Query, meter: Array, part: Part) -> Array:
        """The meter of each row."""
        return meter

    def two_parts(self, known: Set, sums: Array, zeta: Array) -> Array:
        """½ sd(e^r)/mean(e^r) and the meter of what is left."""
        mean, e1, e2 = sums / np.where(known.l > 0, known.l, 1.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            deviation = np.sqrt(self.known_variance(e2, e1) * (1 + RELATIVE)) / (2 * mean)
        return np.where(np.isfinite(deviation), deviation, np.inf) + self.meter_of(known, zeta)[0]

    def known_variance(self, e2: Array, e1: Array) -> Array:
        """Variance of e^r."""
        return np.maximum(e2 - np.square(e1), 0.0) + 2.0**-46 * (e2 + np.square(e1))

    def lse(self, query: Query, lse: Array) -> Array:
        """lse of the true logits: the shift added back where the logits are centred."""
        return lse if self.mixed(query) or query.store.observatory else lse + self.shift(query)

    def value_error(self, query: Query, meter: Array, part: Part, seen: Mask, safe: Array) -> Array:
        """2 · meter · R + Σ p̃ ρ, and the rounding of the output."""
        cast = 2.0**-10 if query.layout.dtype == "float16" else 2.0**-23
        bound = 2 * meter * part.norm + self.value_term(part.rho / safe)
        bound = (
            bound + cast * (part.norm + bound) + 2.0**-25 * query.layout.head_dim_v * (query.layout.dtype == "float16")
        ) * (1 + 2.0**-20)
        return np.where(part.bad_v, np.inf, np.where(seen, bound, 0.0))

    def value_term(self, rho: Array) -> Array:
        """Σ p̃ ρ."""
        return rho
