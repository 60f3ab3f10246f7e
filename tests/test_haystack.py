"""The needle prompts, the texts behind them, and the held-out texts."""

import re
from importlib.resources import files
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from witcert import haystack

SmolLM2 = tuple[PreTrainedModel, PreTrainedTokenizerBase]


class Words:
    """A tokenizer with one token a word and no chat template."""

    chat_template = None

    def __init__(self, tokens_per_word: int = 1) -> None:
        self.tokens_per_word = tokens_per_word

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        assert return_tensors == "pt"
        return {"input_ids": torch.zeros(1, len(text.split()) * self.tokens_per_word, dtype=torch.int64)}


def words_of(name: str) -> list[str]:
    return (files("witcert") / "data" / name).read_text(encoding="utf-8").split()


def test_each_needle_stands_once_in_its_prompt_at_its_depth() -> None:
    for prompt in haystack.prompts(Words()):
        [message] = prompt.messages
        content = message["content"]
        assert content.count(prompt.needle) == content.count(prompt.answer) == 1
        assert content.endswith(prompt.question)
        before, after = content.split(prompt.needle)
        assert len(before) / len(before + after) == pytest.approx(prompt.depth, abs=0.07)


def test_needles_are_at_several_depths_and_ask_for_different_numbers() -> None:
    depths = sorted(spec.depth for spec in haystack.SPECS)
    assert depths[0] <= 0.2 and depths[-1] >= 0.7 and len(set(depths)) == len(depths)
    for field in ("id", "city", "answer", "paragraph"):
        assert len({getattr(spec, field) for spec in haystack.SPECS}) == len(haystack.SPECS)


def test_no_number_competes_with_a_needle() -> None:
    assert not re.search(r"\d", " ".join(words_of("haystack.txt")))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The number of the house in Lisbon is 7421.", True),
        ("7421", True),
        ("It is 74210.", False),
        ("It is 17421.", False),
        ("It is 7,421.", False),
        ("It is 742", False),
        ("", False),
    ],
)
def test_an_answer_counts_only_as_a_number_of_its_own(text: str, right: bool) -> None:
    assert haystack.prompts(Words(), quick=True)[0].is_answered_by(text) is right


def test_a_prompt_fills_its_budget_and_keeps_to_it() -> None:
    for spec, prompt in zip(haystack.SPECS, haystack.prompts(Words()), strict=True):
        assert spec.tokens - 60 < prompt.tokens <= spec.tokens


def test_a_budget_that_holds_no_filler_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tokenizer: needs more than 400 tokens for prompt lisbon-400"):
        haystack.prompts(Words(tokens_per_word=20))


def test_the_texts_are_long_enough_and_none_repeats_or_shares_a_passage(prose: str, source_code: str) -> None:
    texts = {
        "haystack": words_of("haystack.txt"),
        "calibration": words_of("calibration.txt"),
        "prose": prose.split(),
        "source code": source_code.split(),
    }
    assert len(texts["haystack"]) >= 2600 and len(texts["calibration"]) >= 3500
    seen: dict[tuple[str, ...], str] = {}
    for name, words in texts.items():
        for i in range(len(words) - 11):
            passage = tuple(words[i : i + 12])
            if name != "source code":
                assert passage not in seen, f"{name} repeats {seen[passage]}: {' '.join(passage)}"
            seen[passage] = name


@pytest.mark.model
def test_lengths_in_the_default_models_tokens(smollm2: SmolLM2, prose: str, source_code: str) -> None:
    _, tokenizer = smollm2
    full, quick = haystack.prompts(tokenizer), haystack.prompts(tokenizer, quick=True)
    assert [prompt.id for prompt in quick] == [prompt.id for prompt in full[:2]]
    lengths = [prompt.tokens for prompt in full]
    assert all(short < long for short, long in pairwise(lengths))
    assert 350 < lengths[0] <= 400 < 750 < lengths[1] <= 800 and 1700 < lengths[-1] <= 1800
    assert all(prompt.input_ids.dtype == torch.int64 for prompt in full)
    assert all(len(tokenizer(text)["input_ids"]) >= 2100 for text in (prose, source_code))


@pytest.mark.model
@pytest.mark.parametrize("number", range(len(haystack.SPECS)), ids=[spec.id for spec in haystack.SPECS])
def test_the_uncompressed_model_answers(smollm2: SmolLM2, number: int) -> None:
    model, tokenizer = smollm2
    prompt = haystack.prompts(tokenizer)[number]
    output = model.generate(
        prompt.input_ids, attention_mask=torch.ones_like(prompt.input_ids), max_new_tokens=16, do_sample=False
    )
    assert prompt.is_answered_by(tokenizer.decode(output[0, prompt.tokens :]))
