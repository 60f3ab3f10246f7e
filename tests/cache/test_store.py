"""Every part of a layer's store under write, reorder, select, repeat, crop and repair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from witcert import WitCertCache, schemes
from witcert.store import LayerStore
from witcert_kernels import ObservatoryLayout, ObservatoryPool, PackedPool, StoreLayout

from .models import HEAD_DIM, KV_HEADS, calibration, model

LENGTHS = (37, 3, 0, 64)
KINDS = ("int8", "int8_dither", "rtn4", "kivi2", "kivi2 without backing")


def make(kind: str, batch: int = len(LENGTHS), page_size: int = 4) -> LayerStore:
    """An empty store with every option of its kind."""
    name = kind.split()[0]
    scheme = schemes.get(name)
    common: dict[str, Any] = {"layer": 1, "calibration": calibration()[1]}
    pool: PackedPool | ObservatoryPool
    if isinstance(scheme, schemes.PackedScheme):
        layout = StoreLayout(
            KV_HEADS, HEAD_DIM, HEAD_DIM, page_size=page_size, group=8, sketch=2, witness_bands=2, bypass=1,
            dither=scheme.dither, dither_period=8,
        )  # fmt: skip
        pool = PackedPool(layout, 0, seed=5, **common)
        return LayerStore(pool, None, batch, backing=True)
    observatory = ObservatoryLayout(KV_HEADS, HEAD_DIM, HEAD_DIM, page_size=page_size, witness_bands=4, sketch=1)
    pool = ObservatoryPool(observatory, 0, **common)
    return LayerStore(pool, scheme, batch, backing="without" not in kind)


def keys(sequence: int) -> Tensor:
    """Keys of a sequence, always the same ones; its values are the keys plus one."""
    return torch.randn(320, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(100 + sequence))


def write(store: LayerStore, sequences: list[int], counts: list[int], **options: Any) -> None:
    """Append the next ``counts[i]`` tokens of ``sequences[i]`` to the store's sequence i."""
    work = zip(sequences, store.lengths, counts, strict=True)
    k = torch.cat([keys(sequence)[length : length + count] for sequence, length, count in work])
    store.write(k, k + 1, counts, **options)


def content(store: LayerStore, b: int) -> dict[str, Tensor]:
    """All that a sequence holds, by position, whatever pages and slots it lies in.

    Not v_norm, which belongs to a page and only has to be an upper bound: a crop leaves it as it was.
    """
    position = torch.arange(store.lengths[b])
    slots = store.slots(torch.full_like(position, b), position)
    out = {n: getattr(store.pool, n).flatten(0, 1)[slots] for n in store.pool.page_tensors if n != "v_norm"}
    if store.backing is not None:
        out |= {"backing k": store.backing.k.flatten(0, 1)[slots], "backing v": store.backing.v.flatten(0, 1)[slots]}
    begin = store.lengths[b] // store.group * store.group if store.group > 1 else store.lengths[b]
    tail = store.tails[b]
    if begin < store.lengths[b]:
        out |= {"tail k": tail.k[begin - tail.start :], "tail v": tail.v[begin - tail.start :]}
    if store.exact_pages is not None:
        page_size = store.pool.layout.page_size
        slot = store.exact_pages[b][:, position // page_size].to(torch.int64)
        out["is exact"] = slot >= 0
        for name, exact in (("exact k", store.pool.exact.k), ("exact v", store.pool.exact.v)):
            values = (
                exact[slot.clamp_min(0), position % page_size] if len(exact) else exact.new_zeros(*slot.shape, HEAD_DIM)
            )
            out[name] = values.masked_fill((slot < 0)[..., None], 0.0)
    return out


def assert_same(store: LayerStore, b: int, other: LayerStore, c: int) -> None:
    ours, theirs = content(store, b), content(other, c)
    for name in ours | theirs:
        assert torch.equal(ours[name], theirs[name]), name


def fresh(kind: str, sequence: int, length: int) -> LayerStore:
    store = make(kind, batch=1)
    write(store, [sequence], [length])
    return store


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_do_not_depend_on_chunks_batch_or_page_order(kind: str) -> None:
    store = make(kind)
    for counts in ([1, 0, 0, 30], [35, 2, 0, 1], [1, 1, 0, 33]):
        write(store, [0, 1, 2, 3], counts)
    assert store.lengths == list(LENGTHS)
    for b, length in enumerate(LENGTHS):
        assert_same(store, b, fresh(kind, b, length), 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[3, 0, 1, 2], [0, 0, 3], [2], [1, 1, 1, 1, 1, 0], [0, 1, 2, 3]])
def test_select_moves_every_part(kind: str, rows: list[int]) -> None:
    """And what is written next into one copy does not show in another."""
    store = make(kind)
    write(store, [0, 1, 2, 3], list(LENGTHS))
    store.rearrange(rows, [LENGTHS[r] for r in rows], [64 - LENGTHS[r] for r in rows])
    assert store.pads == [64 - LENGTHS[r] for r in rows]
    for b, row in enumerate(rows):
        assert_same(store, b, fresh(kind, row, LENGTHS[row]), 0)
    counts = [i + 1 for i in range(len(rows))]
    write(store, rows, counts)
    for b, row in enumerate(rows):
        assert_same(store, b, fresh(kind, row, LENGTHS[row] + counts[b]), 0)
    assert store.pool.num_pages == sum(len(pages) for pages in store.pages)
    assert sorted(p for pages in store.pages for p in pages) == list(range(store.pool.num_pages))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 3, 5, 32, 37, 64, 100])
def test_crop_leaves_no_trace(kind: str, cut: int) -> None:
    """What is left, and what is written next, is as if the removed tokens had never been there."""
    store = make(kind)
    write(store, [0, 1, 2, 3], list(LENGTHS), keep_past=True)
    left = [max(0, length - cut) for length in LENGTHS]
    store.rearrange(range(4), left, [0] * 4)
    for b in range(4):
        assert_same(store, b, fresh(kind, b, left[b]), 0)
    write(store, [0, 1, 2, 3], [9, 0, 2, 1])
    for b, more in enumerate([9, 0, 2, 1]):
        assert_same(store, b, fresh(kind, b, left[b] + more), 0)


def test_crop_into_a_quantised_group_is_refused_before_anything_changes() -> None:
    store = make("kivi2 without backing")
    write(store, [0, 1, 2, 3], list(LENGTHS))
    before = [content(store, b) for b in range(4)]
    with pytest.raises(
        ValueError, match=r"crop: got 60 tokens to keep, which splits a group of 32.*activate_past_recording"
    ):
        store.rearrange(range(4), [33, 0, 0, 60], [0] * 4)
    for b in range(4):
        after = content(store, b)
        assert all(torch.equal(before[b][name], after[name]) for name in before[b])
    store.rearrange(range(4), [32, 0, 0, 32], [0] * 4)  # between groups nothing is split
    assert_same(store, 0, fresh("kivi2 without backing", 0, 32), 0)


@pytest.mark.parametrize("kind", ["int8", "rtn4", "kivi2"])
def test_repaired_pages_hold_the_exact_bytes_and_move_with_their_sequence(kind: str) -> None:
    store = make(kind)
    write(store, [0, 1, 2, 3], list(LENGTHS))
    wanted = torch.zeros(4, KV_HEADS, store.page_table.shape[1], dtype=torch.bool)
    wanted[0, 0, [0, 9]] = wanted[3, 1, [2, 15]] = wanted[1, :, 0] = True
    assert store.repair(wanted) == 6
    assert store.repair(wanted) == 0, "a page is not paged in twice"
    assert store.repaired_pages == 6
    _assert_exact(store, [0, 1, 2, 3])
    rows = [3, 3, 0, 1]
    store.rearrange(rows, [LENGTHS[r] for r in rows], [0] * 4)
    assert store.repaired_pages == 2 + 2 + 2 + 2
    write(store, rows, [3, 5, 6, 2])
    _assert_exact(store, rows)
    assert bool(store.exact_pages[2, 0, 9] >= 0), "page 9 of sequence 0 was partly filled when it was repaired"
    store.rearrange(range(4), [8, 60, 36, 1], [0] * 4)
    _assert_exact(store, rows)
    assert store.repaired_pages == 0 + 1 + 1 + 2, "repaired pages that a crop removed are given back"


def _assert_exact(store: LayerStore, sequences: list[int]) -> None:
    page_size = store.pool.layout.page_size
    for b, sequence in enumerate(sequences):
        k = keys(sequence)
        for kv_head in range(KV_HEADS):
            for position in range(store.lengths[b]):
                slot = int(store.exact_pages[b, kv_head, position // page_size])
                if slot >= 0:
                    assert torch.equal(store.pool.exact.k[slot, position % page_size], k[position, kv_head])
                    assert torch.equal(store.pool.exact.v[slot, position % page_size], k[position, kv_head] + 1)


def test_repair_without_backing_is_refused() -> None:
    store = make("kivi2 without backing")
    write(store, [0, 1, 2, 3], list(LENGTHS))
    with pytest.raises(ValueError, match="without backing"):
        store.repair(torch.ones(4, KV_HEADS, store.page_table.shape[1], dtype=torch.bool))


@pytest.mark.parametrize(("page_size", "length"), [(64, 1), (64, 64), (64, 65), (256, 300), (16, 40), (1, 70)])
def test_bytes_are_the_account(page_size: int, length: int) -> None:
    """Allocated bytes, to the byte: whole pages, taken one at a time (64 tokens at a time if they are smaller)."""
    store = make("int8", batch=2, page_size=page_size)
    write(store, [0, 1], [length, 0])
    unit = max(page_size, 64)
    pages = -(-length // unit) * unit // page_size
    sizes = store.nbytes
    assert sizes["store"] == pages * store.pool.layout.bytes_per_page
    per_token = KV_HEADS * (HEAD_DIM + 2 * 2 + 2 + 2 + 2 * 4 + HEAD_DIM + 2 * 2)
    assert store.pool.layout.bytes_per_page == page_size * per_token + 4 * KV_HEADS
    assert sizes["backing"] == pages * page_size * KV_HEADS * 2 * HEAD_DIM * 4
    assert (sizes["exact"], sizes["tail"]) == (0, 0)
    wanted = torch.zeros(2, KV_HEADS, store.page_table.shape[1], dtype=torch.bool)
    wanted[0, 1, 0] = True
    store.repair(wanted)
    assert store.nbytes == sizes | {"exact": page_size * 2 * HEAD_DIM * 4}


def test_tails_are_counted_and_dropped() -> None:
    store = make("kivi2 without backing", batch=1)
    write(store, [0], [40])
    assert store.nbytes["tail"] == 8 * KV_HEADS * 2 * HEAD_DIM * 4
    write(store, [0], [24])
    assert store.nbytes["tail"] == 0
    assert store.nbytes["backing"] == 0


@pytest.mark.parametrize("kind", ["int8", "kivi2"])
def test_cache_operations_reach_every_layer(kind: str) -> None:
    """reorder, select (numbers and mask), repeat and crop of the cache are those of its stores."""
    cache = WitCertCache(model("llama").config, kind, backing=True, page_size=4)
    pairs = []
    for _ in cache.layers:
        k = torch.stack([keys(s)[:40] for s in range(3)]).transpose(1, 2)
        pairs.append((k, k + 1))
    cache.preload(pairs)

    known = [keys(s)[0] for s in range(3)]

    def rows() -> list[list[int]]:
        """Which sequence each one is, by its first key, in every layer."""
        return [
            [
                next(s for s in range(3) if torch.equal(content(layer.store, b)["backing k"][0], known[s]))
                for b in range(layer.batch_size)
            ]
            for layer in cache.layers
        ]

    cache.reorder_cache(torch.tensor([2, 0, 2]))
    assert rows() == [[2, 0, 2]] * 2
    cache.batch_repeat_interleave(2)
    assert rows() == [[2, 2, 0, 0, 2, 2]] * 2
    cache.batch_select_indices(torch.tensor([True, False, True, False, False, True]))
    assert rows() == [[2, 0, 2]] * 2
    cache.batch_select_indices(torch.tensor([1, -1]))
    assert rows() == [[0, 2]] * 2
    cache.crop(0)
    cache.crop(torch.tensor(-7))  # what assisted decoding passes
    assert [layer.store.lengths for layer in cache.layers] == [[33, 33]] * 2
    assert all(type(length) is int for layer in cache.layers for length in layer.store.lengths)
    assert cache.get_seq_length() == 33
    for indices in (torch.tensor([0, 2]), torch.tensor([-3]), torch.tensor([], dtype=torch.int64)):
        with pytest.raises(ValueError, match="wants numbers of the 2 sequences"):
            cache.reorder_cache(indices)
    assert rows() == [[0, 2]] * 2
    with pytest.raises(ValueError, match="repeats"):
        cache.batch_repeat_interleave(0)
    with pytest.raises(ValueError, match="crop: got 5, wants 0 or a negative number"):
        cache.crop(5)
    cache.crop(-1000)
    assert cache.get_seq_length() == 0


def test_operations_on_an_empty_cache_do_nothing() -> None:
    cache = WitCertCache(model("llama").config)
    cache.reorder_cache(torch.tensor([3]))
    cache.batch_repeat_interleave(4)
    cache.crop(-1)
    assert cache.get_seq_length() == 0
    assert cache.batch_size == -1
