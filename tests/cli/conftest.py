"""Tiny models on disk, and the command run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from longstraw.cli import app


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama with tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random one-layer mixture, whose experts' width is no multiple of 16 bytes in any dtype."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=16,
        moe_intermediate_size=21,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    folder = tmp_path_factory.mktemp("tiny-mixture")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def invoke() -> Callable[..., object]:
    """Runs `longstraw ARGUMENTS` and returns typer's result; errors that the command raises stay in it."""
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])
