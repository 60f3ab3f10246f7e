"""Argument checks. Every message names the argument, what it got and what it wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from operator import index
from typing import Any

import torch
from torch import Tensor


def check_tensor(
    name: str,
    tensor: object,
    shape: Sequence[int | None] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise unless ``tensor`` is a tensor of this shape (``None`` matches any size), dtype and device.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape or device.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, wants a tensor")
    if dtype is not None:
        allowed = dtype if isinstance(dtype, tuple) else (dtype,)
        if tensor.dtype not in allowed:
            raise TypeError(f"{name}: got dtype {tensor.dtype}, wants {' or '.join(map(str, allowed))}")
    if shape is not None:
        got = list(tensor.shape)
        if len(got) != len(shape) or any(s is not None and s != g for s, g in zip(shape, got, strict=True)):
            wanted = "[" + ", ".join("*" if s is None else str(s) for s in shape) + "]"
            raise ValueError(f"{name}: got shape {got}, wants {wanted}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, wants {device}")


def check_contiguous(owner: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` unless each of an owner's tensors is contiguous: kernels address them so."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{owner}.{name}: got strides {list(tensor.stride())}, wants a contiguous tensor")


def check_range(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise unless ``low <= value <= high`` (``low < value`` when ``open_low``).

    Raises:
        TypeError: not a number.
        ValueError: out of range.
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not (low < value if open_low else low <= value) or not value <= high:
        kind = ValueError if number else TypeError
        raise kind(f"{name}: got {value!r}, wants a number in {'(' if open_low else '['}{low}, {high}]")


def check_integer(name: str, value: int, low: int, high: int = 2**31 - 1) -> int:
    """The value as an int; raise unless it is an integer in ``low`` … ``high``.

    Raises:
        TypeError: not an integer.
        ValueError: out of range.
    """
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, wants an integer in [{low}, {high}]")
    check_range(name, number, low, high)
    return number


def check_flag(name: str, value: object) -> None:
    """Raise ``TypeError`` unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, wants a bool")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, wants one of {', '.join(map(repr, choices))}")
