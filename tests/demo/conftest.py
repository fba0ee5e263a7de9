"""A tokenizer for the demo's tests: one token a character, all of them below 128."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


class Letters:
    """As much of a transformers tokenizer as the demo uses."""

    eos_token_id = 3
    vocab_size = 128

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) % self.vocab_size for letter in text]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        return f"<user>{messages[0]['content']}<assistant>"

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(token) for token in tokens if token != self.eos_token_id)


@pytest.fixture
def letters() -> Letters:
    return Letters()
