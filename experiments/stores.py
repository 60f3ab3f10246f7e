"""A captured layer's attention, and stores of its keys of any width, in float64 tensors.

Shapes: kv heads first, then the rows of all query heads of a group (head by head, its steps in order) or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import log

import torch
from torch import Tensor

from witcert.capture import Captured
from witcert.schemes import Scheme
from witcert_kernels import LayerCalibration
from witcert_kernels.layout import bands
from witcert_kernels.philox import GRID_STEP, dither
from witcert_kernels.writer import half_up, scale_up
from witcert_ref.rope import RopeLayout
from witcert_ref.store import bypass_channels, select_bypass

NOWHERE = -1e6  # a logit whose weight is 0 in float64
SEED = 0x5EED  # of the dither


@dataclass(frozen=True)
class Attention:
    """q [kv_heads, rows, d], k [kv_heads, tokens, d], v [kv_heads, tokens, d_v], hidden [rows, tokens]; float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor
    sm_scale: float
    layout: RopeLayout
    rotary_dim: int | None

    @classmethod
    def of(cls, captured: Captured, n: int) -> Attention:
        """Layer n of captured tensors. Raises ValueError for a soft cap or a sink."""
        layer, meta = captured.layers[n], captured.metadata
        if meta.logits_soft_cap or layer.sinks is not None:
            raise ValueError("model: got one with a soft cap or sinks, which these experiments have no use for")
        q, k, v = (x.to(torch.float64) for x in (layer.q, layer.k, layer.v))
        tokens, kv_heads, _ = k.shape
        position, token = torch.arange(tokens - len(q), tokens)[:, None], torch.arange(tokens)
        hidden = token > position
        if layer.window_left >= 0:
            hidden |= token < position - layer.window_left
        grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, rows, d]
        return cls(
            grouped.flatten(1, 2),
            k.transpose(0, 1).contiguous(),
            v.transpose(0, 1).contiguous(),
            hidden.repeat(grouped.shape[1], 1),
            meta.sm_scale,
            meta.rope_layout,
            meta.rotary_dim,
        )

    @cached_property
    def logits(self) -> Tensor:
        """Exact logits [kv_heads, rows, tokens]."""
        return (self.sm_scale * self.q @ self.k.transpose(1, 2)).masked_fill(self.hidden, NOWHERE)


@dataclass(frozen=True)
class Layout:
    """What a store keeps: codes of some bits, a scale for a token's group of channels (None: for all of them) or for a
    channel over `block` tokens, equaliser, sketch directions, witness bands (a byte each), bypass pairs, and the dither
    that `dither` tokens share (None: round to nearest). `in_amax`: bypass channels still count in the scale."""

    bits: int = 8
    group: int | None = None
    block: int | None = None
    equalizer: bool = False
    sketch: int = 0
    witness: int = 0
    bypass: int = 0
    dither: int | None = None
    in_amax: bool = False

    @property
    def levels(self) -> float:
        """amax over the scale; half a level less with a dither, so that nothing clips."""
        return 2 ** (self.bits - 1) - 1 - (0.5 if self.dither else 0)

    def bytes(self, d: int) -> float:
        """Bytes a token and kv head of keys of d channels: float16 scales and bypass, int16 indices of a block's."""
        scales = 2 * d / self.block + 4 * self.bypass / self.block if self.block else 2 * d / (self.group or d)
        return d * self.bits / 8 + scales + self.sketch + self.witness + 4 * self.bypass


@dataclass(frozen=True)
class Store:
    """Keys as stored: q·k̂ = q·k + z·residual - a·known up to a shift, z = q∘f, a = z·u.

    f [kv_heads, 1, d] (0 on a bypass), u [kv_heads, r, d], residual and steps [kv_heads, tokens, d] (steps None: not
    known), known and unit [kv_heads, tokens, r] (or unit [..., 1]), witness [kv_heads, tokens, bands] or None,
    band [d] the band of each channel.
    """

    f: Tensor
    u: Tensor
    residual: Tensor
    steps: Tensor | None
    known: Tensor
    unit: Tensor
    witness: Tensor | None
    band: Tensor
    sm_scale: float
    dithered: bool

    def sketched(self, u: Tensor) -> Store:
        """With a sketch along u [kv_heads, r, d] whose bytes are in a unit of the token's own."""
        u = u.to(torch.float64)
        coordinates = self.residual @ u.transpose(1, 2)
        unit = half_up(coordinates.abs().amax(-1, keepdim=True) * (1 + 2.0**-50) / 127).to(torch.float64)
        unit = unit.clamp_min(2.0**-24)
        return replace(self, u=u, known=(coordinates / unit).round() * unit, unit=unit)

    def error(self, q: Tensor, *, corrected: bool = True) -> Tensor:
        """Stored minus exact logits for queries [kv_heads, rows, d]: [kv_heads, rows, tokens]."""
        raw = self.sm_scale * (q * self.f) @ self.residual.transpose(1, 2)
        return raw - self.correction(q) if corrected and self.u.shape[1] else raw

    @property
    def keys(self) -> Tensor:
        """Stored minus exact keys, without the sketch, [kv_heads, tokens, d]."""
        return self.f * self.residual

    def correction(self, q: Tensor) -> Tensor:
        """What the sketch knows of the error."""
        return self.sm_scale * (q * self.f @ self.u.transpose(1, 2)) @ self.known.transpose(1, 2)

    def half_step(self, q: Tensor) -> Tensor:
        """c of the steps, any query: no rounding here, dithered or not, errs by more than half of one."""
        assert self.steps is not None
        w, rest = self._outside(q)
        return self.sm_scale * w.abs() @ self.steps.transpose(1, 2) / 2 + rest

    def radius(self, q: Tensor, delta_local: float) -> Tensor:
        """c of a dithered writer, with probability 1 - delta_local for queries that do not depend on the dither."""
        assert self.steps is not None and self.dithered
        w, rest = self._outside(q)
        twice_log = 2 * log(2 * self.steps.shape[1] / delta_local)
        variance = w.square() @ self.steps.square().transpose(1, 2) / 12
        bias = w.abs() @ self.steps.transpose(1, 2) * GRID_STEP / 2
        return self.sm_scale * ((twice_log * variance).sqrt() + bias) + rest

    def tier_a(self, q: Tensor, *, corrected: bool = True) -> Tensor:
        """c of the witness, any query; of the uncorrected logit without `corrected`."""
        assert self.witness is not None
        w, rest = self._outside(q) if corrected else (q * self.f, 0.0)
        return self.sm_scale * norms(w, self.band, self.witness.shape[-1]) @ self.witness.transpose(1, 2) + rest

    def any_query(self, q: Tensor) -> Tensor:
        """The smallest c that holds for any query."""
        sources = [] if self.steps is None else [self.half_step(q)]
        if self.witness is not None:
            sources.append(self.tier_a(q))
        return torch.stack(sources).amin(0)

    def fixed_trajectory(self, q: Tensor, delta_local: float) -> Tensor:
        """The smallest c of a dithered store, as the package takes it: the radius unless half a step is less."""
        return torch.minimum(self.radius(q, delta_local), self.any_query(q))

    def _outside(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """What z has outside the sketch's directions, and what their codes' rounding adds to c."""
        z = q * self.f
        a = z @ self.u.transpose(1, 2)
        unit = self.unit.expand(-1, -1, a.shape[-1]) if a.shape[-1] else self.unit
        return z - a @ self.u, self.sm_scale * a.abs() @ unit.transpose(1, 2) / 2


def norms(x: Tensor, band: Tensor, count: int) -> Tensor:
    """Euclidean norms of the bands of x [..., d]: [..., count]."""
    members = torch.nn.functional.one_hot(band, count).to(x.dtype)
    return (x.square() @ members).sqrt()


def quantize(x: Tensor, layout: Layout, xi: Tensor | float = 0.0, exact: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x̂ - x, steps) of x [kv_heads, tokens, d]; exact [kv_heads, 1 or tokens, d] channels have 0 and no step."""
    magnitude = x.abs() if exact is None or layout.in_amax else x.abs().masked_fill(exact, 0.0)
    if layout.block:
        top = [part.amax(1, keepdim=True).expand_as(part) for part in magnitude.split(layout.block, 1)]
        amax = torch.cat(top, 1)
    else:
        grouped = magnitude.unflatten(-1, (-1, layout.group or x.shape[-1]))
        amax = grouped.amax(-1, keepdim=True).expand_as(grouped).flatten(-2)
    steps, largest = scale_up(amax, layout.levels).to(torch.float64), 2 ** (layout.bits - 1) - 1
    residual = steps * ((x / steps + xi).round().clamp(-largest, largest) - xi) - x
    if exact is not None:
        residual, steps = residual.masked_fill(exact, 0.0), steps.masked_fill(exact, 0.0)
    return residual, steps


def dither_of(layout: Layout, index: int, kv_heads: int, tokens: int, d: int, seed: int) -> Tensor | float:
    """ξ of layer `index`, [kv_heads, tokens, d]; 0 without a dither."""
    if not layout.dither:
        return 0.0
    period = torch.arange(tokens) // layout.dither
    return _dither(seed, index, kv_heads, int(period[-1]) + 1, d).to(torch.float64)[period].transpose(0, 1)


@lru_cache(maxsize=64)  # keys and values of all layers
def _dither(seed: int, index: int, kv_heads: int, periods: int, d: int) -> Tensor:
    return dither(seed, index, kv_heads, torch.arange(periods), d)


def write(
    attention: Attention, index: int, layout: Layout, calibration: LayerCalibration | None = None, seed: int = SEED
) -> Store:
    """Quantise layer `index`'s keys; the calibration (None: none) gives equaliser, directions and bypass pairs.

    A block without an equaliser chooses its own bypass pairs, those with the most scale energy (paper, section 5).
    """
    k = attention.k
    kv_heads, tokens, d = k.shape
    mu, f = (torch.full((kv_heads, 1, d), value, dtype=torch.float64) for value in (0.0, 1.0))
    u = torch.zeros(kv_heads, 0, d, dtype=torch.float64)
    exact = None
    if calibration is not None:
        exact = calibration.bypass_mask[:, None, :]
        if layout.equalizer:
            mu, f = (x.to(torch.float64)[:, None, :] for x in (calibration.mu, calibration.f))
        u = calibration.u[:, : layout.sketch].to(torch.float64)
    elif layout.bypass and layout.block:
        exact = _block_bypass(k, layout, attention)
    residual, steps = quantize((k - mu) / f, layout, dither_of(layout, index, kv_heads, tokens, d, seed), exact)
    if exact is not None and exact.shape[1] == 1:
        f = f.masked_fill(exact, 0.0)
    unit = steps @ u.abs().transpose(1, 2) / 254
    witness, band = None, bands(d, layout.witness, attention.layout, attention.rotary_dim)
    if layout.witness:
        size = norms(steps, band, layout.witness) / 508
        used = norms(residual, band, layout.witness) * (1 + (2 * d + 16) * 2.0**-53)
        witness = (used / size).nan_to_num(nan=0.0).ceil() * size
    known = (residual @ u.transpose(1, 2) / unit).round() * unit
    return Store(f, u, residual, steps, known, unit, witness, band, attention.sm_scale, bool(layout.dither))


def _block_bypass(k: Tensor, layout: Layout, attention: Attention) -> Tensor:
    """Channels of each block's own bypass pairs, bool [kv_heads, tokens, d]."""
    assert layout.block
    parts = []
    for part in k.split(layout.block, 1):
        chosen = select_bypass(part.abs().amax(1).numpy(), layout.bypass, attention.layout, attention.rotary_dim)
        channels = bypass_channels(chosen, k.shape[-1], attention.layout, attention.rotary_dim)
        parts.append(torch.from_numpy(channels)[:, None, :].expand_as(part))
    return torch.cat(parts, 1)


def write_values(attention: Attention, index: int, layout: Layout, seed: int = SEED) -> Tensor:
    """Stored minus exact values [kv_heads, tokens, d_v]: scales, width, dither and a block's bypass as for keys."""
    v = attention.v
    kv_heads, tokens, d = v.shape
    exact = _block_bypass(v, layout, attention) if layout.bypass and layout.block else None
    # the values' dither is the layers' after the keys'
    xi = dither_of(layout, 2**16 + index, kv_heads, tokens, d, seed)
    return quantize(v, layout, xi, exact)[0]


def observe(attention: Attention, scheme: Scheme, witness: int) -> Store:
    """A black-box scheme's float16 keys with float16 norms of `witness` bands; an incomplete last group stays exact."""
    k = attention.k
    kv_heads, tokens, d = k.shape
    whole = tokens // scheme.token_group * scheme.token_group
    read = scheme.quantize_keys(k[:, :whole].transpose(0, 1).to(torch.float16)).to(torch.float64).transpose(0, 1)
    residual = torch.cat([read, k[:, whole:]], 1) - k
    band = bands(d, witness, attention.layout, attention.rotary_dim)
    norm = half_up(norms(residual, band, witness) * (1 + (2 * d + 16) * 2.0**-53)).to(torch.float64)
    ones, nothing = (torch.ones(kv_heads, n, m, dtype=torch.float64) for n, m in ((1, d), (tokens, 0)))
    u = torch.zeros(kv_heads, 0, d, dtype=torch.float64)
    return Store(ones, u, residual, None, nothing, nothing, norm, band, attention.sm_scale, False)
