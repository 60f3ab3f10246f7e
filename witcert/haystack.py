"""Needle-in-a-haystack prompts: one made-up fact in a long text, and a question that only this fact answers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch

NEEDLE = "The number of the house in {city} is {answer}."
QUESTION = "What is the number of the house in {city}?"
FRAME = "Here is a text. Read it and remember the number.\n\n{text}\n\n{question}"


@dataclass(frozen=True)
class Spec:
    """Where a needle goes: the prompt has at most `tokens` tokens, `depth` of its text before the needle."""

    id: str
    city: str
    answer: str
    tokens: int
    depth: float
    paragraph: int  # of haystack.txt, where this prompt's text begins

    @property
    def needle(self) -> str:
        return NEEDLE.format(city=self.city, answer=self.answer)

    @property
    def question(self) -> str:
        return QUESTION.format(city=self.city)


SPECS = (
    Spec("lisbon-400", "Lisbon", "7421", 400, 0.5, 0),
    Spec("geneva-800", "Geneva", "8264", 800, 0.75, 22),
    Spec("oslo-1000", "Oslo", "3958", 1000, 0.25, 25),
    Spec("havana-1250", "Havana", "5179", 1250, 0.1, 15),
    Spec("cairo-1500", "Cairo", "6043", 1500, 0.6, 20),
    Spec("vienna-1800", "Vienna", "2786", 1800, 0.4, 10),
)
QUICK = SPECS[:2]


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt ready for `model.generate`.

    messages: the chat that was rendered. input_ids: int64 [1, tokens]. depth: share of the text's sentences before
    the needle.
    """

    id: str
    messages: list[dict[str, str]]
    input_ids: torch.Tensor
    needle: str
    question: str
    answer: str
    depth: float

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]

    def is_answered_by(self, text: str) -> bool:
        """Whether `text` contains the answer as a number of its own, not as part of a longer one."""
        return re.search(rf"(?<!\d){re.escape(self.answer)}(?!\d)", text) is not None


def prompts(tokenizer: Any, quick: bool = False) -> list[NeedlePrompt]:
    """The demo's prompts, shortest first: six of about 400 to 1800 tokens, or the first two.

    tokenizer: a transformers tokenizer; its chat template is used where it has one.
    """
    return [prompt(tokenizer, spec) for spec in (QUICK if quick else SPECS)]


def prompt(tokenizer: Any, spec: Spec) -> NeedlePrompt:
    """One prompt. Raises ValueError where its tokens hold no text at all."""
    sentences = _sentences(spec.paragraph)
    # the longest text that fits, found by halving: a sentence's tokens depend on its neighbours
    low, high = 0, len(sentences)
    while low < high:
        middle = (low + high + 1) // 2
        if _encode(tokenizer, _messages(spec, sentences[:middle])).shape[1] <= spec.tokens:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        raise ValueError(f"tokenizer: needs more than {spec.tokens} tokens for prompt {spec.id} without any filler")
    messages = _messages(spec, sentences[:low])
    return NeedlePrompt(
        id=spec.id,
        messages=messages,
        input_ids=_encode(tokenizer, messages),
        needle=spec.needle,
        question=spec.question,
        answer=spec.answer,
        depth=round(spec.depth * low) / low,
    )


def _sentences(start: int) -> list[str]:
    """The haystack's sentences, each with the white space after it, from paragraph `start` round to the one before."""
    text = (files("witcert") / "data" / "haystack.txt").read_text(encoding="utf-8")
    paragraphs = text.strip().split("\n\n")

    def split() -> Iterator[str]:
        for paragraph in paragraphs[start:] + paragraphs[:start]:
            *head, last = re.split(r"(?<=[.!?])\s+", paragraph)
            yield from (sentence + " " for sentence in head)
            yield last + "\n\n"

    return list(split())


def _messages(spec: Spec, sentences: list[str]) -> list[dict[str, str]]:
    before = round(spec.depth * len(sentences))
    text = "".join([*sentences[:before], spec.needle + " ", *sentences[before:]]).strip()
    return [{"role": "user", "content": FRAME.format(text=text, question=spec.question)}]


def _encode(tokenizer: Any, messages: list[dict[str, str]]) -> torch.Tensor:
    if tokenizer.chat_template is None:
        encoded = tokenizer(messages[0]["content"] + "\n\nAnswer:", return_tensors="pt")
    else:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    return encoded["input_ids"]
