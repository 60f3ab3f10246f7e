"""What every test may use: the default model, Hypothesis profiles, and one thread a worker."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch and NumPy start their threads
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # before anything imports Triton, which reads it once
    os.environ.setdefault("TRITON_INTERPRET", "1")

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

DATA = Path(__file__).parent / "data"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a CUDA device the tests that need one are deselected, and pytest's last line counts them."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    if not torch.cuda.is_available():
        items[:] = [item for item in items if item not in wanting]
        config.hook.pytest_deselected(items=wanting)


@pytest.fixture(scope="session")
def smollm2() -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """SmolLM2-135M-Instruct in float32 and its tokenizer; downloaded and converted on first use."""
    from witcert import model

    return model.load()


@pytest.fixture(autouse=True)
def own_attention(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give the shared model back with the attention that it came with."""
    yield
    if "smollm2" in request.fixturenames:
        request.getfixturevalue("smollm2")[0].set_attn_implementation("sdpa")


@pytest.fixture(scope="session")
def prose() -> str:
    """A story that no calibration was fitted to; over 2100 tokens."""
    return (DATA / "prose.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def source_code() -> str:
    """A Python module that no calibration was fitted to; over 2100 tokens."""
    return (DATA / "source_code.txt").read_text(encoding="utf-8")
