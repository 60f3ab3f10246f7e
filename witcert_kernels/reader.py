"""The reader, vectorised on tensors: the path for CPU tensors, and what the Triton reader must agree with.

Tokens are read in tiles of at most ``TILE`` tokens of one sequence, so the peak temporary is one tile a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import rounding
from .philox import dither
from .query import (
    ObservatoryQuery,
    PackedQuery,
    finite_rows,
    group_rows,
    observatory_query,
    packed_query,
    up,
)
from .state import INF, Moments, Partial, Result, cast_error, exp_moments, finish, log_mass, merge

TILE = 1024
ROWS = 128
FEW_ROWS = 64  # up to here exact keys are multiplied in float64, which leaves next to no rounding to account for
U = rounding.U


@dataclass(frozen=True)
class Span:
    """Some query rows of one sequence and what they may attend to.

    q ``[kv_heads, rows, d]`` (see :func:`group_rows`); position int64 ``[rows]``, from low to high, None where every
    row sees every token; ``window_left`` < 0: no window.
    """

    q: Tensor
    position: Tensor | None
    causal: bool
    window_left: int
    low: int
    high: int

    def mask(self, start: int, stop: int) -> Tensor | None:
        """Who may attend to tokens ``start … stop`` (absolute positions), bool ``[1, rows, tokens]``, None for all."""
        if self.position is None:
            return None
        below = not self.causal or stop - 1 <= self.low
        inside = self.window_left < 0 or start >= self.high - self.window_left
        if below and inside:
            return None
        token = torch.arange(start, stop, device=self.q.device)
        allowed = token <= self.position[:, None] if self.causal else torch.ones_like(token, dtype=torch.bool)
        if self.window_left >= 0:
            allowed = allowed & (token >= self.position[:, None] - self.window_left)
        return allowed.expand(len(self.position), -1)[None]


@dataclass(frozen=True)
class Options:
    """Scalars and small tensors of one call, see :func:`witcert_kernels.certified_decode`."""

    sm_scale: float
    cap: float
    with_shift: bool
    log_term: float
    want_shares: bool


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, or x for a cap of 0."""
    return x if cap == 0 else cap * (x / cap).tanh()


def magnitude(raw: Tensor, added: list[Tensor | None], allowed: Tensor | None) -> Tensor:
    """What any intermediate of the attended logits can reach, ``[kv_heads, rows]``.

    raw: logits before the cap; added: terms, ``[kv_heads, rows, …]``, that may have cancelled others in them.
    """
    size = (raw if allowed is None else raw.masked_fill(~allowed, 0.0)).abs().amax(-1)
    for term in added:
        if term is not None:
            size = size + term.abs().flatten(2).amax(-1)
    return size


def row_error(x: Tensor, size: Tensor, cap: float, masked: bool) -> Tensor:
    """Rounding of float32 logits and of e^(x − m) that does not scale with a token's step, ``[kv_heads, rows]``.

    x: logits; size: their :func:`magnitude`.
    """
    top = x.amax(-1)
    low = (torch.where(x == -INF, INF, x) if masked else x).amin(-1)
    spread = (top - low).clamp_max(104.0)
    if masked:
        spread = spread.masked_fill(top == -INF, 0.0)
    return (U * (rounding.LOGIT_ADDS * size + spread) + rounding.EXP_ERROR + rounding.TANH_ERROR * cap) * (1 + 2.0**-10)


class PackedReader:
    """Reads the packed store's tiles. Tensors as in :class:`witcert_kernels.PackedPool`."""

    known = False

    def __init__(self, tensors: dict[str, Tensor], scalars: dict[str, int]) -> None:
        self.t = tensors
        self.page_size = tensors["k_codes"].shape[1]
        self.kv_heads = tensors["k_codes"].shape[2]
        self.groups, self.groups_v = tensors["k_scale"].shape[-1], tensors["v_scale"].shape[-1]
        self.bands = tensors["witness"].shape[-1]
        self.r = tensors["sketch"].shape[-1]
        self.scalars = scalars

    def query(self, q: Tensor, sm_scale: float) -> PackedQuery:
        t = self.t
        return packed_query(
            q, t["mu"], t["f"], t["u"], t["bypass_channels"], t["band_of_channel"], self.bands, self.groups, sm_scale
        )

    def _load(self, name: str, pages: Tensor, cut: slice) -> Tensor:
        """Tokens of some pages, ``[kv_heads, tokens, …]``."""
        return self.t[name][pages].flatten(0, 1)[cut].transpose(0, 1)

    def tile(
        self,
        query: PackedQuery,
        options: Options,
        pages: Tensor,
        start: int,
        stop: int,
        allowed: Tensor | None,
        bias: Tensor | None,
    ) -> Partial:
        """Tokens ``start … stop`` of the sequence; the first of ``pages`` is the one that holds ``start``."""
        base = start // self.page_size * self.page_size
        cut = slice(start - base, stop - base)
        codes = self._load("k_codes", pages, cut).to(torch.float32)
        scale = self._load("k_scale", pages, cut).to(torch.float32)
        lost = ~((scale[..., 0] >= 0) & (scale[..., 0] < INF))
        any_lost = bool(lost.any())
        if any_lost:
            scale = scale.masked_fill(lost[..., None], 0.0)
        steps = scale.transpose(1, 2)  # [kv_heads, groups, tokens]

        width = codes.shape[-1] // self.groups
        x = codes.new_zeros(())
        if self.r:
            sketch = self._load("sketch", pages, cut).to(torch.float32).transpose(1, 2)
        if self.scalars["dither"]:
            shared = self._dithered(query.z, start, stop)
        for g in range(self.groups):
            part = slice(g * width, (g + 1) * width)
            dot = query.z[..., part] @ codes[..., part].transpose(1, 2)
            if self.r:
                dot = torch.baddbmm(dot, query.a_unit[..., g], sketch, alpha=-1.0)
            if self.scalars["dither"]:
                dot -= shared[g]
            x = x + dot * steps[:, g, None, :] if self.groups > 1 else dot.mul_(steps[:, g, None, :])

        bound = query.half @ steps
        if self.bands:
            witness = self._load("witness", pages, cut).to(torch.float32).transpose(1, 2)
            if self.groups == 1:
                size = self.t["band_of_channel"].bincount(minlength=self.bands).to(torch.float32).sqrt()
                other = (query.witness * size) @ witness * steps
            else:
                of_group = torch.arange(codes.shape[-1], device=codes.device) // width
                share = codes.new_zeros(self.bands, self.groups)
                share.index_put_((self.t["band_of_channel"], of_group), codes.new_ones(()), True)
                other = query.witness @ (witness * (share @ steps.square()).sqrt())
            bound = torch.minimum(bound, other * (1 + (self.bands + 8) * U))
        if options.log_term > 0:
            proxy = query.radius_square @ steps.square() * options.log_term
            bound = torch.minimum(bound, (proxy.sqrt() + query.radius_bias @ steps) * (1 + (self.groups + 8) * U))
        rounded = query.dot_error @ steps
        bound = bound + rounded
        if self.r:
            bound = bound + query.sketch_error @ steps

        wide_error = query.shift_error if options.with_shift else torch.zeros_like(query.shift)
        if self.t["bypass"].shape[-1]:
            kept = self._load("bypass", pages, cut).to(torch.float64)
            x = x + (query.bypass @ kept.transpose(1, 2)).to(torch.float32)
            wide_error = wide_error + _norms(query.bypass, kept) * ((kept.shape[-1] + 4) * rounding.U64)
        shift = query.shift.to(torch.float32)[..., None] if options.with_shift else None
        for term in (shift, bias):
            x = x if term is None else x + term
        size = magnitude(x, [shift, bias], allowed)
        raw, x = x, softcap(x, options.cap)
        bad = query.bad
        if any_lost or not bool(size.isfinite().all()):
            overflow = ~raw.isfinite()
            x, size = x.masked_fill(overflow, 0.0), size.nan_to_num(nan=0.0, posinf=0.0)
            overflow = overflow | lost[:, None, :]
            bad = bad | (overflow if allowed is None else overflow & allowed).any(-1)
        if allowed is not None:
            x = x.masked_fill(~allowed, -INF)
            rounded = rounded.masked_fill(~allowed, 0.0)
        masked = allowed is not None
        constant = row_error(x, size, options.cap, masked) + up(wide_error)
        c = (bound + constant[..., None]) * rounding.FLOAT_UP
        moments, p, excess = exp_moments(x, c, masked)
        m_a, l_a = log_mass(moments, x, c)

        scale_v = self._load("v_scale", pages, cut).to(torch.float32)
        lost_v = ~((scale_v[..., 0] >= 0) & (scale_v[..., 0] < INF))
        bad_v = torch.zeros_like(query.bad)
        if bool(lost_v.any()):
            scale_v = scale_v.masked_fill(lost_v[..., None], 0.0)
            reached = lost_v[:, None, :] if allowed is None else lost_v[:, None, :] & allowed
            bad_v = bad_v | reached.any(-1)
        values = self._load("v_codes", pages, cut).to(torch.float32)
        width_v = values.shape[-1] // self.groups_v
        acc = torch.cat(
            [(p * scale_v[:, None, :, g]) @ values[..., g * width_v : (g + 1) * width_v] for g in range(self.groups_v)],
            dim=-1,
        ).to(torch.float64)
        rho = scale_v.square().sum(-1).sqrt() * (width_v**0.5 / 2 * rounding.STEP_WIDEN * rounding.FLOAT_UP)
        return Partial(
            moments=moments,
            acc=acc,
            rho=(p @ rho[..., None])[..., 0].to(torch.float64),
            zeta_max=(rounded.amax(-1) + constant).to(torch.float64),
            m_a=m_a,
            l_a=l_a,
            norm=self.t["v_norm"][pages].amax(0)[:, None].expand_as(moments.m).to(torch.float64),
            bad=bad,
            bad_v=bad_v,
            compressed=_attended(x, allowed),
            shares=_shares(excess, moments.m, start, stop, self.page_size) if options.want_shares else [],
        )

    def _dithered(self, z: Tensor, start: int, stop: int) -> list[Tensor]:
        """Σ_j z_j ξ_j of each group, ``[kv_heads, rows, tokens]`` each: one scalar a row and period."""
        period, s = self.scalars["dither_period"], self.scalars
        token = torch.arange(start, stop, device=z.device) // period
        periods = torch.arange(start // period, (stop - 1) // period + 1, device=z.device)
        xi = dither(s["seed"], s["layer"], self.kv_heads, periods, z.shape[-1]).to(torch.float64)
        product = torch.einsum("kmgw,nkgw->gkmn", *(x.unflatten(-1, (self.groups, -1)) for x in (z.double(), xi)))
        return list(product[..., token - periods[0]].to(torch.float32))


class ObservatoryReader:
    """Reads the observatory's tiles in float64. Tensors as in :class:`witcert_kernels.ObservatoryPool`."""

    known = True

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.t = tensors
        self.page_size = tensors["k_hat"].shape[1]
        self.kv_heads = tensors["k_hat"].shape[2]
        self.bands = tensors["witness"].shape[-1]
        self.r = tensors["sketch"].shape[-1]
        self.known = self.r > 0

    def query(self, q: Tensor, sm_scale: float) -> ObservatoryQuery:
        t = self.t
        return observatory_query(q, t["f"], t["u"], t["band_of_channel"], self.bands, sm_scale)

    def _load(self, name: str, pages: Tensor, cut: slice) -> Tensor:
        return self.t[name][pages].flatten(0, 1)[cut].transpose(0, 1).to(torch.float64)

    def tile(
        self,
        query: ObservatoryQuery,
        options: Options,
        pages: Tensor,
        start: int,
        stop: int,
        allowed: Tensor | None,
        bias: Tensor | None,
    ) -> Partial:
        """As :meth:`PackedReader.tile`."""
        base = start // self.page_size * self.page_size
        cut = slice(start - base, stop - base)
        witness = self._load("witness", pages, cut).transpose(1, 2)
        lost = ~(witness < INF).all(1)
        witness = witness.masked_fill(lost[:, None, :], 0.0)
        keys = self._load("k_hat", pages, cut)
        raw = query.q @ keys.transpose(1, 2)
        if bias is not None:
            raw = raw + bias
        size = magnitude(raw, [bias], allowed) + _norms(query.q, keys) * (keys.shape[-1] * 2.0**-12)
        x = softcap(raw, options.cap)
        blocked, masked = None if allowed is None else ~allowed, allowed is not None
        if blocked is not None:
            x = x.masked_fill(blocked, -INF)
        zeta = 2.0**-40 * (1 + size + options.cap)
        c = (query.witness @ witness + zeta[..., None]) * (1 + 2.0**-40)
        moments, p, excess = exp_moments(x, c, masked)
        m_a, l_a = log_mass(moments, x, c)
        known = er = ee = e1 = e2 = None
        if self.r:
            unit = self._load("sketch_scale", pages, cut)[..., 0]
            clamped = ~(unit < INF)
            unit = unit.masked_fill(clamped, 0.0)[:, None, :]
            correction = (query.a @ self._load("sketch", pages, cut).transpose(1, 2)) * unit
            r = x - softcap(raw - correction, options.cap) if options.cap else correction
            r = r if blocked is None else r.masked_fill(blocked, 0.0)
            known_zeta = 4 * zeta + 2.0**-40 * query.a_error * 127 * unit.amax(-1)
            c_two = query.outside @ witness + query.a_error[..., None] * unit + known_zeta[..., None]
            c_two = (c_two * (1 + 2.0**-40)).masked_fill(clamped[:, None, :], INF)
            w = x - r
            known, p_w, _ = exp_moments(w, c_two, masked)
            er, ee = (p_w * r.exp()).sum(-1), (p_w * (2 * r).exp()).sum(-1)
            e1 = (p_w * r.expm1()).sum(-1)
            e2 = (p_w * r.expm1().square()).sum(-1)
        values, error = self._load("v_hat", pages, cut), self._load("v_error", pages, cut)[..., 0]
        lost_v = ~(error < INF)
        error = error.masked_fill(lost_v, 0.0)
        reached, reached_v = lost[:, None, :], lost_v[:, None, :]
        if allowed is not None:
            reached, reached_v = reached & allowed, reached_v & allowed
        return Partial(
            moments=moments,
            acc=p @ values,
            rho=(p @ error[..., None])[..., 0],
            zeta_max=zeta,
            m_a=m_a,
            l_a=l_a,
            norm=self.t["v_norm"][pages].amax(0)[:, None].expand_as(moments.m).to(torch.float64),
            bad=query.bad | reached.any(-1),
            bad_v=reached_v.any(-1) | torch.zeros_like(query.bad),
            compressed=_attended(x, allowed),
            known=known,
            er=er,
            ee=ee,
            e1=e1,
            e2=e2,
            shares=_shares(excess, moments.m, start, stop, self.page_size) if options.want_shares else [],
        )


def _norms(q: Tensor, keys: Tensor) -> Tensor:
    """Largest ‖q‖ ‖k‖ of each row, float64 ``[kv_heads, rows]``: bounds Σ |q_j k_j|."""
    return q.square().sum(-1).sqrt() * keys.square().sum(-1).amax(-1, keepdim=True).sqrt()


def _attended(x: Tensor, allowed: Tensor | None) -> Tensor:
    """How many tokens of a tile each row attends to, int64 ``[kv_heads, rows]``."""
    if allowed is None:
        return torch.full(x.shape[:2], x.shape[2], dtype=torch.int64, device=x.device)
    return allowed.sum(-1).expand(x.shape[:2])


def _shares(excess: Tensor, m: Tensor, start: int, stop: int, page_size: int) -> list[tuple[int, Tensor, Tensor]]:
    """Each page's part of Σ e^(x − m) (e^c − 1), ``[kv_heads, rows, pages]``, with its first page and m."""
    first = start // page_size
    token = torch.arange(start, stop, device=excess.device) // page_size - first
    out = excess.new_zeros(*excess.shape[:2], (stop - 1) // page_size - first + 1, dtype=torch.float64)
    return [(first, out.index_add_(2, token, excess.to(torch.float64)), m)]


def exact_tile(
    span: Span,
    options: Options,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    *,
    known: bool,
) -> Partial:
    """Exact keys ``[kv_heads, tokens, d]`` and values: c = 0, only rounding remains. Non-finite ones count as zeros."""
    q64, bad = finite_rows(span.q)
    lost, lost_v = ~k.isfinite().all(-1), ~v.isfinite().all(-1)
    keys = k.to(torch.float32).masked_fill(lost[..., None], 0.0)
    values = v.to(torch.float32).masked_fill(lost_v[..., None], 0.0)
    wide = keys.to(torch.float64)
    if span.q.shape[1] <= FEW_ROWS:
        x = ((options.sm_scale * q64) @ wide.transpose(1, 2)).to(torch.float32)
        unit = rounding.U64
    else:
        x = (options.sm_scale * q64).to(torch.float32) @ keys.transpose(1, 2)
        unit = U
    zeta = options.sm_scale * _norms(q64, wide) * ((k.shape[-1] + 8) * unit)
    if bias is not None:
        x = x + bias
    size = magnitude(x, [bias], allowed).nan_to_num(nan=0.0, posinf=0.0)
    finite = x.isfinite()
    x = softcap(torch.where(finite, x, 0.0), options.cap)
    reached, reached_v = lost[:, None, :] | ~finite, lost_v[:, None, :]
    if allowed is not None:
        x = x.masked_fill(~allowed, -INF)
        reached, reached_v = reached & allowed, reached_v & allowed
    zeta = (zeta + row_error(x, size, options.cap, allowed is not None)) * (1 + 2.0**-10)
    m = x.amax(-1)
    p = (x - torch.where(m == -INF, 0.0, m)[..., None]).exp()
    l, rise = p.sum(-1, dtype=torch.float64), zeta.expm1() * (1 + 2.0**-40)  # noqa: E741
    moments = Moments(m.to(torch.float64), l, l * rise, l * rise.square(), zeta)
    acc = (p @ values).to(torch.float64)
    if not bool(acc.isfinite().all()):  # the sum left float32's range, its mean does not
        acc = p.to(torch.float64) @ values.to(torch.float64)
    zero = torch.zeros_like(l)
    return Partial(
        moments=moments,
        acc=acc,
        rho=zero,
        zeta_max=zeta,
        m_a=moments.m,
        l_a=l + moments.a1,
        norm=values.to(torch.float64).square().sum(-1).amax(-1, True).sqrt().expand_as(l) * (1 + 2.0**-40),
        bad=bad | reached.any(-1),
        bad_v=reached_v.any(-1) | torch.zeros_like(bad),
        compressed=torch.zeros_like(l, dtype=torch.int64),
        known=moments if known else None,
        er=l if known else None,
        ee=l if known else None,
        e1=zero if known else None,
        e2=zero if known else None,
    )


def sink_partial(sinks: Tensor, rows: int, kv_heads: int, head_dim_v: int, *, known: bool) -> Partial:
    """A sink a query head, ``[heads]``: a token with value 0 and c = 0, once and never once per split."""
    part = Partial.empty(kv_heads, rows, head_dim_v, sinks.device, known=known)
    x = sinks.to(torch.float64).view(kv_heads, -1).repeat(1, rows // (len(sinks) // kv_heads))
    one = torch.ones_like(x)
    zeta = U * (1 + x.abs())
    moments = Moments(x, one, zeta.expm1(), zeta.expm1().square(), zeta)
    part.moments, part.m_a, part.l_a, part.zeta_max = moments, x, one + moments.a1, zeta
    if known:
        part.known, part.er, part.ee = moments, one, one
    return part


def decode(
    q: Tensor,
    reader: PackedReader | ObservatoryReader,
    page_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
    exact_pages: Tensor | None,
    exact_k: Tensor,
    exact_v: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    *,
    causal: bool,
    sm_scale: float,
    cap: float,
    window_left: int,
    delta_local: float,
    splits: int,
    want_shares: bool,
) -> tuple[Tensor, ...]:
    """See :func:`witcert_kernels.certified_decode`.

    Returns out, lse, meter, eform, risk, value_error, compressed and shares.
    """
    n, heads, _ = q.shape
    kv_heads, head_dim_v = reader.kv_heads, exact_v.shape[-1]
    per_head = heads // kv_heads
    out_error, out_floor = cast_error(q.dtype)
    lengths = seq_lens.tolist()
    bounds = list(range(len(lengths) + 1)) if qo_indptr is None else qo_indptr.tolist()
    out = q.new_zeros(n, heads, head_dim_v)
    report = torch.zeros(6, n, heads, dtype=torch.float64, device=q.device)
    shares = report.new_zeros(len(lengths), kv_heads, page_table.shape[1] if want_shares else 0, dtype=torch.float32)
    for b, length in enumerate(lengths):
        total = bounds[b + 1] - bounds[b]
        offset = length if k_new is not None else length - total  # position of the sequence's first query row
        repaired = None if exact_pages is None else exact_pages[b]
        mixed = (
            k_new is not None or sinks is not None or cap != 0 or (repaired is not None and bool((repaired >= 0).any()))
        )
        options = Options(
            sm_scale=sm_scale,
            cap=cap,
            with_shift=mixed,
            log_term=log_term(length, delta_local),
            want_shares=want_shares,
        )
        for first in range(bounds[b], bounds[b + 1], ROWS):
            stop = min(first + ROWS, bounds[b + 1])
            low, high = offset + first - bounds[b], offset + stop - 1 - bounds[b]
            position = None
            if causal or window_left >= 0:
                position = torch.arange(low, high + 1, device=q.device).repeat_interleave(per_head)
            span = Span(
                q=group_rows(q[first:stop], kv_heads),
                position=position,
                causal=causal,
                window_left=window_left,
                low=low,
                high=high,
            )
            query = reader.query(span.q, sm_scale)
            added = None if bias is None else group_rows(bias[first:stop], kv_heads)
            parts = _read(
                reader, query, span, options, page_table[b], length, repaired, exact_k, exact_v, splits, added
            )
            if k_new is not None and v_new is not None:
                keys, values = (t[bounds[b] : bounds[b + 1]].transpose(0, 1) for t in (k_new, v_new))
                begin = 0 if window_left < 0 else max(0, low - window_left - length)
                end = stop - bounds[b] if causal else total
                for t0 in range(begin, end, TILE):
                    t1 = min(t0 + TILE, end)
                    here = None if added is None else added[..., length + t0 : length + t1]
                    allowed, here = _bias_mask(span.mask(length + t0, length + t1), here)
                    chunk = keys[:, t0:t1], values[:, t0:t1]
                    parts.append(exact_tile(span, options, *chunk, allowed, here, known=reader.known))
            if sinks is not None:
                parts.append(sink_partial(sinks, span.q.shape[1], kv_heads, head_dim_v, known=reader.known))
            if not parts:
                parts = [Partial.empty(kv_heads, span.q.shape[1], head_dim_v, q.device, known=reader.known)]
            merged = merge(parts)
            result = finish(
                merged,
                tokens=length + total,
                sum_error=(TILE + 16) * U,
                out_error=out_error,
                out_floor=out_floor,
                small=rounding.UNDERFLOW,
            )
            shift = query.shift if isinstance(query, PackedQuery) and not mixed else 0.0
            _store(out[first:stop], report[:, first:stop], result, shift, merged.compressed, per_head)
            if want_shares:
                _store_shares(shares[b], merged)
    f32 = [_round_up(report[i]) if i else report[i].to(torch.float32) for i in range(5)]
    return (out, *f32, report[5].to(torch.int32), shares)


def log_term(length: int, delta_local: float) -> float:
    """``log(2 S / δ)`` rounded up, 0 when no radius is on offer."""
    if delta_local <= 0 or length == 0:
        return 0.0
    term = torch.tensor(2 * length / delta_local, dtype=torch.float64).log().item()
    return term * (1 + 2.0**-40)


def _bias_mask(allowed: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A bias of −Inf as a mask, since a cap would make it finite; the bias is 0 there."""
    if bias is None:
        return allowed, None
    off = bias == -INF
    if not bool(off.any()):
        return allowed, bias
    return ~off if allowed is None else allowed & ~off, bias.masked_fill(off, 0.0)


def _read(
    reader: PackedReader | ObservatoryReader,
    query: Any,
    span: Span,
    options: Options,
    page_row: Tensor,
    length: int,
    repaired: Tensor | None,
    exact_k: Tensor,
    exact_v: Tensor,
    splits: int,
    bias: Tensor | None,
) -> list[Partial]:
    """All stored tokens of one sequence, one partial result for each of ``splits`` runs of pages (0: one)."""
    page_size = reader.page_size
    begin = 0 if span.window_left < 0 else max(0, span.low - span.window_left)
    end = min(length, span.high + 1) if span.causal else length
    if end <= begin:
        return []
    first, last = begin // page_size, (end - 1) // page_size + 1
    per_split = -(-(last - first) // max(splits, 1))
    tile_pages = max(1, TILE // page_size)
    parts = []
    for split in range(first, last, per_split):
        tiles = []
        split_end = min(split + per_split, last)
        for page in range(split, split_end, tile_pages):
            page_stop = min(page + tile_pages, split_end)
            start, stop = max(begin, page * page_size), min(end, page_stop * page_size)
            allowed, here = _bias_mask(span.mask(start, stop), None if bias is None else bias[..., start:stop])
            if repaired is not None and options.with_shift:
                exact = repaired[:, page:page_stop] >= 0
                if bool(exact.any()):
                    tiles.append(
                        _repaired(
                            reader, span, options, repaired, exact_k, exact_v, exact, page, start, stop, allowed, here
                        )
                    )
                if bool(exact.all()):
                    continue
                if bool(exact.any()):
                    token = torch.arange(start, stop, device=span.q.device) // page_size - page
                    kept = ~exact[:, token][:, None, :]
                    allowed = kept if allowed is None else allowed & kept
                    allowed = allowed.expand(-1, span.q.shape[1], -1)
            pages = page_row[page:page_stop].to(torch.int64)
            tiles.append(reader.tile(query, options, pages, start, stop, allowed, here))
        parts.append(merge(tiles))
    return parts


def _repaired(
    reader: PackedReader | ObservatoryReader,
    span: Span,
    options: Options,
    repaired: Tensor,
    exact_k: Tensor,
    exact_v: Tensor,
    exact: Tensor,
    page: int,
    start: int,
    stop: int,
    allowed: Tensor | None,
    bias: Tensor | None,
) -> Partial:
    """The repaired pages among those of a tile, one kv head after the other, since each has its own."""
    page_size = reader.page_size
    rows = []
    for kv_head in range(reader.kv_heads):
        mine = Partial.empty(1, span.q.shape[1], exact_v.shape[-1], span.q.device, known=reader.known)
        if bool(exact[kv_head].any()):
            token = torch.arange(start, stop, device=span.q.device)
            here = exact[kv_head][token // page_size - page]
            token = token[here]
            slot = repaired[kv_head, token // page_size].to(torch.int64)
            one = replace(span, q=span.q[kv_head : kv_head + 1])
            mine = exact_tile(
                one,
                options,
                exact_k[slot, token % page_size][None],
                exact_v[slot, token % page_size][None],
                None if allowed is None else allowed.expand(reader.kv_heads, -1, -1)[kv_head : kv_head + 1][..., here],
                None if bias is None else bias[kv_head : kv_head + 1][..., here],
                known=reader.known,
            )
        rows.append(mine)
    return _stack(rows)


def _stack(parts: list[Partial]) -> Partial:
    """Partials of single kv heads, as one of all."""

    def join(values: list[Any]) -> Any:
        head = values[0]
        if isinstance(head, Tensor):
            return torch.cat(values)
        if isinstance(head, Moments):
            return Moments(*(torch.cat([getattr(v, n) for v in values]) for n in ("m", "l", "a1", "a2", "c_max")))
        return head

    return Partial(**{name: join([getattr(p, name) for p in parts]) for name in Partial.__dataclass_fields__})


def _ungroup(x: Tensor, per_head: int) -> Tensor:
    """``[kv_heads, n * G, …] -> [n, heads, …]``."""
    kv_heads, rows = x.shape[:2]
    split = x.view(kv_heads, rows // per_head, per_head, *x.shape[2:])
    return split.transpose(0, 1).reshape(rows // per_head, kv_heads * per_head, *x.shape[2:])


def _store(
    out: Tensor, report: Tensor, result: Result, shift: Tensor | float, compressed: Tensor, per_head: int
) -> None:
    # the exact output is within v's range, so that clamping to it can only help
    limit = torch.finfo(out.dtype).max
    out.copy_(_ungroup(result.out, per_head).clamp(-limit, limit))
    columns = (result.lse + shift, result.meter, result.eform, result.risk, result.value_error, compressed)
    for row, column in zip(report, columns, strict=True):
        row.copy_(_ungroup(column, per_head))


def _store_shares(shares: Tensor, parts: Partial) -> None:
    """The largest share of a1 that a page has in any query row of its kv head, ``[kv_heads, pages]``."""
    for first, excess, m in parts.shares:
        weight = torch.where(m == -INF, 0.0, (m - parts.moments.m).exp()) / parts.moments.l.clamp_min(1e-300)
        share = (excess * weight[..., None]).nan_to_num(nan=INF).amax(1).to(shares.dtype)
        window = shares[:, first : first + share.shape[-1]]
        torch.maximum(window, share, out=window)


def _round_up(x: Tensor) -> Tensor:
    """float64 to float32, towards +Inf."""
    y = x.to(torch.float32)
    return torch.where(y.to(torch.float64) < x, y.nextafter(torch.full_like(y, INF)), y).clamp_max(INF)
