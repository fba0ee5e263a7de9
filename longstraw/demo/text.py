"""Prompts for the demo: long real text that every Python carries, a fact hidden in it, and a question."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from longstraw.errors import ConfigError

_PLACES = ("archive", "library", "museum", "harbour", "observatory", "mill", "theatre", "station")
_QUESTION = "What is the access code of the {place}? Answer with the code only."
_FACT = "The access code of the {place} is {code}."
# Where the chat template's own text is cut in two, to put the document between.
_DOCUMENT = "<the document>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One prompt and the answer it asks for.

    Attributes:
        prompt_ids: int64 [P], chat template included, ending where the assistant's turn begins.
        code: the digits that a right answer gives.
        place: what they open.
        depth: where in the document the fact stands, 0 to 1.
    """

    prompt_ids: Tensor
    code: str
    place: str
    depth: float


def make_task(tokenizer: Any, prompt_tokens: int, seed: int) -> Task:
    """A prompt of exactly `prompt_tokens` tokens; the same seed gives the same text, fact and place in it.

    The text is Python's language reference (`pydoc_data.topics`), its topics shuffled. Raises ConfigError if
    the prompt is too short for the question, or longer than the text reaches.
    """
    rng = random.Random(seed)
    place, code, depth = rng.choice(_PLACES), f"{rng.randrange(1000, 10_000)}", rng.uniform(0.2, 0.8)
    names = sorted(topics)
    rng.shuffle(names)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    question = _QUESTION.format(place=place)
    message = f"Read this text.\n\n{_DOCUMENT}\n\n{question}"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    before, after = chat.split(_DOCUMENT)
    head, tail = encode(before), encode(after)
    fact = encode("\n\n" + _FACT.format(place=place, code=code) + "\n\n")
    room = prompt_tokens - len(head) - len(tail) - len(fact)
    if room < 1:
        least = prompt_tokens - room + 1
        raise ConfigError(f"--prompt-tokens {prompt_tokens} leaves no room for text; use at least {least}")
    text = _first_tokens([topics[name] for name in names], room, encode)
    if len(text) < room:
        raise ConfigError(
            f"--prompt-tokens {prompt_tokens} is more than Python's documentation has here; "
            f"use at most {prompt_tokens - room + len(text)}"
        )
    cut = int(room * depth)
    ids = [*head, *text[:cut], *fact, *text[cut:], *tail]
    return Task(prompt_ids=torch.tensor(ids), code=code, place=place, depth=depth)


def _first_tokens(texts: Sequence[str], count: int, encode: Callable[[str], list[int]]) -> list[int]:
    tokens: list[int] = []
    for text in texts:
        if len(tokens) >= count:
            break
        tokens += encode(text + "\n\n")
    return tokens[:count]
