"""Split-KV partial results and their merge (Lean ``WitCert.merge_splits``), and the meter.

Everything but a tile's own arithmetic is float64 here. A partial covers some tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from . import rounding

INF = float("inf")


def _weights(m: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of the parts' maxima m ``[parts, …]``, and each part's e^(m − max), 0 for an empty part."""
    top = m.amax(0)
    return top, (m - torch.where(top == -INF, 0.0, top)).exp()


def _total(values: Tensor, weights: Tensor) -> Tensor:
    """``Σ values * weights`` over the parts, where infinity times a vanished weight stays infinite."""
    product = values * weights
    return torch.where(values.isinf(), values, product).sum(0) if bool(product.isnan().any()) else product.sum(0)


@dataclass
class Moments:
    """Maximum m and sums over the tokens relative to it: l of e^x, a1, a2 of e^x (e^c − 1) and its square; max of c."""

    m: Tensor
    l: Tensor  # noqa: E741
    a1: Tensor
    a2: Tensor
    c_max: Tensor

    def meter(self, relative: float, absolute: Tensor) -> tuple[Tensor, Tensor]:
        """Upper bounds of the meter and of the e-form's ``½ (A² − 1)``.

        Args:
            relative: relative error of l, a1 and a2.
            absolute: error that underflow leaves in a1 and a2, over l, ``[kv_heads, rows]``.
        """
        l = self.l.clamp_min(torch.finfo(torch.float64).tiny)  # noqa: E741
        a1 = self.a1 / l
        a1_up, a2_up = a1 * (1 + relative) + absolute, self.a2 / l * (1 + relative) + absolute
        a1_low = (a1 * (1 - relative) - absolute).clamp_min(0.0)
        variance = torch.where(a2_up.isinf() | a1_low.isinf(), INF, a2_up - a1_low.square()).clamp_min(0.0)
        total = 1 + a1_up
        phi = torch.where(total <= 2, a1_up / total, 1 / (1 + 4 / total.square()))
        sharp = (a1_up + variance.sqrt() / 2) / (total + 1)
        tanh = (self.c_max / 2).tanh()
        bound = torch.minimum(torch.minimum(phi, tanh), torch.where(sharp.isnan(), 1.0, sharp))
        return torch.where(self.a1 == INF, 1.0, bound), a1_up + a1_up.square() / 2


@dataclass
class Partial:
    """A partial result. Besides the moments under the kernel's own logits:

    acc ``[kv_heads, rows, d_v]`` Σ e^x v̂, rho Σ e^x ρ; zeta_max the largest ζ; m_a, l_a log-sum-exp of x + c;
    norm the largest ‖v̂‖ + ρ; bad, bad_v whether a token that was attended is not finite; compressed how many compressed
    tokens were attended; known the second set under w = y − r with er, ee the sums of e^w e^r and e^w e^2r, e1, e2
    those of e^w (e^r − 1)^i.
    """

    moments: Moments
    acc: Tensor
    rho: Tensor
    zeta_max: Tensor
    m_a: Tensor
    l_a: Tensor
    norm: Tensor
    bad: Tensor
    bad_v: Tensor
    compressed: Tensor
    known: Moments | None = None
    er: Tensor | None = None
    ee: Tensor | None = None
    e1: Tensor | None = None
    e2: Tensor | None = None
    shares: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def empty(cls, kv_heads: int, rows: int, head_dim_v: int, device: torch.device, *, known: bool) -> Partial:
        """No tokens."""

        def full(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.full((kv_heads, rows), value, dtype=dtype, device=device)

        def moments() -> Moments:
            return Moments(full(-INF), full(0), full(0), full(0), full(0))

        return cls(
            moments=moments(),
            acc=torch.zeros(kv_heads, rows, head_dim_v, dtype=torch.float64, device=device),
            rho=full(0),
            zeta_max=full(0),
            m_a=full(-INF),
            l_a=full(0),
            norm=full(0),
            bad=full(0, torch.bool),
            bad_v=full(0, torch.bool),
            compressed=full(0, torch.int64),
            known=moments() if known else None,
            er=full(0) if known else None,
            ee=full(0) if known else None,
            e1=full(0) if known else None,
            e2=full(0) if known else None,
        )


def merge(parts: Sequence[Partial]) -> Partial:
    """The partial over the union of disjoint sets of tokens: one at least."""
    if len(parts) == 1:
        return parts[0]

    def stack(name: str) -> Tensor:
        return torch.stack([getattr(part, name) for part in parts])

    moments, weights = _merge_moments([part.moments for part in parts])
    m_a, weights_a = _weights(stack("m_a"))
    merged = Partial(
        moments=moments,
        acc=(stack("acc") * weights[..., None]).sum(0),
        rho=(stack("rho") * weights).sum(0),
        zeta_max=stack("zeta_max").amax(0),
        m_a=m_a,
        l_a=(stack("l_a") * weights_a).sum(0),
        norm=stack("norm").amax(0),
        bad=stack("bad").any(0),
        bad_v=stack("bad_v").any(0),
        compressed=stack("compressed").sum(0),
        shares=[share for part in parts for share in part.shares],
    )
    known = [part.known for part in parts if part.known is not None]
    if known:
        merged.known, weights = _merge_moments(known)
        for name in ("er", "ee", "e1", "e2"):
            setattr(merged, name, _total(stack(name), weights))
    return merged


def _merge_moments(parts: Sequence[Moments]) -> tuple[Moments, Tensor]:
    m, weights = _weights(torch.stack([part.m for part in parts]))
    l, a1, a2 = (_total(torch.stack([getattr(p, name) for p in parts]), weights) for name in ("l", "a1", "a2"))  # noqa: E741
    return Moments(m, l, a1, a2, torch.stack([part.c_max for part in parts]).amax(0)), weights


def exp_moments(x: Tensor, c: Tensor, masked: bool) -> tuple[Moments, Tensor, Tensor]:
    """Moments of one tile ``[kv_heads, rows, tokens]``; where ``masked``, x is −Inf at tokens that are not attended.

    Returns the moments, the weights e^(x − m) and the excess weights e^(x − m) (e^c − 1), in x's dtype. c is not
    negative and already an upper bound in x's dtype.
    """
    m = x.amax(-1)
    shifted = x - (torch.where(m == -INF, 0.0, m) if masked else m)[..., None]
    p = shifted.exp()
    if masked:
        c = c.masked_fill(x == -INF, 0.0)  # 0 * Inf is not 0
    c_max = c.amax(-1)
    if c_max.numel() and float(c_max.max()) > 20:
        # e^c may leave the range while its weight is tiny: multiply in the exponent, with room to 10^308
        wide, exponent = c.to(torch.float64), shifted.to(torch.float64)
        excess64 = torch.where(wide < 20, exponent.exp() * wide.expm1(), (exponent + wide).exp())
        square64 = torch.where(wide < 20, excess64 * wide.expm1(), (exponent + 2 * wide).exp())
        excess, a1, a2 = excess64, excess64.sum(-1), square64.sum(-1)
    else:
        rise = c.expm1()
        excess = p * rise
        a1, a2 = excess.sum(-1, dtype=torch.float64), (excess * rise).sum(-1, dtype=torch.float64)
    l = p.sum(-1, dtype=torch.float64)  # noqa: E741
    return Moments(m.to(torch.float64), l, a1, a2, c_max.to(torch.float64)), p, excess


def log_mass(moments: Moments, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """``(m_a, l_a)`` with Σ e^(x + c) = l_a e^(m_a), no overflow for any finite c."""
    if float(moments.a1.max()) < 1e200:
        return moments.m, moments.l + moments.a1
    total = (x.to(torch.float64) + c).logsumexp(-1)
    return total, (total > -INF).to(torch.float64)


def _relative_deviation(part: Partial) -> Tensor:
    """Upper bound of ``½ sd(e^r) / mean(e^r)`` under softmax(y − r), from the better conditioned of two second moments.

    Around 1 where r is small, around 0 where all tokens share a large r. Both are float64 sums.
    """
    assert part.known is not None
    kl = torch.where(part.known.l > 0, part.known.l, 1.0)
    mean, square, e1, e2 = (x / kl for x in (part.er, part.ee, part.e1, part.e2) if x is not None)
    near = ((e2 - e1.square()).clamp_min(0.0) + rounding.MOMENT_REL**2 * (e2 + e1.square())) / mean.square()
    ratio = square / mean.square()
    far = (ratio - 1).clamp_min(0.0) + rounding.MOMENT_REL**2 * (ratio + 1)
    spread = torch.fmin(near, far)  # a NaN or Inf of one leaves the other
    return spread.nan_to_num(nan=INF, posinf=INF).sqrt() / 2 * (1 + rounding.MOMENT_REL)


@cache
def cast_error(dtype: torch.dtype) -> tuple[float, float]:
    """Relative error of a cast to a dtype, and the absolute one of a number below its normal range."""
    kind = torch.finfo(dtype)
    return kind.eps, 2.0**-25 if dtype == torch.float16 else kind.smallest_normal


@dataclass
class Result:
    """What a read reports, ``[kv_heads, rows]`` each but ``out`` ``[kv_heads, rows, d_v]``; float64."""

    out: Tensor
    lse: Tensor
    meter: Tensor
    eform: Tensor
    risk: Tensor
    value_error: Tensor


def finish(part: Partial, tokens: int, sum_error: float, out_error: float, out_floor: float, small: float) -> Result:
    """Evaluate a merged partial.

    Args:
        tokens: most tokens that a row attended, for what underflow may have lost.
        sum_error: relative error of the tiles' weighted sums of v̂.
        out_error, out_floor: of casting the output, see :func:`cast_error`.
        small: absolute error of one weight below the working dtype's normal range.
    """
    mo = part.moments
    seen = mo.m != -INF
    part.bad |= seen & ~(mo.l.isfinite() & mo.m.isfinite() & (mo.l > 0))
    l = torch.where(seen, mo.l, 1.0)  # noqa: E741
    rise = mo.c_max.clamp_max(20).expm1()
    absolute = tokens * small * (1 + rise) ** 2 / l
    rounded = (part.zeta_max / 2).tanh() + tokens * small
    bound, eform = mo.meter(rounding.MOMENT_REL, absolute)
    if part.known is not None:
        known_bound, _ = part.known.meter(rounding.MOMENT_REL, absolute)
        bound = torch.minimum(bound, _relative_deviation(part) + known_bound)
    meter = ((bound + rounded) * (1 + 2.0**-20)).clamp_max(1.0)
    meter = torch.where(part.bad, 1.0, torch.where(seen, meter, 0.0))
    top = part.norm
    out = part.acc / l[..., None]
    mean_rho = part.rho / l
    value_error = 2 * meter * top + mean_rho * (1 + sum_error) + (sum_error + small * tokens) * top
    value_error = (value_error + out_error * (top + value_error) + out_floor * part.acc.shape[-1] ** 0.5) * (
        1 + 2.0**-20
    )
    value_error = torch.where(
        part.bad_v | value_error.isnan() | part.bad & (top == INF), INF, torch.where(seen, value_error, 0.0)
    )
    lse = torch.where(seen, mo.m + l.log(), -INF)
    risk = torch.where(seen, part.m_a + part.l_a.log() - lse, 0.0).clamp_min(0.0)
    return Result(
        out=torch.where(seen[..., None], out, 0.0),
        lse=lse,
        meter=meter,
        eform=torch.where(part.bad, INF, torch.where(seen, eform, 0.0)),
        risk=torch.where(part.bad, INF, risk),
        value_error=value_error,
    )
