"""The ops: flat ``torch.ops.witcert.*`` schemas with fake kernels, and the functions that call them with a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from operator import add
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import reader, writer
from .backend import use_numba, use_triton
from .budget import Budget
from .checks import check_contiguous, check_flag, check_integer, check_range, check_tensor
from .layout import MODEL_DTYPES
from .library import fake, op
from .plan import Plan
from .pool import ObservatoryPool, PackedPool
from .precision import full_precision
from .telemetry import Telemetry, count_

Guarantee = Literal["any_query", "fixed_trajectory"]


@dataclass(frozen=True)
class Certificate:
    """What a decode reports besides its output, a query row and head each.

    Attributes:
        meter: float32 ``[rows, heads]``, proved upper bound of the total variation, in [0, 1].
        eform: float32, upper bound of the paper's ``½ (A² − 1)``; may exceed 1.
        risk: float32, ``log A``; ranks what the meter no longer tells apart.
        value_error: float32, upper bound of ‖y − ŷ‖ in the units of v, the output's rounding included.
        compressed: int32, compressed tokens that were attended.
        shares: float32 ``[batch, kv_heads, max_pages]``, the largest share of A − 1 that a page has in any query row of
            the kv head; empty unless asked for.
        guarantee: ``"any_query"``, or ``"fixed_trajectory"`` where the radius was on offer (Tier B).
    """

    meter: Tensor
    eform: Tensor
    risk: Tensor
    value_error: Tensor
    compressed: Tensor
    shares: Tensor
    guarantee: Guarantee


@op(
    "quantize_packed_",
    mutates_args=("k_codes", "k_scale", "sketch", "witness", "bypass", "v_codes", "v_scale", "v_norm"),
)
def _quantize_packed(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    sketch: Tensor,
    witness: Tensor,
    bypass: Tensor,
    v_codes: Tensor,
    v_scale: Tensor,
    v_norm: Tensor,
    mu: Tensor,
    f: Tensor,
    u: Tensor,
    bypass_channels: Tensor,
    band_of_channel: Tensor,
    dither: bool,
    dither_period: int,
    seed: int,
    layer: int,
) -> None:
    arguments = (
        k, v, slots, positions, k_codes, k_scale, sketch, witness, bypass, v_codes, v_scale, v_norm, mu, f, u,
        bypass_channels, band_of_channel, dither, dither_period, seed % 2**64, layer,
    )  # fmt: skip
    if use_triton(k.device):
        from . import triton_writer

        written = (k_codes, k_scale, sketch, witness, bypass, v_codes, v_scale, v_norm)
        check_contiguous("pool", dict(zip(PackedPool.page_tensors, written, strict=True)))
        triton_writer.write_packed(*arguments)
    elif use_numba(k.device):
        from . import fused_writer

        fused_writer.write_packed(*arguments)
    else:
        with full_precision(k.device):
            writer.write_packed(*arguments)


@op(
    "observe_",
    mutates_args=("k_hat", "witness", "sketch", "sketch_scale", "v_hat", "v_error", "v_norm"),
)
def _observe(
    k: Tensor,
    v: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    slots: Tensor,
    k_hat: Tensor,
    witness: Tensor,
    sketch: Tensor,
    sketch_scale: Tensor,
    v_hat: Tensor,
    v_error: Tensor,
    v_norm: Tensor,
    f: Tensor,
    u: Tensor,
    band_of_channel: Tensor,
) -> None:
    arguments = (
        k, v, k_new, v_new, slots, k_hat, witness, sketch, sketch_scale, v_hat, v_error, v_norm, f, u, band_of_channel,
    )  # fmt: skip
    if use_triton(k.device):
        from . import triton_writer

        triton_writer.write_observatory(*arguments)
    else:
        with full_precision(k.device):
            writer.write_observatory(*arguments)


_OUTPUTS = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _counted(outputs: tuple[Tensor, ...], telemetry: Tensor | None, layer: int) -> _OUTPUTS:
    """The outputs of a read that knows no telemetry, after their cells are counted."""
    if telemetry is not None:
        _, _, meter, _, risk, value_error, compressed, _ = outputs
        count_(telemetry, meter, risk, value_error, compressed, layer)
    return outputs  # type: ignore[return-value]


def _bind(function: Callable[..., Any], *args: Any, **options: Any) -> dict[str, Any]:
    """The arguments of a call of an op by their names."""
    return dict(zip(signature(function).parameters, args, strict=False)) | options


def _fake_outputs(q: Tensor, exact_v: Tensor, page_table: Tensor, kv_heads: int, want_shares: bool) -> _OUTPUTS:
    rows, heads, _ = q.shape
    columns = [q.new_empty(rows, heads, dtype=torch.float32) for _ in range(5)]
    shares = q.new_empty(len(page_table), kv_heads, page_table.shape[1] if want_shares else 0, dtype=torch.float32)
    compressed = q.new_empty(rows, heads, dtype=torch.int32)
    return (q.new_empty(rows, heads, exact_v.shape[-1]), *columns, compressed, shares)  # type: ignore[return-value]


@op("decode_packed", mutates_args=("workspace", "telemetry"))
def _decode_packed(
    q: Tensor,
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
    k_codes: Tensor,
    k_scale: Tensor,
    sketch: Tensor,
    witness: Tensor,
    bypass: Tensor,
    v_codes: Tensor,
    v_scale: Tensor,
    v_norm: Tensor,
    mu: Tensor,
    f: Tensor,
    u: Tensor,
    bypass_channels: Tensor,
    band_of_channel: Tensor,
    dither: bool,
    dither_period: int,
    seed: int,
    layer: int,
    causal: bool,
    sm_scale: float,
    cap: float,
    window_left: int,
    delta_local: float,
    splits: int,
    want_shares: bool,
    workspace: Tensor | None = None,
    digits: int = 3,
    telemetry: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = {
        "k_codes": k_codes, "k_scale": k_scale, "sketch": sketch, "witness": witness, "bypass": bypass,
        "v_codes": v_codes, "v_scale": v_scale, "v_norm": v_norm, "mu": mu, "f": f, "u": u,
        "bypass_channels": bypass_channels, "band_of_channel": band_of_channel,
    }  # fmt: skip
    scalars = {"dither": int(dither), "dither_period": dither_period, "seed": seed % 2**64, "layer": layer}
    common = (q, page_table, seq_lens, qo_indptr, k_new, v_new, exact_pages, exact_k, exact_v, sinks, bias)
    options: dict[str, Any] = {
        "causal": causal, "sm_scale": sm_scale, "cap": cap, "window_left": window_left, "delta_local": delta_local,
        "splits": splits,
    }  # fmt: skip
    if use_triton(q.device) and not want_shares:
        from . import triton_reader

        check_contiguous("pool", tensors | {"exact.k": exact_k, "exact.v": exact_v})
        return triton_reader.decode_packed(
            *common,
            tensors=tensors,
            scalars=scalars,
            workspace=workspace,
            digits=digits,
            telemetry=telemetry,
            **options,
        )
    packed = reader.PackedReader(tensors, scalars)

    def read() -> tuple[Tensor, ...]:
        with full_precision(q.device):
            return reader.decode(common[0], packed, *common[1:], want_shares=want_shares, **options)

    plain = k_new is None and sinks is None and bias is None and cap == 0 and splits <= 1
    if not plain or not use_numba(q.device):
        return _counted(read(), telemetry, layer)
    from . import fused

    outputs = fused.decode(
        q, packed, page_table, seq_lens, qo_indptr, exact_pages, read,
        causal=causal, sm_scale=sm_scale, window_left=window_left, delta_local=delta_local, want_shares=want_shares,
    )  # fmt: skip
    return _counted(outputs, telemetry, layer)


@fake("decode_packed")
def _(q, page_table, *rest, **options):  # type: ignore[no-untyped-def]
    given = _bind(_decode_packed, q, page_table, *rest, **options)
    return _fake_outputs(q, given["exact_v"], page_table, given["k_codes"].shape[2], given["want_shares"])


@op("decode_observatory", mutates_args=("workspace", "telemetry"))
def _decode_observatory(
    q: Tensor,
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
    k_hat: Tensor,
    witness: Tensor,
    sketch: Tensor,
    sketch_scale: Tensor,
    v_hat: Tensor,
    v_error: Tensor,
    v_norm: Tensor,
    f: Tensor,
    u: Tensor,
    band_of_channel: Tensor,
    causal: bool,
    sm_scale: float,
    cap: float,
    window_left: int,
    splits: int,
    want_shares: bool,
    workspace: Tensor | None = None,
    telemetry: Tensor | None = None,
    layer: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = {
        "k_hat": k_hat, "witness": witness, "sketch": sketch, "sketch_scale": sketch_scale, "v_hat": v_hat,
        "v_error": v_error, "v_norm": v_norm, "f": f, "u": u, "band_of_channel": band_of_channel,
    }  # fmt: skip
    common = (q, page_table, seq_lens, qo_indptr, k_new, v_new, exact_pages, exact_k, exact_v, sinks, bias)
    options: dict[str, Any] = {
        "causal": causal, "sm_scale": sm_scale, "cap": cap, "window_left": window_left, "splits": splits,
    }  # fmt: skip
    if use_triton(q.device) and not want_shares:
        from . import triton_reader

        check_contiguous("pool", tensors | {"exact.k": exact_k, "exact.v": exact_v})
        return triton_reader.decode_observatory(
            *common, tensors=tensors, workspace=workspace, telemetry=telemetry, layer=layer, **options
        )
    observatory = reader.ObservatoryReader(tensors)
    with full_precision(q.device):
        outputs = reader.decode(
            common[0], observatory, *common[1:], delta_local=0.0, want_shares=want_shares, **options
        )
    return _counted(outputs, telemetry, layer)


@fake("decode_observatory")
def _(q, page_table, *rest, **options):  # type: ignore[no-untyped-def]
    given = _bind(_decode_observatory, q, page_table, *rest, **options)
    return _fake_outputs(q, given["exact_v"], page_table, given["k_hat"].shape[2], given["want_shares"])


def _check_write(
    pool: PackedPool | ObservatoryPool, slots: Tensor, named: dict[str, Tensor], dtypes: tuple[torch.dtype, ...]
) -> None:
    layout, device = pool.layout, pool.device
    check_tensor("slots", slots, (None,), torch.int64, device)
    n = len(slots)
    for name, tensor in named.items():
        width = layout.head_dim_v if name.startswith("v") else layout.head_dim
        check_tensor(name, tensor, (n, layout.kv_heads, width), dtypes, device)
    if device.type == "cpu" and n and not torch.compiler.is_compiling():
        numbers, capacity = np.sort(slots.numpy()), pool.num_pages * layout.page_size
        if numbers[-1] >= capacity or numbers[0] < 0:
            raise ValueError(f"slots: got {numbers[0]}..{numbers[-1]}, wants 0..{capacity - 1}")
        if (numbers[1:] == numbers[:-1]).any():
            raise ValueError("slots: got a slot twice, wants each once")


def quantize_(k: Tensor, v: Tensor, pool: PackedPool, slots: Tensor, positions: Tensor | None = None) -> None:
    """Quantise tokens and write them into a packed pool.

    The bytes are a pure function of the key and value, the calibration and, for a dithered store, of the seed, layer,
    kv head and position. A key that is not finite is stored as zeros with an infinite scale.

    Args:
        k, v: ``[n, kv_heads, head_dim]`` and ``[n, kv_heads, head_dim_v]`` in the layout's dtype.
        pool: the store.
        slots: int64 ``[n]``, page · page_size + offset, each once.
        positions: int64 ``[n]``, logical positions (padding not counted); needed for a dithered store.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or range, by name, before anything is written.

    Lean: ``WitCert.abs_residual_le``, ``WitCert.abs_dequantize_sub_le``.
    """
    if not isinstance(pool, PackedPool):
        raise TypeError(f"pool: got {type(pool).__name__}, wants a PackedPool")
    layout, calibration = pool.layout, pool.calibration
    _check_write(pool, slots, {"k": k, "v": v}, (layout.dtype,))
    if positions is None:
        if layout.dither:
            raise ValueError("positions: got None, wants int64 [n] logical positions for a dithered store")
        positions = torch.zeros_like(slots)
    check_tensor("positions", positions, tuple(slots.shape), torch.int64, pool.device)
    if pool.device.type == "cpu" and not torch.compiler.is_compiling() and bool((positions < 0).any()):
        raise ValueError(f"positions: got {int(positions.min())}, wants numbers from 0 on")
    torch.ops.witcert.quantize_packed_(
        k, v, slots, positions, pool.k_codes, pool.k_scale, pool.sketch, pool.witness, pool.bypass, pool.v_codes,
        pool.v_scale, pool.v_norm, calibration.mu, calibration.f, calibration.u, pool.bypass_channels,
        pool.band_of_channel, layout.dither, layout.dither_period, _signed(pool.seed), pool.layer,
    )  # fmt: skip


def observe_(k: Tensor, v: Tensor, k_hat: Tensor, v_hat: Tensor, pool: ObservatoryPool, slots: Tensor) -> None:
    """Write a scheme's reconstructions into an observatory, with the witness of what they lost (paper section 4.1).

    The residual is that of the stored 16-bit number. Reconstructions that are not finite are stored as zeros with an
    infinite witness.

    Args:
        k, v: exact keys and values, ``[n, kv_heads, head_dim]`` and ``[n, kv_heads, head_dim_v]`` in the layout's
            dtype.
        k_hat, v_hat: reconstructions of the same shapes, any model dtype.
        pool: the observatory.
        slots: int64 ``[n]``, page · page_size + offset, each once.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or range, by name, before anything is written.
    """
    if not isinstance(pool, ObservatoryPool):
        raise TypeError(f"pool: got {type(pool).__name__}, wants an ObservatoryPool")
    _check_write(pool, slots, {"k": k, "v": v}, (pool.layout.dtype,))
    _check_write(pool, slots, {"k_hat": k_hat, "v_hat": v_hat}, MODEL_DTYPES)
    torch.ops.witcert.observe_(
        k, v, k_hat, v_hat, slots, pool.k_hat, pool.witness, pool.sketch, pool.sketch_scale, pool.v_hat, pool.v_error,
        pool.v_norm, pool.calibration.f, pool.calibration.u, pool.band_of_channel,
    )  # fmt: skip


def _signed(seed: int) -> int:
    """A 64-bit key as the signed integer that an op's schema can carry."""
    return seed - 2**64 if seed >= 2**63 else seed


def certified_decode(
    q: Tensor,
    pool: PackedPool | ObservatoryPool,
    page_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    causal: bool = True,
    exact_pages: Tensor | None = None,
    *,
    sm_scale: float | None = None,
    sinks: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    bias: Tensor | None = None,
    budget: Budget | None = None,
    splits: int | None = None,
    return_shares: bool = False,
    plan: Plan | None = None,
    telemetry: Telemetry | None = None,
) -> tuple[Tensor, Tensor, Certificate]:
    """Attention over a compressed, paged KV cache, with a proved bound on what the compression did to it.

    Args:
        q: ``[rows, heads, head_dim]`` in the model's dtype, heads a multiple of kv_heads.
        pool: the layer's store.
        page_table: int32 ``[batch, max_pages]``.
        seq_lens: int32 ``[batch]``, tokens that each sequence reads from the pool.
        qo_indptr: int32 ``[batch + 1]``, first query row of each sequence; None for one row each.
        k_new, v_new: ``[rows, kv_heads, head_dim]`` and ``[…, head_dim_v]``, the rows' own chunk, exact; it follows the
            pool's tokens. None: the rows are the last ones of what the pool holds.
        causal: row i attends to no token after its own.
        exact_pages: int32 ``[batch, kv_heads, max_pages]``, −1, or a slot of ``pool.exact`` that replaces the page.
        sm_scale: scale of the logits, default ``head_dim ** -0.5``.
        sinks: float ``[heads]``, logits of a token with value 0 in each head's denominator.
        logits_soft_cap: cap κ of κ·tanh(logit / κ); 0 for none.
        window_left: a row at position p attends to positions ≥ p − window_left; −1 for no window.
        bias: float32 ``[rows, heads, tokens]``, added to the scaled logits inside the cap; −Inf masks a token
            (a large finite number does not: it is a logit, and its rounding makes the meter 1).
        budget: puts the radius on offer for a dithered store, at ``budget.delta_local``; the guarantee is then
            ``"fixed_trajectory"``. The caller spends it, once a step for all layers.
        splits: partial results that are merged; None lets the device choose.
        return_shares: also return each page's share of A − 1; torch's own ops run then, on a GPU too.
        plan: split count and room for all temporaries, in place of ``splits``.
        telemetry: counts the call's cells, as of the pool's layer.

    Returns:
        ``out [rows, heads, head_dim_v]`` in q's dtype, ``lse [rows, heads]`` float32 (natural log, of the true logits),
        and a :class:`Certificate`. A row that attends to nothing has out 0, lse −Inf, meter 0.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or range, by name.

    Lean: ``WitCert.tv_tilt_le_meter``, ``WitCert.merge_splits``, ``WitCert.tierA_certificate``,
    ``WitCert.tierB_certificate``, ``WitCert.output_error_le``.
    """
    if not isinstance(pool, PackedPool | ObservatoryPool):
        raise TypeError(f"pool: got {type(pool).__name__}, wants a PackedPool or an ObservatoryPool")
    check_flag("causal", causal)
    check_flag("return_shares", return_shares)
    _check_decode(
        q,
        pool,
        page_table,
        seq_lens,
        qo_indptr,
        k_new,
        v_new,
        exact_pages,
        sinks,
        bias,
        logits_soft_cap,
        window_left,
        splits,
        plan,
        telemetry,
    )
    layout, calibration = pool.layout, pool.calibration
    if sm_scale is not None:
        check_range("sm_scale", sm_scale, 0.0, 1e6, open_low=True)
    scale = layout.head_dim**-0.5 if sm_scale is None else float(sm_scale)
    if budget is not None and not isinstance(budget, Budget):
        raise TypeError(f"budget: got {type(budget).__name__}, wants a Budget")
    radius = budget is not None and isinstance(pool, PackedPool) and pool.layout.dither
    common = (
        q, page_table, seq_lens, qo_indptr, k_new, v_new, exact_pages, pool.exact.k, pool.exact.v, sinks, bias,
    )  # fmt: skip
    workspace = None if plan is None else plan.workspace
    counters = None if telemetry is None else telemetry.buffer
    count = splits or (0 if plan is None else plan.splits)
    if isinstance(pool, PackedPool):
        outputs = torch.ops.witcert.decode_packed(
            *common, pool.k_codes, pool.k_scale, pool.sketch, pool.witness, pool.bypass, pool.v_codes, pool.v_scale,
            pool.v_norm, calibration.mu, calibration.f, calibration.u, pool.bypass_channels, pool.band_of_channel,
            pool.layout.dither, pool.layout.dither_period, _signed(pool.seed), pool.layer, causal, scale,
            float(logits_soft_cap), window_left, budget.delta_local if radius and budget else 0.0, count, return_shares,
            workspace, 3 if plan is None else plan.digits, counters,
        )  # fmt: skip
    else:
        outputs = torch.ops.witcert.decode_observatory(
            *common, pool.k_hat, pool.witness, pool.sketch, pool.sketch_scale, pool.v_hat, pool.v_error, pool.v_norm,
            calibration.f, calibration.u, pool.band_of_channel, causal, scale, float(logits_soft_cap), window_left,
            count, return_shares, workspace, counters, pool.layer,
        )  # fmt: skip
    out, lse, meter, eform, risk, value_error, compressed, shares = outputs
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k_new, v_new)):
        out, lse = _WithoutGradient.apply(out, lse, q, k_new, v_new)
    guarantee: Guarantee = "fixed_trajectory" if radius else "any_query"
    return out, lse, Certificate(meter, eform, risk, value_error, compressed, shares, guarantee)


class _WithoutGradient(torch.autograd.Function):
    """Lets outputs depend on inputs that require a gradient, so that a backward pass fails instead of missing them."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        return out.clone(), lse.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("certified_decode: got a backward pass, wants none: it has no autograd formula")


def _check_decode(
    q: Tensor,
    pool: PackedPool | ObservatoryPool,
    page_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
    exact_pages: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    cap: float,
    window_left: int,
    splits: int | None,
    plan: Plan | None,
    telemetry: Telemetry | None,
) -> None:
    layout, device = pool.layout, pool.device
    check_tensor("q", q, (None, None, layout.head_dim), layout.dtype, device)
    rows, heads, _ = q.shape
    if heads == 0 or heads % layout.kv_heads:
        raise ValueError(f"q: got {heads} heads, wants a multiple of the pool's {layout.kv_heads} kv heads")
    check_tensor("page_table", page_table, (None, None), torch.int32, device)
    batch, max_pages = page_table.shape
    check_tensor("seq_lens", seq_lens, (batch,), torch.int32, device)
    if qo_indptr is None:
        if rows != batch:
            raise ValueError(f"q: got {rows} rows, wants one for each of the {batch} sequences, or a qo_indptr")
    else:
        check_tensor("qo_indptr", qo_indptr, (batch + 1,), torch.int32, device)
    if (k_new is None) != (v_new is None):
        raise ValueError("k_new, v_new: got one of the two, wants both or none")
    if k_new is not None:
        check_tensor("k_new", k_new, (rows, layout.kv_heads, layout.head_dim), layout.dtype, device)
        check_tensor("v_new", v_new, (rows, layout.kv_heads, layout.head_dim_v), layout.dtype, device)
    if exact_pages is not None:
        check_tensor("exact_pages", exact_pages, (batch, layout.kv_heads, max_pages), torch.int32, device)
    if sinks is not None:
        check_tensor("sinks", sinks, (heads,), MODEL_DTYPES, device)
    if bias is not None:
        check_tensor("bias", bias, (rows, heads, None), torch.float32, device)
    check_range("logits_soft_cap", cap, 0.0, 1e6)
    check_integer("window_left", window_left, -1)
    if splits is not None:
        check_integer("splits", splits, 1, 2**16)
    if plan is not None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan: got {type(plan).__name__}, wants a Plan")
        plan.check(pool, q, page_table, qo_indptr=qo_indptr, k_new=k_new, exact_pages=exact_pages, splits=splits)
    if telemetry is not None:
        if not isinstance(telemetry, Telemetry):
            raise TypeError(f"telemetry: got {type(telemetry).__name__}, wants a Telemetry")
        if telemetry.device != device:
            raise ValueError(f"telemetry: got device {telemetry.device}, wants {device}")
    if device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(pool, rows, page_table, seq_lens, qo_indptr, k_new, exact_pages, sinks, bias)


def _check_values(
    pool: PackedPool | ObservatoryPool,
    rows: int,
    page_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    k_new: Tensor | None,
    exact_pages: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Checks that read values: eager on the CPU only, elsewhere they would make the host wait for the device.

    Lists and arrays instead of tensors: a call of torch takes longer than such a check.
    """
    page_size, table = pool.layout.page_size, page_table.numpy()
    capacity, lengths = table.shape[1] * page_size, seq_lens.tolist()
    if lengths and (min(lengths) < 0 or max(lengths) > capacity):
        raise ValueError(f"seq_lens: got {min(lengths)}..{max(lengths)}, wants 0..{capacity}, what page_table covers")
    bounds = range(rows + 1) if qo_indptr is None else qo_indptr.tolist()
    counts = [stop - start for start, stop in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != rows or any(count < 0 for count in counts):
        raise ValueError(f"qo_indptr: got {list(bounds)}, wants rising numbers from 0 to {rows}")
    if k_new is None and any(count > length > 0 for count, length in zip(counts, lengths, strict=True)):
        raise ValueError("seq_lens: got fewer tokens than query rows, wants as many at least, or k_new and v_new")
    _check_pages("page_table", table, lengths, page_size, 0, pool.num_pages - 1)
    if exact_pages is not None:
        _check_pages("exact_pages", exact_pages.numpy(), lengths, page_size, -1, len(pool.exact.k) - 1)
    if sinks is not None and not bool(sinks.isfinite().all()):
        raise ValueError("sinks: got a number that is not finite, wants finite ones")
    if bias is not None:
        extra = counts if k_new is not None else [0] * len(counts)
        longest = max(map(add, lengths, extra), default=0)
        if bias.shape[-1] < longest:
            raise ValueError(f"bias: got {bias.shape[-1]} tokens, wants {longest} at least")
        if not bool((bias < float("inf")).all()):
            raise ValueError("bias: got NaN or +Inf, wants finite numbers or -Inf")


def _check_pages(name: str, table: NDArray[Any], lengths: list[int], page_size: int, low: int, high: int) -> None:
    """Raise unless the numbers ``[batch, …, max_pages]`` of all pages that hold tokens are in ``low`` … ``high``."""
    if not table.size or (table.min() >= low and table.max() <= high):
        return
    for numbers, length in zip(table, lengths, strict=True):
        used = numbers[..., : -(-length // page_size)]
        if used.size and (used.min() < low or used.max() > high):
            raise ValueError(f"{name}: got {used.min()}..{used.max()}, wants {low}..{high}")
