"""Prompts: exact length, the fact and the question in it, the same for the same seed; on a tokenizer of letters."""

from __future__ import annotations

from typing import Any

import pytest

from longstraw.demo.text import Task, make_task
from longstraw.errors import ConfigError


class Letters:
    """One token a character."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        return f"<user>{messages[0]['content']}<assistant>"


def text_of(task: Task) -> str:
    return "".join(chr(token) for token in task.prompt_ids.tolist())


def make(prompt_tokens: int, seed: int = 0) -> Task:
    tokenizer: Any = Letters()
    return make_task(tokenizer, prompt_tokens, seed)


@pytest.mark.parametrize("prompt_tokens", [300, 5000, 100_000])
def test_length_fact_and_question(prompt_tokens: int) -> None:
    task = make(prompt_tokens)
    text = text_of(task)
    assert task.prompt_ids.shape == (prompt_tokens,)
    assert text.startswith("<user>Read this text.")
    assert text.endswith(f"What is the access code of the {task.place}? Answer with the code only.<assistant>")
    assert text.count(f"The access code of the {task.place} is {task.code}.") == 1
    assert len(task.code) == 4


def test_seeds() -> None:
    assert text_of(make(2000, seed=1)) == text_of(make(2000, seed=1))
    assert text_of(make(2000, seed=1)) != text_of(make(2000, seed=2))


def test_too_short_says_what_is_enough() -> None:
    with pytest.raises(ConfigError, match=r"--prompt-tokens 20 .* at least \d+") as caught:
        make(20)
    least = int(str(caught.value).rsplit(" ", 1)[1])
    assert len(make(least).prompt_ids) == least
    with pytest.raises(ConfigError):
        make(least - 1)


def test_too_long_says_how_much_there_is() -> None:
    with pytest.raises(ConfigError, match=r"use at most \d+") as caught:
        make(10_000_000)
    most = int(str(caught.value).rsplit(" ", 1)[1])
    assert most > 400_000
    assert len(make(most).prompt_ids) == most
