"""Philox4x32: the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from witcert_ref._checks import integer, last_axis

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)


def words(name: str, value: ArrayLike) -> NDArray[np.uint64]:
    """`value` as 32-bit words. TypeError unless integers; ValueError outside [0, 2^32)."""
    array = np.asarray(value)
    if array.dtype.kind not in "ui":
        raise TypeError(f"{name}: got dtype {array.dtype}, want integers")
    if ((array < 0) | (array > 0xFFFFFFFF)).any():
        raise ValueError(f"{name}: got {array.min()} to {array.max()}, want 32-bit words")
    return array.astype(np.uint64)


def philox4x32(counter: ArrayLike, key: ArrayLike, rounds: int = 10) -> NDArray[np.uint32]:
    """Four random words of 32 bits for each counter: counter [..., 4], key [..., 2] -> uint32 [..., 4].

    Raises TypeError or ValueError unless both hold 32-bit words.
    """
    c, k = words("counter", counter), words("key", key)
    last_axis("counter", c, 4)
    last_axis("key", k, 2)
    for i in range(integer("rounds", rounds, 0)):
        round_key = (k + _WEYL * np.uint64(i)) & _WORD
        first, second = c[..., 0] * _MULTIPLIERS[0], c[..., 2] * _MULTIPLIERS[1]
        c = np.stack(
            [
                (second >> _HALF) ^ c[..., 1] ^ round_key[..., 0],
                second & _WORD,
                (first >> _HALF) ^ c[..., 3] ^ round_key[..., 1],
                first & _WORD,
            ],
            axis=-1,
        )
    return c.astype(np.uint32)
