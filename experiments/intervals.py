"""95 % intervals of what a sample shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from experiments.result import number

Interval = tuple[float, float]
INTERVAL = "95 %"


def coverage(passed: ArrayLike) -> tuple[float, tuple[float, float]]:
    """The share of True in bool [n], and its Clopper–Pearson interval, which takes the samples as independent."""
    hits = np.asarray(passed, dtype=bool)
    interval = stats.binomtest(int(hits.sum()), hits.size).proportion_ci(method="exact")
    return float(hits.mean()), (float(interval.low), float(interval.high))


def bootstrap(
    samples: NDArray[np.float64], statistic: Callable[..., object] = np.median
) -> tuple[float, tuple[float, float]]:
    """A statistic of [n], and its percentile bootstrap interval from 2,000 resamples (seed 0)."""
    drawn = stats.bootstrap(
        (samples,), statistic, n_resamples=2000, method="percentile", rng=np.random.default_rng(0), vectorized=True
    )
    interval = drawn.confidence_interval
    return float(np.asarray(statistic(samples))), (float(interval.low), float(interval.high))


def over_prompts(
    samples: Sequence[NDArray[np.float64]] | NDArray[np.float64], statistic: Callable[..., object] = np.mean
) -> tuple[float, tuple[float, float]]:
    """A statistic of all cells of some prompts ([cells] each, or [prompts, cells]), and its percentile bootstrap
    interval: 1,000 times as many prompts are drawn with all their cells (seed 0), as cells of one prompt depend on each
    other."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(samples), size=(1000, len(samples)))
    if statistic is np.mean:  # of whole prompts, so their sums do
        sums, sizes = (np.array([float(f(x)) for x in samples]) for f in (np.sum, np.size))
        values = sums[drawn].sum(1) / sizes[drawn].sum(1)
    else:
        values = [float(np.asarray(statistic(np.concatenate([np.ravel(samples[i]) for i in some])))) for some in drawn]
    low, high = np.quantile(values, (0.025, 0.975))
    return float(np.asarray(statistic(np.concatenate([np.ravel(x) for x in samples])))), (float(low), float(high))


def spread(
    samples: Sequence[NDArray[np.float64]] | NDArray[np.float64], statistic: Callable[..., object] = np.mean
) -> tuple[float | None, str]:
    """A statistic and its interval as two cells of a table: `over_prompts`, or `bootstrap` of an array [n].

    Without an interval for one sample, without either for none, or where a prompt has no cell.
    """
    if isinstance(samples, np.ndarray) and samples.ndim == 1:
        if len(samples) < 2:
            return (float(samples[0]) if len(samples) else None), between(None)
        value, interval = bootstrap(samples, statistic)
    elif all(map(len, samples)):
        value, interval = over_prompts(samples, statistic)
    else:
        return None, between(None)
    return value, between(interval)


def share_of(passed: ArrayLike) -> tuple[float, str]:
    """`coverage` as two cells of a table."""
    value, interval = coverage(passed)
    return value, between(interval)


def columns(*names: str) -> tuple[str, ...]:
    """Heads of what `spread` and `share_of` give: each name, and that of its interval."""
    return tuple(head for name in names for head in (name, INTERVAL))


def between(interval: Interval | None) -> str:
    """An interval as a cell of a table."""
    return "—" if interval is None else " – ".join(number(end) for end in interval)
