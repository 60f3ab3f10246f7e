"""Planted bugs about the writer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapter import Account, Array, Mask
from ..twin import Twin
from ..twin.writer import TINY, TwinStore, half_up
from .registry import mutant


@mutant("residual_within_half_step")
class QuantisesWithTheFloatScale(Twin):
    """Codes are counted in the fp32 scale, the fp16 one is stored."""

    def code_step(self, store: TwinStore, step: Array, x: Array, k: Array) -> Array:
        groups = x.shape[-1] // max(1, int(np.unique(step[0, 0]).size)) if len(x) else x.shape[-1]
        amax = np.abs(x).reshape(*x.shape[:-1], -1, groups).max(-1)
        return np.maximum(amax / 127, TINY).repeat(groups, -1)


@mutant("scale_covers_amax")
class RoundsTheScaleToNearest(Twin):
    """The scale is rounded to the nearest fp16 number."""

    def round_scale(self, scale: Array) -> Array:
        return np.maximum(scale.astype(np.float16), np.float16(TINY))


@mutant("residual_within_half_step")
class ClipsAt126(Twin):
    """Codes are clipped at ±126."""

    def to_int8(self, codes: Array) -> Array:
        return np.clip(codes, -126, 126)


@mutant("residual_within_half_step")
class StoreTruncates(Twin):
    """The float goes to int8 by an implicit store, which truncates toward zero."""

    def round_codes(self, store: TwinStore, ratio: Array, xi: Array) -> Array:
        return ratio + xi


@mutant("residual_within_half_step")
class WriterClips(Twin):
    """The scale follows the 90th percentile and outliers saturate."""

    def key_scale(self, store: TwinStore, x: Array, k: Array, lost: Mask) -> Array:
        return self.round_scale(super().key_scale(store, x, k, lost).astype(np.float64) * 0.9)

    def to_int8(self, codes: Array) -> Array:
        return np.clip(codes, -127, 127)


@mutant("groups_have_their_own_scale")
class FirstGroupScalesAll(Twin):
    """All channel groups are quantised with the first group's scale."""

    def code_step(self, store: TwinStore, step: Array, x: Array, k: Array) -> Array:
        return np.broadcast_to(step[..., :1], step.shape)


@mutant("zero_groups_have_a_scale")
class ZeroGroupDividesByZero(Twin):
    """A group of zeros gets scale 0, and codes 0/0."""

    def round_scale(self, scale: Array) -> Array:
        return half_up(scale)


@mutant("writer_is_a_pure_function")
class PrefillRoundsHalfUp(Twin):
    """Prefill rounds ties up, decode rounds them to even."""

    def round_codes(self, store: TwinStore, ratio: Array, xi: Array) -> Array:
        return np.floor(ratio + xi + 0.5) if len(ratio) > 1 else np.rint(ratio + xi)


@mutant("values_within_half_step")
class ValuesTruncate(Twin):
    """Value codes are truncated toward zero."""

    def round_values(self, store: TwinStore, ratio: Array) -> Array:
        return np.trunc(ratio)


@mutant("dequantize_is_what_is_stored")
class DequantizeForgetsMu(Twin):
    """``dequantize`` leaves the equaliser's mid-range out."""

    def dequantize(self, store: TwinStore) -> tuple[Array, Array]:
        k, v = super().dequantize(store)
        return k - store.calibration.mu * (1 - self._bypassed(store)), v


@mutant("byte_account_is_measured")
class AccountForgetsTheScale(Twin):
    """The byte account leaves the scales out."""

    def account(self, store: TwinStore) -> Account:
        full = super().account(store)
        return replace(full, key=full.key - 2 * store.layout.groups)


@mutant("residual_within_half_step", path=())
class TailOfACallDividesInHalfPrecision(Twin):
    """Calls of 49 to 63 tokens, a tile that is not full, form the quotient in float16."""

    def round_codes(self, store: TwinStore, ratio: Array, xi: Array) -> Array:
        return super().round_codes(store, ratio.astype(np.float16) if 48 < len(ratio) < 64 else ratio, xi)


@mutant("groups_have_their_own_scale", path=("groups",))
class GroupsMultiplyByTheReciprocal(Twin):
    """With channel groups, keys are multiplied by the scale's reciprocal in float16."""

    def code_step(self, store: TwinStore, step: Array, x: Array, k: Array) -> Array:
        with np.errstate(over="ignore"):
            reciprocal = (1 / step).astype(np.float16).astype(np.float64)
        return np.where(np.isfinite(reciprocal) & (reciprocal > 0), 1 / np.maximum(reciprocal, TINY), step)


@mutant("scale_covers_amax", path=())
class PlainScaleIsNotRoundedUp(Twin):
    """Without options a scale is rounded to the nearest fp16 number, but for subnormal ones."""

    def key_scale(self, store: TwinStore, x: Array, k: Array, lost: Mask) -> Array:
        scale = np.abs(x).max(-1, keepdims=True) / 127
        with np.errstate(over="ignore"):
            return np.where(scale < 2.0**-14, super().key_scale(store, x, k, lost), scale.astype(np.float16))


@mutant("zero_groups_have_a_scale", path=())
class ZeroKeyHasNoScale(Twin):
    """A key of zeros gets scale 0."""

    def key_scale(self, store: TwinStore, x: Array, k: Array, lost: Mask) -> Array:
        return half_up(np.abs(x).max(-1, keepdims=True) / 127)


@mutant("writer_is_a_pure_function", path=())
class LongCallsRoundHalfUp(Twin):
    """Calls of more than 48 tokens round ties up, shorter ones to even."""

    def round_codes(self, store: TwinStore, ratio: Array, xi: Array) -> Array:
        return np.floor(ratio + 0.5) if len(ratio) > 48 else super().round_codes(store, ratio, xi)


@mutant("values_within_half_step", path=())
class ValuesDivideInHalfPrecision(Twin):
    """The quotient of a value and its scale is formed in float16."""

    def round_values(self, store: TwinStore, ratio: Array) -> Array:
        return super().round_values(store, ratio.astype(np.float16).astype(np.float64))
