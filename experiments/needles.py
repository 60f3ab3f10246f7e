"""Needle prompts answered over compressed caches, each from the same exact keys of its prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments import decoding, model
from witcert import haystack
from witcert.configuration import CalibrationLike
from witcert.demo import Run, answer, prefill
from witcert.schemes import Scheme
from witcert_kernels import StoreLayout

Array = NDArray[np.float64]
NEW_TOKENS = 16
SPECS = tuple(
    haystack.Spec(f"{city.lower()}-{tokens}", city, number, tokens, depth, paragraph)
    for city, number, tokens, depth, paragraph in (
        ("Lima", "4817", 400, 0.5, 0),
        ("Bergen", "9352", 500, 0.1, 3),
        ("Quito", "2679", 600, 0.9, 6),
        ("Tunis", "7148", 700, 0.3, 9),
        ("Riga", "5036", 400, 0.7, 12),
        ("Perth", "8613", 500, 0.2, 15),
        ("Dakar", "1974", 600, 0.4, 18),
        ("Kyoto", "6480", 700, 0.8, 21),
    )
)
UNCOMPRESSED = "uncompressed"
SEED = 0
DESCRIPTION = (
    "one made-up number in a text of witcert.haystack, then asked for; greedy, right where it is in the answer"
)


@dataclass(frozen=True)
class Configuration:
    """A cache that is no registered scheme with the shipped calibration."""

    scheme: str | Scheme
    calibration: CalibrationLike | None = None


@dataclass(frozen=True)
class Answer:
    """A run, the gate's τ (None: no gate), and bytes of a page: keys and values of one kv head, the model's dtype."""

    run: Run
    tau: float | None
    page_bytes: int

    def of(self, name: str) -> Array:
        """`meter`, `eform` or `true_tv` of its cells."""
        return np.asarray(self.run.cells[name], dtype=np.float64)

    @property
    def paged_in(self) -> int:
        """Bytes that the gate paged in."""
        return self.run.pages_repaired * self.page_bytes


class Answers:
    """Answers by scheme and τ."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, float | None], list[Answer]] = {}

    def add(self, scheme: str, answer: Answer) -> None:
        """One prompt's."""
        self._found.setdefault((scheme, answer.tau), []).append(answer)

    def __call__(self, scheme: str, tau: float | None = None) -> list[Answer]:
        """One of each prompt."""
        return self._found[scheme, tau]

    def right(self, scheme: str, tau: float | None = None) -> list[bool]:
        """Which prompts are answered."""
        return [answer.run.right for answer in self(scheme, tau)]

    def cells(self, scheme: str, tau: float | None, name: str) -> list[Array]:
        """A cell's number, prompt by prompt."""
        return [answer.of(name) for answer in self(scheme, tau)]

    def violations(self) -> tuple[int, int]:
        """(cells whose meter is below the truth, cells)."""
        pairs = [(a.of("meter"), a.of("true_tv")) for group in self._found.values() for a in group]
        return sum(int((~(meter >= true)).sum()) for meter, true in pairs), sum(len(meter) for meter, _ in pairs)

    def over(self) -> tuple[int, int]:
        """(cells above τ behind a certified gate, cells)."""
        meters = [
            (a.of("meter"), tau)
            for (_, tau), group in self._found.items()
            if tau is not None and tau < 1
            for a in group
        ]
        return sum(int((meter > tau).sum()) for meter, tau in meters), sum(len(meter) for meter, _ in meters)


def ask(
    specs: Sequence[haystack.Spec],
    plan: Iterable[tuple[str, float | None]],
    new_tokens: int,
    configurations: Mapping[str, Configuration] | None = None,
) -> Answers:
    """Answer every prompt uncompressed and under each (scheme, τ).

    A scheme is a name of `configurations` or of `witcert.schemes`; a dither's key is `SEED` plus the prompt's number.
    """
    network, tokenizer = model.load()
    fitted, answers, known = decoding.calibration(), Answers(), configurations or {}
    plan = [(UNCOMPRESSED, None), *plan]
    for i, spec in enumerate(specs):
        prompt = haystack.prompt(tokenizer, spec)
        prefix = prefill(network, prompt.input_ids)
        k, v = prefix.layers[0]
        page_bytes = StoreLayout.page_size * (k.shape[-1] + v.shape[-1]) * k.element_size()
        for name, tau in plan:
            made = known.get(name, Configuration(name, fitted))
            seed = SEED + i if made.scheme == "int8_dither" else None
            run = answer(
                network,
                tokenizer,
                prompt,
                prefix,
                made.scheme,
                tau,
                made.calibration,
                new_tokens,
                lambda *_: None,
                seed,
            )
            answers.add(name, Answer(run, tau, page_bytes))
    return answers
