"""What a scheme is, and the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from witcert_kernels.checks import check_integer

Quantizer = Callable[[Tensor], "Tensor | tuple[Tensor, Tensor]"]
NominalBytes = Callable[[int, int], float]


@dataclass(frozen=True)
class Scheme:
    """A black-box quantiser: what a compressed cache would give back for some keys or values.

    Args:
        name: what ``WitCertCache(scheme=…)`` calls it.
        keys, values: functions of ``[tokens, kv_heads, d]`` in any float dtype, tokens a multiple of ``token_group``,
            returning reconstructions of that shape, or ``(reconstructions, steps)`` (the steps are not needed: the
            observatory measures what was lost).
        bits: bits of a code.
        token_group: tokens that are quantised together, aligned to logical positions; an incomplete group stays exact.
        nominal_bytes: ``(head_dim, head_dim_v) -> bytes`` of one token's key and value in one kv head, as the method
            itself would store them; None where it is not known.

    Raises:
        TypeError, ValueError: ``token_group`` is no integer from 1 to 65536.
    """

    name: str
    keys: Quantizer
    values: Quantizer
    bits: float
    token_group: int = 1
    nominal_bytes: NominalBytes | None = None

    def __post_init__(self) -> None:
        check_integer("token_group", self.token_group, 1, 2**16)

    def quantize_keys(self, k: Tensor) -> Tensor:
        """The keys that come back, in the shape of ``k``."""
        return self._reconstruct(self.keys, k)

    def quantize_values(self, v: Tensor) -> Tensor:
        """The values that come back, in the shape of ``v``."""
        return self._reconstruct(self.values, v)

    def _reconstruct(self, quantizer: Quantizer, x: Tensor) -> Tensor:
        result = quantizer(x.clone())  # it may work in place, and x is what the witness compares with
        out = result[0] if isinstance(result, tuple) else result
        if not isinstance(out, Tensor) or out.shape != x.shape:
            got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"scheme {self.name!r}: its quantiser returned {got}, wants {list(x.shape)}")
        return out.to(x.dtype)


@dataclass(frozen=True)
class PackedScheme:
    """The packed INT8 store, a controlled quantiser: its certificate needs nothing but its own steps."""

    name: str
    bits: float = 8
    dither: bool = False


_SCHEMES: dict[str, Scheme | PackedScheme] = {}


def register(scheme: Scheme | PackedScheme) -> Scheme | PackedScheme:
    """Add a scheme to the registry and return it.

    Raises:
        TypeError: not a scheme.
        ValueError: the name is taken.
    """
    if not isinstance(scheme, Scheme | PackedScheme):
        raise TypeError(f"scheme: got {type(scheme).__name__}, wants a Scheme")
    if scheme.name in _SCHEMES:
        raise ValueError(f"scheme: got the name {scheme.name!r}, which is taken, wants another")
    _SCHEMES[scheme.name] = scheme
    return scheme


def get(name: str) -> Scheme | PackedScheme:
    """The scheme of this name.

    Raises:
        ValueError: there is none; the message lists all names.
    """
    if name not in _SCHEMES:
        raise ValueError(f"scheme: got {name!r}, wants one of {', '.join(_SCHEMES)}")
    return _SCHEMES[name]


def names() -> list[str]:
    """All names, in the order of registration."""
    return list(_SCHEMES)
