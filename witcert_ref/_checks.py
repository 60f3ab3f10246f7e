"""Argument checks: each raises an error that names the argument, what it got and what it wants."""

import numbers
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def floats(name: str, value: ArrayLike, *, finite: bool = True) -> Array:
    """`value` as float64. TypeError unless real; ValueError for NaN, and for infinities unless `finite=False`."""
    array = np.asarray(value)
    if array.dtype.kind not in "buif":
        raise TypeError(f"{name}: got dtype {array.dtype}, want real numbers")
    array = array.astype(np.float64)
    if finite and not np.isfinite(array).all():
        raise ValueError(f"{name}: got a value that is not finite, want finite numbers")
    if np.isnan(array).any():
        raise ValueError(f"{name}: got NaN, want numbers")
    return array


def nonnegative(name: str, value: ArrayLike, *, finite: bool = True) -> Array:
    """`floats`, and ValueError for a negative entry."""
    array = floats(name, value, finite=finite)
    if (array < 0).any():
        raise ValueError(f"{name}: got {array.min()}, want nothing below 0")
    return array


def scalar(name: str, value: Any, low: float, high: float = np.inf) -> float:
    """A finite real number in [low, high]; TypeError or ValueError otherwise."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {value!r}, want a real number")
    number = float(value)
    if not (np.isfinite(number) and low <= number <= high):
        raise ValueError(f"{name}: got {value!r}, want a finite number from {low} to {high}")
    return number


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """An integer in [low, high]; TypeError or ValueError otherwise."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: got {value!r}, want an integer")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}: got {number}, want at least {low}" + ("" if high is None else f", at most {high}"))
    return number


def dims(name: str, array: NDArray[Any], *shape: int | None) -> None:
    """ValueError unless `array` has this shape (None: any length)."""
    if array.ndim != len(shape) or any(want not in (None, got) for got, want in zip(array.shape, shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: got shape {array.shape}, want [{wanted}]")


def last_axis(name: str, array: NDArray[Any], length: int) -> None:
    """ValueError unless the last axis of `array` has this length."""
    if array.ndim == 0 or array.shape[-1] != length:
        raise ValueError(f"{name}: got shape {array.shape}, want a last axis of {length}")


def same_last_axis(name: str, array: NDArray[Any], other: NDArray[Any]) -> None:
    """ValueError unless both have a last axis, of one length."""
    if array.ndim == 0 or other.ndim == 0 or array.shape[-1] != other.shape[-1]:
        raise ValueError(f"{name}: got shape {array.shape}, want the last axis of {other.shape}")
