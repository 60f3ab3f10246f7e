"""The assertions behind the properties: one reported number against what the stored bytes imply.

Soundness has tolerance 0: float64 decides only outside a margin for its own error, mpmath inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from . import exact
from .adapter import Array, Decoded, Info, Mask
from .case import Scene
from .exact import C_LARGE, FLOAT_MARGIN, MP, finite
from .model import Block, blocks


class Violation(AssertionError):
    """A contract that does not hold."""


def require(condition: Any, message: str) -> None:
    """Raise :class:`Violation` unless the condition holds."""
    if not condition:
        raise Violation(message)


def where(block: Block, r: int) -> str:
    """Names a cell."""
    return f"row {block.rows[r]}, head {block.heads[r]}"


def cell(block: Block, column: Array | None, name: str) -> Array:
    """A reported column ``[rows, heads]`` at the block's rows, ``[R]``."""
    if column is None:
        raise Violation(f"{name}: got None, wants an array: the implementation offers it")
    return np.asarray(column[block.rows, block.heads], dtype=np.float64)


def plain_rows(block: Block) -> Mask:
    """Rows with something to attend to and nothing that is not finite."""
    return np.asarray(~block.empty & ~block.lost_rows & finite(block.q))


def _masked(block: Block) -> tuple[Array, Array]:
    """p ``[R, T]`` (rows without tokens uniform, never used) and c."""
    y = np.where(block.empty[:, None], 0.0, block.y)
    return exact.softmax(y), block.c


def meter_covers_worst_case(block: Block, decoded: Decoded) -> None:
    """Reported meter ≥ the worst case over |ε| ≤ c under the stored keys' own attention."""
    p, c = _masked(block)
    least = exact.worst_case(p, c)
    got = cell(block, decoded.meter, "meter")
    margin = FLOAT_MARGIN * least + np.minimum(8 * block.noise, 1.0)
    sure = (got >= 1) | (got >= least + margin) & (c.max(1, initial=0) < C_LARGE)
    for r in np.flatnonzero(plain_rows(block) & ~sure).tolist():
        p_r = exact.softmax_mp(block.logits_mp(r))
        bound = exact.worst_case_mp(p_r, block.bounds_mp(r))
        require(
            MP.mpf(float(got[r])) >= bound,
            f"meter: got {got[r]!r} at {where(block, r)}, but errors within c move attention by {MP.nstr(bound, 9)}",
        )


def meter_covers_true_keys(block: Block, decoded: Decoded) -> None:
    """Reported meter ≥ the total variation that the stored keys really caused; not for the radius, which may fail."""
    if decoded.guarantee != "any_query":
        return
    got = cell(block, decoded.meter, "meter")
    rows = plain_rows(block)
    p = _masked(block)[0]
    true = exact.softmax(np.where(rows[:, None], block.x_true, 0.0))
    moved = exact.total_variation(p, true)
    for r in np.flatnonzero(rows & (got < 1) & (got < moved * (1 + FLOAT_MARGIN) + 8 * block.noise)).tolist():
        actual = exact.tv_mp(exact.softmax_mp(block.logits_mp(r)), exact.softmax_mp(block.true_logits_mp(r)))
        require(
            MP.mpf(float(got[r])) >= actual,
            f"meter: got {got[r]!r} at {where(block, r)}, but attention moved by {MP.nstr(actual, 12)}",
        )


def meter_is_useful(block: Block, decoded: Decoded) -> None:
    """Reported meter ≤ 1.01 · the meter of the exact quantities + the documented error budget."""
    got = cell(block, decoded.meter, "meter")
    p, _ = _masked(block)
    upper = block.bounds[1]
    most = (exact.meter(p, upper) * 1.01 + block.slack) * (1 - FLOAT_MARGIN) - 8 * block.noise
    sure = (got <= np.minimum(most, 1)) & (upper.max(1, initial=0) < C_LARGE)
    for r in np.flatnonzero(plain_rows(block) & ~sure).tolist():
        meter = exact.meter_mp(exact.softmax_mp(block.logits_mp(r)), block.bounds_mp(r, upper=True))
        most_r = min(meter * MP.mpf("1.01") + MP.mpf(float(block.slack[r])), MP.one)
        require(
            MP.mpf(float(got[r])) <= most_r,
            f"meter: got {got[r]!r} at {where(block, r)}, wants at most {MP.nstr(most_r, 12)}, "
            f"1.01 of the exact meter {MP.nstr(meter, 12)} and an error budget of {block.slack[r]:.3g}",
        )


def meter_is_a_probability(block: Block, decoded: Decoded) -> None:
    """0 ≤ meter ≤ 1, never NaN; 1 where something is not finite, 0 where nothing is attended to."""
    got = cell(block, decoded.meter, "meter")
    lost = (block.lost_rows | ~finite(block.q)) & ~block.empty
    for r in range(len(got)):
        require(0 <= got[r] <= 1, f"meter: got {got[r]!r} at {where(block, r)}, wants a number in [0, 1]")
        if lost[r]:
            require(got[r] == 1, f"meter: got {got[r]!r} at {where(block, r)}, wants 1: an input is not finite")
        if block.empty[r]:
            require(got[r] == 0, f"meter: got {got[r]!r} at {where(block, r)}, wants 0: no token is attended to")


def lse_is_of_the_stored_keys(block: Block, decoded: Decoded) -> None:
    """lse within the documented error budget of log Σ e^y; −Inf for a row without tokens."""
    got = cell(block, decoded.lse, "lse")
    rows = plain_rows(block)
    y = np.where(rows[:, None], block.y, 0.0)
    top = y.max(1, initial=-np.inf)
    with np.errstate(divide="ignore"):
        want = top + np.log(np.exp(y - top[:, None]).sum(1))
    allowed = block.slack + 4 * 2.0**-24 * np.abs(want)
    for r in range(len(got)):
        if block.empty[r]:
            require(got[r] == -np.inf, f"lse: got {got[r]!r} at {where(block, r)}, wants -inf: no token is attended to")
        elif rows[r]:
            require(
                abs(got[r] - want[r]) <= allowed[r],
                f"lse: got {got[r]!r} at {where(block, r)}, wants {want[r]!r} within {allowed[r]:.3g}",
            )


_CAST = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def output_is_attention(block: Block, decoded: Decoded) -> None:
    """out within rounding of Σ p̃ v̂: logits by the error budget, weights and output by the 16-bit formats."""
    got = np.asarray(decoded.out[block.rows, block.heads], dtype=np.float64)
    require(not np.isnan(got).any(), "out: got NaN, wants finite numbers for any input")
    rows = plain_rows(block)
    p = _masked(block)[0][:, : len(block.v_hat)]
    want = p @ block.v_hat
    norms = np.linalg.norm(block.v_hat, axis=1)
    reach = norms.max(initial=0.0)
    allowed = 2 * np.tanh(block.slack) * reach + (2.0**-9 + _CAST[block.layout.dtype]) * (p @ norms) + 2.0**-20 * reach
    allowed = allowed + _CAST[block.layout.dtype] * 2.0**-13 * block.v_hat.shape[1] ** 0.5
    for r in np.flatnonzero(rows | block.empty).tolist():
        off = np.linalg.norm(got[r] - (0 if block.empty[r] else want[r]))
        require(
            off <= (0 if block.empty[r] else allowed[r]),
            f"out: got {got[r].tolist()} at {where(block, r)}, wants "
            f"{(0 * want[r] if block.empty[r] else want[r]).tolist()} within {allowed[r]:.3g}",
        )


def value_error_covers(block: Block, decoded: Decoded) -> None:
    """Reported value error ≥ the distance of out from exact attention over exact values; +Inf where a value is lost."""
    got = cell(block, decoded.value_error, "value_error")
    out = np.asarray(decoded.out[block.rows, block.heads], dtype=np.float64)
    lost = np.asarray((block.attended[:, : len(block.lost_v)] & block.lost_v).any(1))
    rows = plain_rows(block)
    true = exact.softmax(np.where(rows[:, None], block.x_true, 0.0))[:, : len(block.v_true)]
    with np.errstate(invalid="ignore"):
        off = np.linalg.norm(true @ np.where(np.isfinite(block.v_true), block.v_true, 0.0) - out, axis=1)
    for r in range(len(got)):
        require(not np.isnan(got[r]), f"value_error: got NaN at {where(block, r)}")
        if lost[r] and not block.empty[r]:
            require(
                got[r] == np.inf, f"value_error: got {got[r]!r} at {where(block, r)}, wants inf: a value is not finite"
            )
        elif rows[r]:
            floor = 2.0**-45 * block.page_norm + 4 * block.noise[r] * block.page_norm
            if got[r] < off[r] * (1 + FLOAT_MARGIN) + floor:
                exact_off = _output_error_mp(block, r, out[r])
                require(
                    MP.mpf(float(got[r])) >= exact_off,
                    f"value_error: got {got[r]!r} at {where(block, r)}, but out is off by {MP.nstr(exact_off, 12)}",
                )


def _output_error_mp(block: Block, r: int, out: Array) -> Any:
    tokens = np.flatnonzero(block.attended[r])
    p = exact.softmax_mp(block.true_logits_mp(r))
    total = MP.zero
    for j in range(block.v_true.shape[1]):
        weighted = sum(
            (w * MP.mpf(float(block.v_true[t, j])) for w, t in zip(p, tokens, strict=True) if t < len(block.v_true)),
            MP.zero,
        )
        total += (weighted - MP.mpf(float(out[j]))) ** 2
    return MP.sqrt(total)


def value_error_is_useful(block: Block, decoded: Decoded) -> None:
    """Reported value error ≤ 1.02 · (2 · meter · R + Σ p̃ ρ) + rounding, R over the pages that hold the sequence."""
    got = cell(block, decoded.value_error, "value_error")
    reported = cell(block, decoded.meter, "meter")
    p = _masked(block)[0][:, : len(block.rho)]
    rounding = (2.0**-9 + 4 * _CAST[block.layout.dtype] + 2 * block.slack) * block.page_norm
    most = 1.02 * (2 * reported * block.page_norm + p @ block.rho) + rounding + 2.0**-24 * block.v_hat.shape[1]
    lost = (block.attended[:, : len(block.lost_v)] & block.lost_v).any(1)
    for r in np.flatnonzero(plain_rows(block) & ~lost).tolist():
        require(
            got[r] <= most[r],
            f"value_error: got {got[r]!r} at {where(block, r)}, wants at most {most[r]!r}",
        )


def risk_and_eform(block: Block, decoded: Decoded) -> None:
    """risk is log A and eform ½ (A² − 1), up to the error budget and 1 %; +Inf where a key is lost."""
    risk, eform = cell(block, decoded.risk, "risk"), cell(block, decoded.eform, "eform")
    p, c = _masked(block)
    low, high = exact.log_a(p, c), exact.log_a(p, block.bounds[1]) * 1.01
    allowed = 2 * block.slack
    for r in range(len(risk)):
        if block.empty[r]:
            require(
                risk[r] == 0 and eform[r] == 0,
                f"risk, eform: got {risk[r]!r}, {eform[r]!r} at {where(block, r)}, wants 0",
            )
        elif block.lost_rows[r]:
            require(
                risk[r] == np.inf and eform[r] == np.inf,
                f"risk, eform: got {risk[r]!r}, {eform[r]!r} at {where(block, r)}, wants inf: a key is not finite",
            )
        elif np.isfinite(block.q[r]).all() and c[r].max(initial=0) < C_LARGE:
            require(
                low[r] - allowed[r] <= risk[r] <= high[r] + allowed[r],
                f"risk: got {risk[r]!r} at {where(block, r)}, wants {low[r]!r}..{high[r]!r} within {allowed[r]:.3g}",
            )
            squared = (np.expm1(2 * (low[r] - allowed[r])) / 2, np.expm1(min(2 * (high[r] + allowed[r]), C_LARGE)) / 2)
            require(
                squared[0] <= eform[r] <= squared[1] * 1.01 or squared[1] > 1e38,
                f"eform: got {eform[r]!r} at {where(block, r)}, wants {squared[0]!r}..{squared[1]!r}",
            )


Check = Callable[[Block, Decoded], None]

SOUND: tuple[Check, ...] = (meter_is_a_probability, meter_covers_worst_case, meter_covers_true_keys)
READS: tuple[Check, ...] = (lse_is_of_the_stored_keys, output_is_attention)
ALL: tuple[Check, ...] = (*READS, *SOUND, meter_is_useful)


def everything(info: Info) -> tuple[Check, ...]:
    """All checks that an implementation can be put to."""
    kinds = ALL
    if "value_error" in info.offers:
        kinds += (value_error_covers, value_error_is_useful)
    if "risk" in info.offers:
        kinds += (risk_and_eform,)
    return kinds


def run(scene: Scene, checks: Iterable[Check], decoded: Decoded | None = None) -> Decoded:
    """Decode the scene's read and put every block of it to the checks."""
    answer = scene.decode() if decoded is None else decoded
    for block in blocks(scene):
        for check in checks:
            check(block, answer)
    return answer


def same(a: Decoded, b: Decoded, rows: Any = slice(None), heads: Any = slice(None), *, what: str) -> None:
    """Bit-identical reports at some rows and heads."""
    for name in ("out", "lse", "meter", "eform", "risk", "value_error"):
        x, y = getattr(a, name), getattr(b, name)
        if x is not None and y is not None:
            x, y = x[rows][:, heads], y[rows][:, heads]
            require(np.array_equal(x, y, equal_nan=True), f"{name}: got {y.tolist()}, wants {x.tolist()}: {what}")
