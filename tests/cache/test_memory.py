"""No step makes a dequantised copy of the cache."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from witcert import WitCertCache
from witcert_kernels.reader import TILE

from .models import HEAD_DIM, HEADS, KV_HEADS, model

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

TOKENS = 6 * TILE + 9


@pytest.mark.parametrize("scheme", ["int8", "rtn4"])
@pytest.mark.parametrize("tau", [None, 0.5])
def test_peak_temporary_of_a_step_is_one_tile_a_head(scheme: str, tau: float | None) -> None:
    """The largest allocation of a decode step, for tiles of float64 at most."""
    this = model("llama")
    cache = WitCertCache(this.config, scheme, tau=tau)
    keys = torch.randn(1, KV_HEADS, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(1)) / 8
    cache.preload([(keys, keys)] * len(cache.layers))
    this.set_attn_implementation("witcert")
    step = {"input_ids": torch.tensor([[3]]), "past_key_values": cache}
    with torch.inference_mode():
        this(**step)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            this(**step)
    largest = max(event.self_cpu_memory_usage for event in profiler.events())
    tile = TILE * max(KV_HEADS * HEAD_DIM, HEADS) * 8
    assert 0 < largest <= tile
    assert largest < TOKENS * KV_HEADS * HEAD_DIM * 2, "half precision keys of one layer"
    assert cache.report().repairs == 0
