"""Calibration: the equaliser, sketch directions and bypass pairs of a model, fitted on a text.

Soundness never depends on a calibration, only tightness does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table
from torch import Tensor

from witcert_kernels import LayerCalibration
from witcert_kernels.checks import check_integer, check_range
from witcert_kernels.layout import rope_pairs

from .capture import (
    Captured,
    CapturedLayer,
    ModelFingerprint,
    Progress,
    capture,
    layer_count,
    read_safetensors,
    traits,
    write_safetensors,
)
from .metering import StoreOptions, causal_read, fill
from .schemes import PackedScheme

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PARTS = ("mu", "f", "u", "bypass")
DIRECTIONS = 16
FLOOR = 2.0**-12
"""Least half-range, as a part of the head's largest: a channel that stood still in calibration may move when served."""

SKETCHES, BANDS, BYPASSES = (0, 1, 2, 4, 8, 16), (0, 1, 4), (0, 1, 2, 4)
SAMPLED_LAYERS, SAMPLED_ROWS, ROWS = 8, 32, 64
BLOCK = 8
TARGET = 0.9995


class CalibrationMetadata(BaseModel):
    """What a calibration was fitted to, and the store that was chosen with it.

    ``text_sha256`` is of the UTF-8 text, ``length`` the tokens of it that were used. ``sketch`` directions r,
    ``witness_bands`` B and ``bypass`` pairs m are what a store uses unless told otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    model: ModelFingerprint
    text_sha256: str
    length: int = Field(ge=1)
    sketch: int = Field(default=0, ge=0)
    witness_bands: int = Field(default=0, ge=0)
    bypass: int = Field(default=0, ge=0)


@dataclass(frozen=True)
class Calibration:
    """The calibration of all layers of one model.

    Attributes:
        fitted: of each layer, with all directions that were stored, best first.
        metadata: see :class:`CalibrationMetadata`.

    Raises:
        ValueError: the layers do not have what the metadata says, by name.
    """

    fitted: list[LayerCalibration]
    metadata: CalibrationMetadata

    def __post_init__(self) -> None:
        meta, model = self.metadata, self.metadata.model
        if len(self.fitted) != model.layers:
            raise ValueError(f"calibration: got {len(self.fitted)} layers, wants the {model.layers} of its model")
        for n, layer in enumerate(self.fitted):
            directions, pairs = layer.u.shape[1], layer.bypass.shape[1]
            if directions < meta.sketch:
                raise ValueError(f"sketch: got {meta.sketch}, wants at most the {directions} directions of layer {n}")
            if pairs != meta.bypass:
                raise ValueError(f"bypass: got {meta.bypass}, wants the {pairs} pairs of layer {n}")

    @cached_property
    def layers(self) -> list[LayerCalibration]:
        """Of each layer, with the chosen number of directions."""
        r = self.metadata.sketch
        return [replace(layer, u=layer.u[:, :r].contiguous()) for layer in self.fitted]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all layers as they are used, hexadecimal."""
        return hashlib.sha256("".join(layer.fingerprint for layer in self.layers).encode()).hexdigest()

    def with_sketch(self, sketch: int) -> Calibration:
        """The same calibration with another number of directions.

        Raises:
            TypeError, ValueError: no number of directions, or more than were stored.
        """
        check_integer("sketch", sketch, 0, min(layer.u.shape[1] for layer in self.fitted))
        return replace(self, metadata=self.metadata.model_copy(update={"sketch": sketch}))

    def check(self, model: PreTrainedModel | PreTrainedConfig | Captured | ModelFingerprint) -> None:
        """Refuse a model that the calibration was not fitted to. What the argument does not tell is not compared.

        Raises:
            ValueError: names what differs.
        """
        mine = self.metadata.model.model_dump()
        for name, value in traits(model).items():
            if mine[name] != value:
                raise ValueError(f"calibration.{name}: got {mine[name]}, wants the model's {value}")

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: ``layers.N.mu``, ``.f``, ``.u``, ``.bypass`` and the metadata."""
        tensors = {
            f"layers.{n}.{name}": getattr(layer, name).contiguous()
            for n, layer in enumerate(self.fitted)
            for name in PARTS
        }
        metadata = {k: v.model_dump_json() if isinstance(v, BaseModel) else str(v) for k, v in self.metadata}
        write_safetensors(tensors, path, metadata)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file that :meth:`save` wrote.

        Raises:
            OSError: no such file, or not safetensors.
            TypeError, ValueError: a tensor or a metadata field that is missing or wrong, by name.
        """
        strings, tensors = read_safetensors(path)
        values: dict[str, Any] = dict(strings)
        if "format_version" not in values:
            raise ValueError(f"format_version: got none in {path}, wants 1: this is not a calibration file")
        if values["format_version"] != "1":
            raise ValueError(f"format_version: got {values['format_version']} in {path}, wants 1")
        values["format_version"] = 1
        if "model" in values:
            values["model"] = ModelFingerprint.model_validate_json(values["model"])
        metadata = CalibrationMetadata.model_validate(values)
        fitted = []
        for n in range(layer_count(tensors, PARTS)):
            mu, f, u, bypass = (tensors[f"layers.{n}.{name}"] for name in PARTS)
            fitted.append(LayerCalibration(mu, f, u, bypass, metadata.model.rope_layout, metadata.model.rotary_dim))
        return cls(fitted, metadata)


@cache
def default() -> Calibration:
    """The calibration of SmolLM2-135M-Instruct in float32 that ships with the package."""
    with as_file(files("witcert") / "data" / "smollm2.safetensors") as path:
        return Calibration.load(path)


def default_for(model: PreTrainedModel | Captured | ModelFingerprint) -> Calibration | None:
    """The shipped calibration if it was fitted to this very model, else None."""
    calibration = default()
    return calibration if traits(model) == calibration.metadata.model.model_dump() else None


def fit(
    captured: Captured, *, bypass: int = 0, directions: int = DIRECTIONS, equalizer: bool = True
) -> list[LayerCalibration]:
    """Fit every layer to captured tensors.

    μ is the mid-range of a channel, f the larger half-range of a RoPE pair. The directions are the uncentred principal
    directions of z = q∘f over all queries of a kv head's group. Bypass pairs are taken one by one, each the one without
    which the mean half-step bound is smallest: the mean largest |x| of a token times the mean ‖z‖₁ of a query.

    Args:
        captured: keys of at least one token, query rows to fit the directions to.
        bypass: pairs m of each kv head.
        directions: most directions to keep, fewer where a head has fewer channels left.
        equalizer: False for μ = 0 and f = 1.

    Raises:
        TypeError, ValueError: an argument of another type or out of range, or a captured tensor that is not finite, by
            name.
    """
    check_integer("directions", directions, 0, 2**16)
    return [_fit_layer(layer, captured, bypass, directions, equalizer) for layer in captured.layers]


def _fit_layer(
    layer: CapturedLayer, captured: Captured, bypass: int, directions: int, equalizer: bool
) -> LayerCalibration:
    for name in ("q", "k"):
        if not bool(getattr(layer, name).isfinite().all()):
            raise ValueError(f"{layer.name}.{name}: got a value that is not finite, wants finite ones")
    meta = captured.metadata
    k = layer.k.to(torch.float64)
    _, kv_heads, d = k.shape
    check_integer("bypass", bypass, 0, d // 2 - 1)
    q = layer.q.to(torch.float64).unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)  # [kv_heads, rows, d]
    pairs = rope_pairs(d, meta.rope_layout, meta.rotary_dim)
    mu, f = _equalizer(k, pairs) if equalizer else (torch.zeros(kv_heads, d), torch.ones(kv_heads, d))
    x, z = (k - mu) / f, q * f[:, None, :]
    chosen = _bypass_pairs(x[:, :, pairs].abs().amax(-1), z[:, :, pairs].abs().sum(-1).mean(1), bypass)
    mask = torch.zeros(kv_heads, d, dtype=torch.bool).scatter_(1, pairs[chosen].flatten(1), True)
    return LayerCalibration(
        mu=mu.masked_fill(mask, 0.0).to(torch.float32),
        f=f.masked_fill(mask, 1.0).to(torch.float32),
        u=_principal_directions(z, mask, directions).to(torch.float32),
        bypass=chosen,
        rope_layout=meta.rope_layout,
        rotary_dim=meta.rotary_dim,
    )


def _equalizer(k: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Mid-range and half-range of keys float64 ``[tokens, kv_heads, d]``, ``[kv_heads, d]`` each."""
    low, high = k.amin(0), k.amax(0)
    half = (high - low)[:, pairs].amax(-1) / 2  # [kv_heads, pairs]
    largest = half.amax(-1, keepdim=True)
    half = torch.where(largest > 0, half.maximum(FLOOR * largest), 1.0)
    f = torch.empty_like(low)
    f[:, pairs[:, 0]] = f[:, pairs[:, 1]] = half
    return (low + high) / 2, f


def _principal_directions(z: Tensor, mask: Tensor, count: int) -> Tensor:
    """Of z ``[kv_heads, rows, d]``: orthonormal, strongest first, 0 on ``mask``, ``[kv_heads, count or fewer, d]``."""
    kept = (~mask).nonzero()[:, 1].view(len(z), -1)
    part = z.gather(-1, kept[:, None, :].expand(-1, z.shape[1], -1))
    _, vectors = torch.linalg.eigh(part.transpose(1, 2) @ part)
    v = vectors.transpose(1, 2).flip(1)[:, :count]
    v = v * v.gather(-1, v.abs().argmax(-1, keepdim=True)).sign()
    return torch.zeros(*v.shape[:2], z.shape[-1], dtype=z.dtype).scatter_(-1, kept[:, None, :].expand_as(v), v)


def _bypass_pairs(size: Tensor, weight: Tensor, count: int) -> Tensor:
    """Pairs to bypass, int64 ``[kv_heads, count]``, greedily.

    size ``[tokens, kv_heads, pairs]``: largest |x| of a pair. weight ``[kv_heads, pairs]``: mean |z|₁ of a pair.
    """
    size, weight = size.clone(), weight.clone()
    chosen: list[Tensor] = []
    for _ in range(count):
        top = size.topk(2, dim=-1)
        gain = (top.values[..., 0] - top.values[..., 1]) / len(size)  # what a token's scale loses with its largest pair
        without = top.values[..., 0].mean(0)[:, None].expand_as(weight).clone()
        without.scatter_add_(1, top.indices[..., 0].T, -gain.T)
        bound = without * (weight.sum(-1, keepdim=True) - weight)
        for done in chosen:
            bound.scatter_(1, done, torch.inf)
        best = bound.argmin(-1, keepdim=True)
        chosen.append(best)
        size.scatter_(2, best.expand(len(size), -1, 1), 0.0)
        weight.scatter_(1, best, 0.0)
    return torch.cat(chosen, 1) if chosen else torch.empty(len(weight), 0, dtype=torch.int64)


class Candidate(BaseModel):
    """A store to choose: r directions, B bands, m pairs, what they add to a token of a kv head, what it reached."""

    sketch: int
    witness_bands: int
    bypass: int
    extra_bytes: int
    cells: int
    coverage: float
    meter_median: float


class TradeOff(BaseModel):
    """All candidates by bytes, and the choice; ``held_out`` says that it was made on other text than the fit."""

    tau: float
    target: float
    held_out: bool
    reached: bool
    chosen: Candidate
    candidates: list[Candidate]

    def frontier(self) -> list[Candidate]:
        """Candidates that none with at most as many bytes matches in both coverage and median meter, and the choice."""
        front: list[Candidate] = []
        for c in self.candidates:
            if c == self.chosen or all(c.coverage > o.coverage or c.meter_median < o.meter_median for o in front):
                front.append(c)
        return front


def choose(
    fits: dict[int, list[LayerCalibration]],
    captured: Captured,
    *,
    tau: float = 0.2,
    target: float = TARGET,
    held_out: bool = False,
    progress: Progress | None = None,
) -> TradeOff:
    """Find the fewest bytes whose coverage at τ reaches a target, by writing and reading the int8 store.

    Every candidate is read at 32 query rows in at most 8 layers. Those that reach the target there are then read,
    fewest bytes first, at 64 rows in all layers, until one reaches it again: that is the choice. If none does, it is
    the candidate with the largest coverage. The rows are runs of 8, spread evenly over the text.

    Args:
        fits: a fit for each number of bypass pairs.
        captured: tensors to choose on.
        tau, target: threshold of the meter, and the part of the cells that must not exceed it. The default target reads
            1.000 when rounded to three digits.
        held_out: whether ``captured`` is other text than the fit's, for the record.
        progress: called with ``"choose"``, candidates done and candidates.

    Raises:
        ValueError: τ or the target out of range, by name.
    """
    check_range("tau", tau, 0.0, float("inf"), open_low=True)
    check_range("target", target, 0.0, 1.0, open_low=True)
    options = _candidates(fits, captured)
    count = len(captured.layers)
    sample = sorted({i * count // SAMPLED_LAYERS for i in range(SAMPLED_LAYERS)})
    found = []
    for done, option in enumerate(options):
        found.append(_try(option, fits, captured, sample, SAMPLED_ROWS, tau))
        if progress is not None:
            progress("choose", done + 1, len(options))
    found.sort(key=lambda c: (c.extra_bytes, -c.coverage, c.meter_median))
    reached = None
    for i, candidate in enumerate(found):
        if candidate.coverage >= target:
            found[i] = _try(candidate, fits, captured, range(count), ROWS, tau)
            if found[i].coverage >= target:
                reached = found[i]
                break
    best = reached or max(found, key=lambda c: (c.coverage, -c.extra_bytes))
    return TradeOff(
        tau=tau, target=target, held_out=held_out, reached=reached is not None, chosen=best, candidates=found
    )


def _candidates(fits: dict[int, list[LayerCalibration]], captured: Captured) -> list[Candidate]:
    """Everything that the model's heads have room for."""
    out = []
    itemsize, pairs = captured.layers[0].k.dtype.itemsize, min(layer.k.shape[2] for layer in captured.layers) // 2
    for m, layers in fits.items():
        available = min(layer.u.shape[1] for layer in layers)
        for r in (r for r in SKETCHES if r <= available):
            for b in (b for b in BANDS if b <= pairs):
                size = r + b + 2 * m * itemsize
                out.append(
                    Candidate(
                        sketch=r, witness_bands=b, bypass=m, extra_bytes=size, cells=0, coverage=0.0, meter_median=1.0
                    )
                )
    return out


def _try(
    option: Candidate,
    fits: dict[int, list[LayerCalibration]],
    captured: Captured,
    layers: Iterable[int],
    rows: int,
    tau: float,
) -> Candidate:
    """The option with what it reached."""
    meta = captured.metadata
    options = StoreOptions(PackedScheme("int8"), option.sketch, option.witness_bands, None, 64, meta)
    meters = []
    for n in layers:
        layer = captured.layers[n]
        store = fill(layer, n, options, fits[option.bypass][n], backing=False)
        steps = len(layer.q)
        size = min(BLOCK, steps)
        blocks = max(1, min(rows, steps) // size)
        for stop in (steps * i // blocks for i in range(1, blocks + 1)):
            _, _, certificate = causal_read(store, layer, meta, stop - size, stop).run()
            meters.append(certificate.meter.flatten())
    meter = torch.cat(meters)
    reached = {
        "cells": len(meter),
        "coverage": int((meter <= tau).sum()) / len(meter),
        "meter_median": float(meter.median()),
    }
    return option.model_copy(update=reached)


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    length: int = 2048,
    tau: float = 0.2,
    target: float = TARGET,
    directions: int = DIRECTIONS,
    progress: Progress | None = None,
) -> tuple[Calibration, TradeOff]:
    """Fit a calibration to a text's first tokens and choose sketch, witness and bypass on the following ones.

    The choice is made on the next ``length`` tokens, a sequence of their own, which the fit has not seen. Where the
    text has fewer, it is made on the fit's own tokens, and the trade-off says so.

    Args:
        model, tokenizer: a local transformers model.
        text: what to fit to; like what will be served, at the length that will be served.
        length: tokens to fit to.
        tau, target: see :func:`choose`.
        directions: most directions to fit and keep.
        progress: called with a stage (``"capture"``, ``"fit"``, ``"choose"``), how much is done, and of how much.

    Raises:
        TypeError, ValueError: a text that is too short, an argument of another type or out of range, or a model that
            cannot be captured, by name.
    """
    check_integer("length", length, 2)
    ids: list[int] = tokenizer(text)["input_ids"]
    prefix = ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []
    if len(ids) < length:
        raise ValueError(f"text: got {len(ids)} tokens, wants at least length, {length}")
    captured = capture(model, torch.tensor(ids[:length]), progress=progress)
    limit = min(layer.k.shape[2] // 2 - 1 for layer in captured.layers)
    pairs = [m for m in BYPASSES if m <= limit]
    fits = {}
    for done, m in enumerate(pairs):
        fits[m] = fit(captured, bypass=m, directions=directions)
        if progress is not None:
            progress("fit", done + 1, len(pairs))
    rest = prefix + ids[length : 2 * length - len(prefix)]
    held_out = len(rest) == length
    if held_out:
        captured = capture(model, torch.tensor(rest), progress=progress)
    trade_off = choose(fits, captured, tau=tau, target=target, held_out=held_out, progress=progress)
    assert captured.metadata.fingerprint is not None
    metadata = CalibrationMetadata(
        model=captured.metadata.fingerprint,
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        length=length,
        sketch=trade_off.chosen.sketch,
        witness_bands=trade_off.chosen.witness_bands,
        bypass=trade_off.chosen.bypass,
    )
    return Calibration(fits[trade_off.chosen.bypass], metadata), trade_off


def table(trade_off: TradeOff) -> Table:
    """The trade-off's frontier, the choice in bold."""
    where = "held-out text" if trade_off.held_out else "the text it was fitted to"
    grid = Table(header_style="bold", caption=f"int8, on {where}; extra bytes are per token and kv head")
    coverage = f"coverage τ={trade_off.tau:g}"
    for name in ("sketch r", "witness B", "bypass m", "extra bytes", coverage, "median meter", "cells"):
        grid.add_column(name, justify="right")
    for c in trade_off.frontier():
        row: Sequence[object] = (c.sketch, c.witness_bands, c.bypass, c.extra_bytes)
        style = "bold" if c == trade_off.chosen else None
        grid.add_row(*map(str, row), f"{c.coverage:.4f}", f"{c.meter_median:.3f}", str(c.cells), style=style)
    return grid
