"""Planted bugs that report a certificate which is known to be false."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Array, Mask
from ..twin import Twin
from ..twin.reader import Part, Query
from .registry import mutant


@mutant("dispersion_form_is_refuted", path=())
class EqualBoundsHaveNoDispersion(Twin):
    """The kernel tuned for 130 to 499 tokens reports the spread of c, which vanishes where all bounds are equal."""

    def report_meter(self, query: Query, meter: Array, part: Part) -> Array:
        if not 130 <= query.read.seq_lens[query.b] <= 499:
            return meter
        safe = np.maximum(part.moments.l, 1e-300)
        with np.errstate(all="ignore"):
            a1 = part.moments.a1 / safe
            sigma = np.sqrt(np.maximum(part.moments.a2 / safe - np.square(a1), 0))
            spread = np.exp(2 * part.moments.c_max) * (sigma + a1 * np.expm1(part.moments.c_max)) / 2
        return np.fmin(meter, spread)


@mutant("variance_averaged_form_is_refuted", path=())
class LargeBoundsAreAveraged(Twin):
    """For two tokens and bounds beyond 19, squared bounds are averaged before the exponential."""

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
        part = super().part(query, y, c, allowed, v_hat, rho, known)
        p = np.exp(np.where(allowed, y - part.moments.m[:, None], -np.inf))
        mean = np.sqrt((p * np.square(np.where(allowed, c, 0))).sum(1) / np.maximum(part.moments.l, 1e-300))
        rise = np.expm1(np.minimum(mean, 300))
        averaged = replace(part.moments, a1=part.moments.l * rise, a2=part.moments.l * rise**2, c_max=mean)
        large = (c.max(1, initial=0) > 19) & (allowed.sum(1) == 2)
        one = {n: np.where(large, getattr(averaged, n), getattr(part.moments, n)) for n in ("a1", "a2", "c_max")}
        return replace(part, moments=replace(part.moments, **one))
