"""Prompts: exact length, the fact and the question in it, the same for the same seed; on a tokenizer of letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from longstraw.demo.text import Task, make_task
from longstraw.errors import ConfigError


def text_of(task: Task) -> str:
    return "".join(chr(token) for token in task.prompt_ids.tolist())


@pytest.fixture
def make(letters: Any) -> Callable[..., Task]:
    return lambda prompt_tokens, seed=0: make_task(letters, prompt_tokens, seed)


@pytest.mark.parametrize("prompt_tokens", [300, 5000, 100_000])
def test_length_fact_and_question(make: Callable[..., Task], prompt_tokens: int) -> None:
    task = make(prompt_tokens)
    text = text_of(task)
    assert task.prompt_ids.shape == (prompt_tokens,)
    assert text.startswith("<user>Read this text.")
    assert text.endswith(f"What is the access code of the {task.place}? Answer with the code only.<assistant>")
    assert text.count(f"The access code of the {task.place} is {task.code}.") == 1
    assert len(task.code) == 4


def test_seeds(make: Callable[..., Task]) -> None:
    assert text_of(make(2000, seed=1)) == text_of(make(2000, seed=1))
    assert text_of(make(2000, seed=1)) != text_of(make(2000, seed=2))


def test_too_short_says_what_is_enough(make: Callable[..., Task]) -> None:
    with pytest.raises(ConfigError, match=r"--prompt-tokens 20 .* at least \d+") as caught:
        make(20)
    least = int(str(caught.value).rsplit(" ", 1)[1])
    assert len(make(least).prompt_ids) == least
    with pytest.raises(ConfigError):
        make(least - 1)


def test_too_long_says_how_much_there_is(make: Callable[..., Task]) -> None:
    with pytest.raises(ConfigError, match=r"use at most \d+") as caught:
        make(10_000_000)
    most = int(str(caught.value).rsplit(" ", 1)[1])
    assert most > 400_000
    assert len(make(most).prompt_ids) == most
