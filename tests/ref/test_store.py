"""The byte account and the choice of bypass pairs."""

from collections.abc import Callable

import numpy as np
import pytest

from witcert_ref import store
from witcert_ref.store import Layout


@pytest.mark.parametrize(
    ("layout", "k", "v"),
    [
        (Layout(128), 130, 130),
        (Layout(128, group=128), 130, 130),
        (Layout(128, sketch=4, witness_bands=1), 135, 130),
        (Layout(128, group=32), 136, 136),
        (Layout(128, bypass=2), 138, 130),
        (Layout(128, group=32, bypass=4), 152, 136),
        (Layout(64, sketch=1), 67, 66),
        (Layout(64, bypass=1, bypass_bytes=4), 74, 66),
        (Layout(192, head_dim_v=128, group=64), 198, 132),
        (Layout(576, head_dim_v=512), 578, 514),
    ],
)
def test_packed_bytes(layout: Layout, k: int, v: int) -> None:
    assert store.bytes_per_token(layout) == (k, v)


def test_observatory_bytes() -> None:
    assert store.bytes_per_token(Layout(128, witness_bands=16), observatory=True) == (256 + 32, 256 + 2)
    assert store.bytes_per_token(Layout(64, witness_bands=8, sketch=4), observatory=True) == (128 + 16 + 4 + 2, 130)


def test_the_block_layout_of_the_paper() -> None:
    fields = 32768 * 128 + 128 * 128 * 2 + 128 * 8 * 2 + 32768 * 8 * 2  # codes, scales, indices, values
    assert store.block_bytes(32768, 128, 4) == fields == 4_753_408
    assert [round(store.block_bytes(32768, 128, m) / 32768, 1) for m in (4, 8, 16)] == [145.1, 161.1, 193.2]
    assert store.block_bytes(32768, 128, 0) / 32768 == 129
    assert store.block_bytes(1, 128, 0) == 128 + 256


def test_the_bypass_takes_the_pairs_with_most_energy() -> None:
    scale = np.array([1.0, 5.0, 2.0, 2.0, 1.0, 5.0, 2.0, 2.1])
    assert store.select_bypass(scale, 2, "half").tolist() == [1, 3]
    assert store.select_bypass(scale, 2, "interleaved").tolist() == [0, 2]
    assert store.select_bypass(scale, 0, "half").tolist() == []
    assert store.select_bypass(np.ones((3, 8)), 2, "half").tolist() == [[0, 1]] * 3
    chosen = store.select_bypass(np.stack([scale, scale[::-1]]), 1, "half")
    mask = store.bypass_channels(chosen, 8, "half")
    assert [np.flatnonzero(row).tolist() for row in mask] == [[1, 5], [2, 6]]
    assert np.flatnonzero(store.bypass_channels([2], 8, "interleaved")).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda: Layout(0), ValueError, "head_dim"),
        (lambda: Layout(64.0), TypeError, "head_dim"),  # type: ignore[arg-type]
        (lambda: Layout(64, group=48), ValueError, "group"),
        (lambda: Layout(64, head_dim_v=48, group=32), ValueError, "group"),
        (lambda: Layout(64, bypass=33), ValueError, "bypass"),
        (lambda: Layout(64, sketch=-1), ValueError, "sketch"),
        (lambda: store.block_bytes(-1, 128, 0), ValueError, "tokens"),
        (lambda: store.select_bypass(np.ones(8), 5, "half"), ValueError, "bypass"),
        (lambda: store.select_bypass(1.0, 1, "half"), ValueError, "scale"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=f"^{name}: got"):
        call()
