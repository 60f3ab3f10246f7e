"""Registering an op with torch.

``torch.library.custom_op`` puts a Python function in front of every kernel of an op that writes to its arguments, which
walks over the schema at each call: half a millisecond for an op with 35 arguments, more than it computes. The ops here
are registered for their backends and no more. They have no gradients: nothing that they return or write requires one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch

_library = torch.library.Library("witcert", "FRAGMENT")


def op(name: str, mutates_args: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function with annotated arguments as ``torch.ops.witcert.NAME`` on CPU and CUDA tensors.

    Args:
        name: of the op.
        mutates_args: the arguments that it writes to.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def kernel(*arguments: Any) -> Any:
            arguments = tuple([x.detach() if getattr(x, "requires_grad", False) else x for x in arguments])
            if not torch.is_grad_enabled():
                return function(*arguments)
            with torch.no_grad():
                return function(*arguments)

        _library.define(name + torch.library.infer_schema(function, mutates_args=tuple(mutates_args)))
        for key in ("CPU", "CUDA"):
            _library.impl(name, kernel, key)
        return function

    return register


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what an op's outputs look like, for tracing."""
    return torch.library.register_fake(f"witcert::{name}", lib=_library)
