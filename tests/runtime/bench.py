"""A small model with gradients from before, its runtime, and what must be true once a transaction has ended."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from longstraw import Runtime
from tests.parity.models import (
    SMALL,
    Group,
    add_lora,
    assert_idle,
    assert_parity,
    build,
    make_group,
    plain_step,
    replay_group,
)
from tests.runtime.faults import Entry, assert_undone

GROUP = make_group(61, (7, 1, 6, 5, 4))
"""In lanes of 14 tokens: two lanes of several branches each."""

MODELS = {
    "float64": lambda: build("qwen3", tie_word_embeddings=True),
    "bfloat16": lambda: build("llama", dtype=torch.bfloat16),
    "lora": lambda: add_lora(build("llama")),
}


class Mistake(Exception):
    """The user's own."""


class Bench:
    """A model with gradients from before, its runtime and a transaction on GROUP."""

    def __init__(self, kind: str = "float64", config: Mapping[str, Any] = SMALL) -> None:
        self.model = MODELS[kind]()
        self.entry = Entry(self.model)
        self.reference = copy.deepcopy(self.model)
        for ours, theirs in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            theirs.grad = None if ours.grad is None else ours.grad.clone()
        self.runtime = Runtime(self.model, config)
        self.txn = self.runtime.transaction(GROUP.prompt)
        self.tolerance = 0.1 if kind == "bfloat16" else 1e-6

    def assert_undone(self) -> None:
        assert_undone(self.runtime, self.model, self.entry)

    def assert_succeeds(self) -> None:
        """The same transaction again, now without a failure."""
        with self.txn:
            replay_group(self.txn, GROUP)
        self.assert_right(GROUP)

    def assert_right(self, *groups: Group) -> None:
        plain_step(self.reference, groups)
        assert_parity(self.model, self.reference, self.tolerance)
        assert_idle(self.runtime)
