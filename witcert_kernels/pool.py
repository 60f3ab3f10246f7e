"""Paged pools (FlashInfer's NHD: ``[pages, page_size, kv_heads, …]``), one a layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .calibration import LayerCalibration
from .checks import check_integer, check_tensor
from .layout import ObservatoryLayout, StoreLayout


class ExactPages:
    """Exact pages that repair put in place of compressed ones, in the model's dtype, one kv head each.

    ``k`` ``[slots, page_size, head_dim]``, ``v`` ``[slots, page_size, head_dim_v]``.
    """

    @torch.inference_mode(False)
    def __init__(self, layout: StoreLayout | ObservatoryLayout, slots: int, device: torch.device | str = "cpu") -> None:
        check_integer("slots", slots, 0)
        shape = (slots, layout.page_size)
        self.k = torch.zeros(*shape, layout.head_dim, dtype=layout.dtype, device=device)
        self.v = torch.zeros(*shape, layout.head_dim_v, dtype=layout.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return self.k.nbytes + self.v.nbytes


class _Pool:
    """What both pools share: named tensors whose first axis is the page."""

    page_tensors: tuple[str, ...]
    marks: tuple[str, ...]  # those whose Inf says that a key or value is not to be relied on
    layout: StoreLayout | ObservatoryLayout
    exact: ExactPages
    layer: int
    bypass_channels: Tensor
    band_of_channel: Tensor

    @property
    def calibration(self) -> LayerCalibration:
        """The calibration that wrote the pool's bytes; another one is refused with a ValueError."""
        return self._calibration

    @calibration.setter
    def calibration(self, calibration: LayerCalibration) -> None:
        mine = getattr(self, "_calibration", calibration)
        if calibration.fingerprint != mine.fingerprint:
            got, wanted = (c.fingerprint[:12] for c in (calibration, mine))
            raise ValueError(f"calibration: got {got}…, wants {wanted}…, the one that wrote the pool")
        self._calibration = calibration

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return int(getattr(self, self.page_tensors[0]).shape[0])

    @property
    def device(self) -> torch.device:
        """Device of the pool's tensors."""
        device: torch.device = getattr(self, self.page_tensors[0]).device
        return device

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the pages, exact pages not counted."""
        return sum(getattr(self, name).nbytes for name in self.page_tensors)

    @torch.inference_mode(False)
    def take_pages(self, pages: Tensor, num_pages: int | None = None) -> None:
        """Replace the pages by copies of ``pages``, followed by unwritten ones.

        One call moves every part of the store, so none can be forgotten.

        Args:
            pages: int64 ``[n]`` on the pool's device, repeats allowed.
            num_pages: pages to hold then, ``n`` at least and by default.

        Raises:
            TypeError, ValueError: a wrong dtype, shape, device or range, by name, before anything is moved.
        """
        check_tensor("pages", pages, (None,), torch.int64, self.device)
        count = len(pages) if num_pages is None else check_integer("num_pages", num_pages, len(pages))
        if self.device.type == "cpu" and len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < self.num_pages:
            raise ValueError(f"pages: got {int(pages.min())}..{int(pages.max())}, wants 0..{self.num_pages - 1}")
        for name in self.page_tensors:
            old: Tensor = getattr(self, name)
            new = old.new_zeros(count, *old.shape[1:])
            new[: len(pages)] = old[pages]
            setattr(self, name, new)
        self._unwritten(len(pages))

    def _unwritten(self, first: int) -> None:
        """Pages from ``first`` on hold no token: a cell that reads one all the same has meter 1."""
        for name in self.marks:
            getattr(self, name)[first:] = float("inf")

    @staticmethod
    def _check(layout: object, kind: type, num_pages: int, layer: int) -> None:
        if not isinstance(layout, kind):
            raise TypeError(f"layout: got {type(layout).__name__}, wants {kind.__name__}")
        check_integer("num_pages", num_pages, 0)
        check_integer("layer", layer, 0, 2**32 - 1)

    def _adopt(self, calibration: LayerCalibration | None, device: torch.device | str) -> LayerCalibration:
        layout = self.layout
        if calibration is None:
            calibration = LayerCalibration.identity(
                layout.kv_heads,
                layout.head_dim,
                rope_layout=layout.rope_layout,
                rotary_dim=layout.rotary_dim,
                device=device,
            )
        if not isinstance(calibration, LayerCalibration):
            raise TypeError(f"calibration: got {type(calibration).__name__}, wants a LayerCalibration")
        got = list(calibration.mu.shape)
        if got != [layout.kv_heads, layout.head_dim]:
            raise ValueError(
                f"calibration: got [kv_heads, head_dim] = {got}, wants {[layout.kv_heads, layout.head_dim]}"
            )
        for name in ("rope_layout", "rotary_dim"):
            if getattr(calibration, name) != getattr(layout, name):
                got, wanted = getattr(calibration, name), getattr(layout, name)
                raise ValueError(f"calibration.{name}: got {got!r}, wants the layout's {wanted!r}")
        available = calibration.u.shape[1]
        if layout.sketch > available:
            raise ValueError(f"layout.sketch: got {layout.sketch}, wants at most the calibration's {available}")
        parts = {name: getattr(calibration, name).contiguous() for name in ("mu", "f", "bypass")}
        return replace(calibration, **parts, u=calibration.u[:, : layout.sketch].contiguous()).to(device)

    def _derive(self, device: torch.device | str) -> None:
        """Small tensors that follow from the layout and the calibration."""
        self.bypass_channels = self.calibration.bypass_channels
        self.band_of_channel = self.layout.band_of_channel.to(device)


class PackedPool(_Pool):
    """The packed INT8 store of one layer.

    Args:
        layout: what a token keeps; its ``bypass`` must be the calibration's, its ``sketch`` at most that.
        num_pages: pages to allocate.
        layer: index that the dither is keyed by.
        calibration: identity if ``None``.
        seed: 64-bit key of the dither; needed when ``layout.dither`` is set.
        device: device of all tensors.

    Attributes:
        k_codes int8 ``[pages, page_size, kv_heads, head_dim]``, k_scale fp16 ``[…, groups]`` (Inf marks a key that is
        not finite), sketch int8 ``[…, r]``, witness uint8 ``[…, B]``, bypass ``[…, 2 m]``, v_codes int8
        ``[…, head_dim_v]``, v_scale fp16 ``[…, groups_v]``, v_norm float32 ``[pages, kv_heads]`` (the largest
        ``‖v̂‖ + ρ`` of a page); exact: :class:`ExactPages`.

    Raises:
        TypeError, ValueError: an argument of another type or out of range, or a calibration of another shape, by name.
    """

    marks = ("k_scale", "v_scale")
    page_tensors = ("k_codes", "k_scale", "sketch", "witness", "bypass", "v_codes", "v_scale", "v_norm")

    @torch.inference_mode(False)
    def __init__(
        self,
        layout: StoreLayout,
        num_pages: int,
        *,
        layer: int = 0,
        calibration: LayerCalibration | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._check(layout, StoreLayout, num_pages, layer)
        self.layout: StoreLayout = layout
        self.calibration = self._adopt(calibration, device)
        pairs = self.calibration.bypass.shape[1]
        if layout.bypass != pairs:
            raise ValueError(f"layout.bypass: got {layout.bypass}, wants the calibration's {pairs}")
        if layout.dither:
            if seed is None:
                raise ValueError("seed: got None, wants a random 64-bit integer for a dithered store")
            check_integer("seed", seed, 0, 2**64 - 1)
        self.layer, self.seed = layer, seed or 0
        head = (num_pages, layout.page_size, layout.kv_heads)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.k_codes = zeros(*head, layout.head_dim, dtype=torch.int8)
        self.k_scale = zeros(*head, layout.groups, dtype=torch.float16)
        self.sketch = zeros(*head, layout.sketch, dtype=torch.int8)
        self.witness = zeros(*head, layout.witness_bands, dtype=torch.uint8)
        self.bypass = zeros(*head, 2 * layout.bypass, dtype=layout.dtype)
        self.v_codes = zeros(*head, layout.head_dim_v, dtype=torch.int8)
        self.v_scale = zeros(*head, layout.groups_v, dtype=torch.float16)
        self.v_norm = zeros(num_pages, layout.kv_heads, dtype=torch.float32)
        self._unwritten(0)
        self.exact = ExactPages(layout, 0, device)
        self._derive(device)


class ObservatoryPool(_Pool):
    """16-bit reconstructions of any scheme, with what the two-part meter needs (paper section 4.1).

    Args:
        layout, num_pages, layer, device: as for :class:`PackedPool`.
        calibration: its f and u are the coordinates of the witness and the sketch; the reconstruction is never
            touched. The first ``layout.sketch`` directions are used.

    Attributes:
        k_hat ``[pages, page_size, kv_heads, head_dim]`` and v_hat ``[…, head_dim_v]`` in ``layout.stored_dtype``,
        witness fp16 ``[…, B]`` (Inf marks a key that is not finite), sketch int8 ``[…, r]``, sketch_scale fp16
        ``[…, 1 or 0]``, v_error fp16 ``[…, 1]``, v_norm float32 ``[pages, kv_heads]``; exact: :class:`ExactPages`.

    Raises:
        TypeError, ValueError: an argument of another type or out of range, or a calibration of another shape, by name.
    """

    marks = ("witness", "v_error")
    page_tensors = ("k_hat", "witness", "sketch", "sketch_scale", "v_hat", "v_error", "v_norm")

    @torch.inference_mode(False)
    def __init__(
        self,
        layout: ObservatoryLayout,
        num_pages: int,
        *,
        layer: int = 0,
        calibration: LayerCalibration | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._check(layout, ObservatoryLayout, num_pages, layer)
        self.layout: ObservatoryLayout = layout
        self.calibration = self._adopt(calibration, device)
        self.layer = layer
        head = (num_pages, layout.page_size, layout.kv_heads)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.k_hat = zeros(*head, layout.head_dim, dtype=layout.stored_dtype)
        self.witness = zeros(*head, layout.witness_bands, dtype=torch.float16)
        self.sketch = zeros(*head, layout.sketch, dtype=torch.int8)
        self.sketch_scale = zeros(*head, min(layout.sketch, 1), dtype=torch.float16)
        self.v_hat = zeros(*head, layout.head_dim_v, dtype=layout.stored_dtype)
        self.v_error = zeros(*head, 1, dtype=torch.float16)
        self.v_norm = zeros(num_pages, layout.kv_heads, dtype=torch.float32)
        self._unwritten(0)
        self.exact = ExactPages(layout, 0, device)
        self._derive(device)
