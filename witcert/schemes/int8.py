"""The packed INT8 store, plain (any query) and dithered (fixed trajectory): :class:`witcert_kernels.StoreLayout`."""

from __future__ import annotations

from .base import PackedScheme, register

register(PackedScheme("int8"))
register(PackedScheme("int8_dither", dither=True))
