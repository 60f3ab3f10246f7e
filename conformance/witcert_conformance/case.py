"""A drawn case: a short recipe that prints as Python, and the scene that an adapter makes of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np

from . import arrays
from .adapter import PLAIN, Adapter, Array, Budget, Calibration, Decoded, Info, Ints, Layout, Read, Store, optional


def terse(x: Any) -> str:
    """A dataclass as Python, fields at their default left out."""
    shown = []
    for f in fields(x):
        value = getattr(x, f.name)
        if value != f.default:
            shown.append(f"{f.name}={terse(value) if isinstance(value, Layout) else repr(value)}")
    return f"{type(x).__name__}({', '.join(shown)})"


@dataclass(frozen=True)
class Case:
    """Recipe of a store and one read of it. Arrays follow from ``seed``; see :mod:`witcert_conformance.arrays`.

    lengths: tokens a sequence in the pool; rows: query rows a sequence (None: one each); chunk: the rows bring their
    own exact keys; group_heads: query heads a kv head; equalised: a calibration with shifted, scaled channels;
    repaired: share of the pages that are exact; written: tokens a call to ``quantize``; shuffled: pages in random
    order; masked: some entries of the bias are -Inf, in one row all; scale: of the queries; sm_scale: None for 1/√d.
    """

    layout: Layout = PLAIN
    lengths: tuple[int, ...] = (1,)
    group_heads: int = 1
    keys: str = "normal"
    queries: str = "normal"
    values: str = "normal"
    scale: float = 1.0
    sm_scale: float | None = None
    equalised: bool = False
    rows: tuple[int, ...] | None = None
    chunk: bool = False
    causal: bool = True
    sinks: bool = False
    soft_cap: float = 0.0
    window_left: int = -1
    bias: bool = False
    masked: bool = False
    repaired: float = 0.0
    delta: float = 0.0
    splits: int | None = None
    written: int = 64
    spare_pages: int = 1
    shuffled: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        return terse(self)


FEATURES = ("sinks", "soft_cap", "bias", "repaired", "splits", "delta", "equalised")
_GROUPS = {"repaired": "repair", "delta": "dither", "equalised": "equaliser"}


def adapted(info: Info, case: Any) -> Any:
    """A pinned case in dimensions that an implementation has, without what it does not offer."""
    layout = getattr(case, "layout", None)
    if not isinstance(layout, Layout):
        return case

    def near(value: Any, allowed: tuple[Any, ...]) -> Any:
        return value if value in allowed else min(allowed)

    d, d_v = layout.head_dim, layout.head_dim_v
    if (d, d_v) not in info.wide_heads:
        d, d_v = near(d, info.head_dims), near(d_v, info.head_dims_v)
    group = (
        layout.group
        if layout.group and d % layout.group == 0 and d_v % layout.group == 0 and "groups" in info.offers
        else None
    )
    fitted = replace(
        layout,
        head_dim=d,
        head_dim_v=d_v,
        page_size=near(layout.page_size, info.page_sizes),
        dtype=near(layout.dtype, info.dtypes),
        group=group,
        sketch=layout.sketch if "sketch" in info.offers else 0,
        witness_bands=min(layout.witness_bands, d // 2)
        if "witness" in info.offers or not isinstance(case, Case)
        else 0,
        bypass=min(layout.bypass, d // 4) if "bypass" in info.offers else 0,
        dither=layout.dither and "dither" in info.offers,
        rotary_dim=layout.rotary_dim if layout.rotary_dim is None or layout.rotary_dim <= d else None,
    )
    defaults = {f.name: f.default for f in fields(case)}
    off = {name: defaults[name] for name in FEATURES if name in defaults and _GROUPS.get(name, name) not in info.offers}
    return replace(case, layout=fitted, **off)


@dataclass(frozen=True)
class Scene:
    """A case on an implementation: the store that it wrote, and the read that is asked of it."""

    case: Case
    adapter: Adapter
    store: Store
    calibration: Calibration
    k: Array  # [tokens, kv_heads, d], all sequences one after the other
    v: Array
    slots: Ints
    positions: Ints
    first: Ints  # first token of each sequence in k
    read: Read
    layer: int
    seed: int
    exact_k: Array  # [slots, page_size, d], what the exact pages must hold
    exact_v: Array

    def decode(self, **changes: Any) -> Decoded:
        """The implementation's answer, some of the read's arguments changed."""
        return self.adapter.decode(self.store, replace(self.read, **changes))


def calibration(layout: Layout, rng: np.random.Generator, *, equalised: bool, keys: Array) -> Calibration:
    """A calibration as a fit could give it; directions random, orthonormal for each kv head."""
    kv, d, m = layout.kv_heads, layout.head_dim, layout.bypass
    mu, f = np.zeros((kv, d)), np.ones((kv, d))
    if equalised:
        mu = rng.normal(size=(kv, d)) * 2
        f = np.exp(rng.normal(size=(kv, len(layout.pairs))))[:, _pair_of(layout)]
        if len(keys) and np.isfinite(keys).all():
            f = f * max(float(np.median(np.abs(keys))), 2.0**-20)
            mu = mu * max(float(np.median(np.abs(keys))), 2.0**-20)
    pairs = np.stack([rng.permutation(d // 2)[:m] for _ in range(kv)]).astype(np.int64)
    result = Calibration(mu=mu, f=f, u=np.zeros((kv, 0, d)), bypass=pairs)
    kept = np.ones((kv, d), bool)
    np.put_along_axis(kept, result.bypass_channels(layout), False, 1)
    mu, f = np.where(kept, mu, 0), np.where(kept, f, 1)
    u = np.zeros((kv, layout.sketch, d))
    for h in range(kv):
        channels = np.flatnonzero(kept[h])
        drawn = rng.normal(size=(len(channels), len(channels)))
        basis = np.linalg.qr(drawn)[0] if layout.sketch else drawn
        for i in range(layout.sketch):
            u[h, i, channels] = basis[i] if i < len(channels) else 0
    single = (np.asarray(x, np.float32).astype(np.float64) for x in (mu, f, u))
    mu, f, u = single
    return Calibration(mu=mu, f=f, u=u, bypass=pairs)


def _pair_of(layout: Layout) -> Ints:
    out = np.empty(layout.head_dim, np.int64)
    out[layout.pairs.ravel()] = np.repeat(np.arange(len(layout.pairs)), 2)
    return out


def build(adapter: Adapter, case: Case) -> Scene:
    """Write the case's tokens into a store of the adapter and form the read."""
    layout = case.layout
    rng = np.random.default_rng(case.seed)
    lengths = np.asarray(case.lengths, dtype=np.int64)
    total, size = int(lengths.sum()), layout.page_size
    k = arrays.round_to(arrays.keys(case.keys, rng, (total, layout.kv_heads, layout.head_dim)), layout.dtype)
    v = arrays.round_to(arrays.values(case.values, rng, (total, layout.kv_heads, layout.head_dim_v)), layout.dtype)
    calibrated = calibration(layout, rng, equalised=case.equalised, keys=k)

    used = -(-lengths // size)
    pages = int(used.sum()) + case.spare_pages
    permuted = rng.permutation(pages)  # drawn in any case, so that shuffling changes nothing else
    order = permuted if case.shuffled else np.arange(pages)
    max_pages = max(int(used.max(initial=0)), 1) + case.spare_pages
    # entries past a sequence's pages are never read: they point anywhere
    table = rng.integers(-(2**31), 2**31, (len(lengths), max_pages))
    slots, positions = np.empty(total, np.int64), np.empty(total, np.int64)
    first = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
    taken = 0
    for b, n in enumerate(lengths):
        table[b, : used[b]] = order[taken : taken + used[b]]
        taken += int(used[b])
        at = np.arange(n)
        slots[first[b] : first[b] + n] = table[b, at // size] * size + at % size
        positions[first[b] : first[b] + n] = at

    layer, seed = int(rng.integers(0, 40)), int(rng.integers(0, 2**63)) * 2 + 1
    store = adapter.create(layout, pages, calibrated, layer=layer, seed=seed)
    for start in range(0, total, case.written):
        part = slice(start, start + case.written)
        adapter.quantize(store, k[part], v[part], slots[part], positions[part])
    scene = Scene(
        case=case, adapter=adapter, store=store, calibration=calibrated, k=k, v=v, slots=slots, positions=positions,
        first=first, read=Read(q=np.zeros((0, 1, 1)), page_table=table, seq_lens=lengths), layer=layer, seed=seed,
        exact_k=np.zeros((0, size, layout.head_dim)), exact_v=np.zeros((0, size, layout.head_dim_v)),
    )  # fmt: skip
    return _with_read(scene, rng, used)


def _with_read(scene: Scene, rng: np.random.Generator, used: Ints) -> Scene:
    case, layout = scene.case, scene.case.layout
    batch, heads = len(case.lengths), layout.kv_heads * case.group_heads
    per_row = np.ones(batch, np.int64) if case.rows is None else np.asarray(case.rows, np.int64)
    rows = int(per_row.sum())
    owner = np.repeat(np.arange(batch), per_row)
    shift = residuals(scene) if case.queries == "after" else np.zeros_like(scene.k)

    def residual(row: int, head: int) -> Array:
        n = case.lengths[owner[row]]
        token = scene.first[owner[row]] + rng.integers(n) if n else 0
        return cast(Array, shift[token, head // case.group_heads]) if n else np.ones(layout.head_dim)

    def directions(head: int) -> Array:
        return scene.calibration.u[head // case.group_heads] / scene.calibration.f[head // case.group_heads]

    q = arrays.queries(case.queries, rng, (rows, heads, layout.head_dim), residual, directions)
    tokens = max(int(n + m) for n, m in zip(case.lengths, per_row, strict=True)) if batch else 0
    bias = None
    if case.bias or case.masked:
        bias = rng.normal(size=(rows, heads, tokens)) * case.bias
        bias[rng.random(bias.shape) < 0.3 * case.masked] = -np.inf
        if case.masked and rows:
            bias[rng.integers(rows)] = -np.inf
        bias = bias.astype(np.float32).astype(np.float64)
    new = (rows, layout.kv_heads)
    exact_pages, exact_k, exact_v = None, scene.exact_k, scene.exact_v
    if case.repaired:
        exact_pages, exact_k, exact_v = page_in(
            scene, rng.random((batch, layout.kv_heads, used.max(initial=0))) < case.repaired
        )
    read = Read(
        q=arrays.round_to(q * case.scale, layout.dtype),
        page_table=scene.read.page_table,
        seq_lens=scene.read.seq_lens,
        qo_indptr=None if case.rows is None else np.concatenate([[0], np.cumsum(per_row)]).astype(np.int64),
        k_new=arrays.round_to(arrays.keys("normal", rng, (*new, layout.head_dim)), layout.dtype)
        if case.chunk
        else None,
        v_new=arrays.round_to(rng.normal(size=(*new, layout.head_dim_v)), layout.dtype) if case.chunk else None,
        causal=case.causal,
        exact_pages=exact_pages,
        sm_scale=float(np.float32(layout.head_dim**-0.5 if case.sm_scale is None else case.sm_scale)),
        sinks=rng.normal(size=heads).astype(np.float32).astype(np.float64) if case.sinks else None,
        soft_cap=case.soft_cap,
        window_left=case.window_left,
        bias=bias,
        budget=Budget(case.delta, 2, heads, 3) if case.delta else None,
        splits=case.splits,
    )
    return replace(scene, read=read, exact_k=exact_k, exact_v=exact_v)


def page_in(scene: Scene, wanted: Any) -> tuple[Ints, Array, Array]:
    """Exact pages for ``wanted`` ``[batch, kv_heads, pages]``: the table, and what its slots must hold."""
    adapter = optional(scene.adapter)
    table, lengths, size = scene.read.page_table, scene.read.seq_lens, scene.case.layout.page_size
    exact = np.full((*wanted.shape[:2], table.shape[1]), -1, np.int64)
    held: dict[int, tuple[Array, Array]] = {}
    for b, h, p in np.argwhere(wanted):
        n = min(size, int(lengths[b]) - p * size)
        if n <= 0:
            continue
        slot = adapter.page_in(scene.store, int(table[b, p]), int(h))
        token = slice(scene.first[b] + p * size, scene.first[b] + p * size + n)
        pad = ((0, size - n), (0, 0))
        exact[b, h, p] = slot
        held[slot] = np.pad(scene.k[token, h], pad), np.pad(scene.v[token, h], pad)
    count = max(held, default=-1) + 1
    k, v = np.zeros((count, *scene.exact_k.shape[1:])), np.zeros((count, *scene.exact_v.shape[1:]))
    for slot, (one_k, one_v) in held.items():
        k[slot], v[slot] = one_k, one_v
    return exact, k, v


def residuals(scene: Scene) -> Array:
    """k̂ − k of every token in the coordinates of k, ``[tokens, kv_heads, d]``; 0 where the store marks one as lost."""
    from .model import x_hat

    stored = scene.adapter.stored(scene.store)
    page, offset = np.divmod(scene.slots, scene.case.layout.page_size)
    x = x_hat(scene, stored)[page, offset]
    with np.errstate(invalid="ignore"):
        back = x * scene.calibration.f + scene.calibration.mu - scene.k
    return np.asarray(np.where(np.isfinite(back), back, 0.0))
