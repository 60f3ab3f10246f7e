"""Compression schemes: one file a method. A new method is a new file here, or a call of :func:`register`."""

from . import fp8_raw, fp8_scaled, int8, kivi, kvquant4, rtn, sign1, turboquant4
from .base import PackedScheme, Scheme, get, names, register

__all__ = [
    "PackedScheme",
    "Scheme",
    "fp8_raw",
    "fp8_scaled",
    "get",
    "int8",
    "kivi",
    "kvquant4",
    "names",
    "register",
    "rtn",
    "sign1",
    "turboquant4",
]
