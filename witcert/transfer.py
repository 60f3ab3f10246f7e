"""Numbers from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers of the host as a tensor on ``device``, without waiting for what the device is doing."""
    host = values if isinstance(values, Tensor) else torch.tensor(list(values), dtype=dtype)
    return host.to(device, non_blocking=True)
