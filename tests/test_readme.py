"""The README says what is there: its names, its code, and the numbers of the last measured demo."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from witcert.demo import Demo, Fidelity
from witcert_ref.spec import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = json.loads((ROOT / "bench/results/demo.json").read_text(encoding="utf-8"))


class Measured(Demo):
    """The demo whose numbers are kept."""

    def summary(self) -> list[dict[str, Any]]:
        """As it was printed."""
        return list(MEASURED["summary"])


def test_the_table_is_the_one_that_the_demo_printed() -> None:
    demo = Measured([], MEASURED["meta"])
    lines = ["| " + " | ".join(cells) + " |" for cells in (demo.header, *demo.rows())]
    table = re.search(r"^## What the demo prints\n\n((?:\|.*\n)+)\n(.*)$", README, re.MULTILINE)
    assert table is not None
    head, _, *rows = table[1].splitlines()
    assert [head, *rows] == lines
    assert table[2] == f"{Fidelity(**MEASURED['fidelity'])}."


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(witcert(?:_kernels|_ref)?(?:\.\w+)+)`", README))))
def test_every_name_exists(name: str) -> None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return
    raise AssertionError(name)


def test_what_is_not_proved_yet_is_counted() -> None:
    spec = load()
    assert f"{len(spec.theorems)} proved and {len(spec.pending)} pending" in README


def test_the_ops_code_runs() -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "quantize_(" in block)
    torch.manual_seed(0)
    k, v = torch.randn(2, 20, 8, 128)
    given: dict[str, Any] = {
        "k": k, "v": v, "slots": torch.arange(20), "q": torch.randn(1, 32, 128),
        "page_table": torch.arange(5, dtype=torch.int32)[None], "seq_lens": torch.tensor([20], dtype=torch.int32),
    }  # fmt: skip
    exec(code, given)
    assert 0 < float(given["cert"].meter.max()) < 1 and given["out"].shape == (1, 32, 128)
