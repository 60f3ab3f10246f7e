"""One layer's calibration: equaliser, sketch directions and bypass pairs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_choice, check_integer, check_tensor
from .layout import ROPE_LAYOUTS, rope_pairs


@dataclass(frozen=True)
class LayerCalibration:
    """Equaliser, sketch directions and bypass pairs of one layer. Soundness never depends on it, only tightness.

    Args:
        mu, f: float32 ``[kv_heads, head_dim]``; a stored key is ``(k - mu) / f``; f > 0 and equal within a RoPE pair.
        u: float32 ``[kv_heads, r, head_dim]``, unit vectors in equalised coordinates.
        bypass: int64 ``[kv_heads, m]``, RoPE pairs that are kept as they are; on them mu = 0, f = 1, u = 0.
        rope_layout, rotary_dim: how channels pair up.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, range, or a broken constraint, by name.
    """

    mu: Tensor
    f: Tensor
    u: Tensor
    bypass: Tensor
    rope_layout: str = "half"
    rotary_dim: int | None = None

    def __post_init__(self) -> None:
        check_tensor("calibration.mu", self.mu, (None, None), torch.float32)
        kv_heads, head_dim = self.mu.shape
        if head_dim % 2:
            raise ValueError(f"calibration.mu: got {head_dim} channels, wants an even number")
        check_choice("calibration.rope_layout", self.rope_layout, ROPE_LAYOUTS)
        if self.rotary_dim is not None and check_integer("calibration.rotary_dim", self.rotary_dim, 2, head_dim) % 2:
            raise ValueError(f"calibration.rotary_dim: got {self.rotary_dim}, wants an even number")
        device = self.mu.device
        check_tensor("calibration.f", self.f, (kv_heads, head_dim), torch.float32, device)
        check_tensor("calibration.u", self.u, (kv_heads, None, head_dim), torch.float32, device)
        check_tensor("calibration.bypass", self.bypass, (kv_heads, None), torch.int64, device)
        for name in ("mu", "f", "u"):
            if not bool(getattr(self, name).isfinite().all()):
                raise ValueError(f"calibration.{name}: got a value that is not finite, wants finite ones")
        if not bool((self.f > 0).all()):
            raise ValueError(f"calibration.f: got {self.f.min().item()}, wants numbers above 0")
        pairs = rope_pairs(head_dim, self.rope_layout, self.rotary_dim).to(device)
        if not torch.equal(self.f[:, pairs[:, 0]], self.f[:, pairs[:, 1]]):
            raise ValueError("calibration.f: got different values within a RoPE pair, wants equal ones")
        if self.bypass.numel():
            if int(self.bypass.min()) < 0 or int(self.bypass.max()) >= head_dim // 2:
                raise ValueError(f"calibration.bypass: got a pair outside 0..{head_dim // 2 - 1}")
            ordered = self.bypass.sort(dim=1).values
            if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
                raise ValueError("calibration.bypass: got a pair twice, wants each once")
            on = self.bypass_mask
            if bool((self.mu[on] != 0).any()) or bool((self.f[on] != 1).any()):
                raise ValueError("calibration.mu, calibration.f: wants 0 and 1 on bypass channels")
            if bool((self.u * on[:, None, :] != 0).any()):
                raise ValueError("calibration.u: wants 0 on bypass channels")

    @classmethod
    def identity(
        cls,
        kv_heads: int,
        head_dim: int,
        *,
        bypass: Tensor | None = None,
        rope_layout: str = "half",
        rotary_dim: int | None = None,
        device: torch.device | str = "cpu",
    ) -> LayerCalibration:
        """No equaliser and no sketch; ``bypass`` pairs int64 ``[kv_heads, m]`` or none."""
        pairs = torch.empty(kv_heads, 0, dtype=torch.int64) if bypass is None else bypass
        return cls(
            mu=torch.zeros(kv_heads, head_dim, dtype=torch.float32, device=device),
            f=torch.ones(kv_heads, head_dim, dtype=torch.float32, device=device),
            u=torch.zeros(kv_heads, 0, head_dim, dtype=torch.float32, device=device),
            bypass=pairs.to(device),
            rope_layout=rope_layout,
            rotary_dim=rotary_dim,
        )

    @property
    def bypass_channels(self) -> Tensor:
        """Channels of the bypass pairs, int64 ``[kv_heads, 2 m]``: all first channels, then all second ones."""
        pairs = rope_pairs(self.mu.shape[1], self.rope_layout, self.rotary_dim).to(self.mu.device)
        return torch.cat([pairs[:, 0][self.bypass], pairs[:, 1][self.bypass]], dim=1)

    @property
    def bypass_mask(self) -> Tensor:
        """Which channels are bypassed, bool ``[kv_heads, head_dim]``."""
        mask = torch.zeros(self.mu.shape, dtype=torch.bool, device=self.mu.device)
        return mask.scatter_(1, self.bypass_channels, True)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all fields: the calibration that wrote some bytes is the only one that may read them."""
        digest = hashlib.sha256(f"{self.rope_layout} {self.rotary_dim}".encode())
        for name in ("mu", "f", "u", "bypass"):
            tensor: Tensor = getattr(self, name)
            digest.update(f"{name} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def to(self, device: torch.device | str) -> LayerCalibration:
        """The same calibration on another device."""
        if self.mu.device == torch.device(device):
            return self
        moved = {name: getattr(self, name).to(device) for name in ("mu", "f", "u", "bypass")}
        return LayerCalibration(**moved, rope_layout=self.rope_layout, rotary_dim=self.rotary_dim)
