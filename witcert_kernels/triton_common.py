"""What the Triton kernels share: exact powers of two, rounding, the dither, room for temporaries."""

# mypy: disable-error-code="no-untyped-def"

import math

import torch
import triton
import triton.language as tl


@triton.jit
def power_of_two(n):
    """2^n for float32 integers n ≤ 0, exact; 0 down from n = −127."""
    return ((tl.maximum(n, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two_wide(n):
    """2^n in float64 for integers n of either float type, exact; 0 down from n = −1023, Inf up from n = 1024."""
    exponent = tl.minimum(tl.maximum(n, -1023.0), 1024.0).to(tl.int32) + 1023
    return (exponent.to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def round_even(x):
    """float32 of magnitude below 2^22 to the nearest integer, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_even_wide(x):
    """float64 of magnitude below 2^51 to the nearest integer, ties to even."""
    return (x + 6755399441055744.0) - 6755399441055744.0


@triton.jit
def dither_of(seed, layer, kv_head, period, channel):
    """ξ of some channels and periods that broadcast, see :func:`witcert_kernels.philox.dither`."""
    zero = channel * 0 + period * 0
    word, _, _, _ = tl.philox(seed, zero + channel, zero + period, zero + kv_head, zero + layer)
    return (2 * (word >> 17) + 1).to(tl.float32) * 0.0000152587890625 - 0.5


# Interpreted functions are not compiled: inline assembly and bfloat16 operands of a dot have a plain twin there.
INTERPRETED = not isinstance(power_of_two, triton.JITFunction)
ALIGNMENT = 256  # bytes, that of the allocator


def check_device(tensor: torch.Tensor) -> None:
    """Raise unless the kernels can run on this tensor's device.

    Raises:
        ValueError: a CPU tensor without ``TRITON_INTERPRET=1``.
    """
    if tensor.device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            "WITCERT_BACKEND: got triton for CPU tensors, wants TRITON_INTERPRET=1 set before triton is imported"
        )


class Workspace:
    """Hands out a call's temporaries: aligned slices of a buffer one after the other, or new tensors without one.

    Args:
        device: of the tensors.
        buffer: uint8, or None.
    """

    def __init__(self, device: torch.device, buffer: torch.Tensor | None = None) -> None:
        self.device, self.buffer = device, buffer
        self.nbytes = 0

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor.

        Raises:
            ValueError: the buffer is too small.
        """
        begin = self.nbytes
        end = begin + math.prod(shape) * dtype.itemsize
        self.nbytes = -(-end // ALIGNMENT) * ALIGNMENT
        if self.buffer is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if end > len(self.buffer):
            raise ValueError(f"plan.workspace: got {len(self.buffer)} bytes, wants {end} at least; make a larger plan")
        return self.buffer[begin:end].view(dtype).view(shape)


def padded(n: int, least: int) -> int:
    """Smallest power of two that is at least n and ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def as_int32(x: int) -> int:
    """A counter word below 2^32 as the int32 of the same bits."""
    return x - 2**32 if x >= 2**31 else x
