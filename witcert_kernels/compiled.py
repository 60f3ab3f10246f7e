"""Functions compiled by numba when first called, and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


class Compiled:
    """A function compiled when first called, and kept on disk where there is a folder for it."""

    def __init__(self, function: Callable[..., bool], **options: Any) -> None:
        self._options: dict[str, Any] = {"nogil": True, **options}
        self._function = function
        try:
            self._run = njit(cache=True, **self._options)(function)
        except RuntimeError:  # no such folder
            self._run = njit(**self._options)(function)

    def __call__(self, *arguments: Any) -> bool:
        try:
            return bool(self._run(*arguments))
        except OSError:  # the folder cannot be written to any more; nothing has run yet
            self._run = njit(**self._options)(self._function)
            return bool(self._run(*arguments))
