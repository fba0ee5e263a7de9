"""verify_model finds nothing wrong with a right runtime, and finds a wrong one out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from longstraw import Runtime
from longstraw.errors import ConfigError
from longstraw.verify import VerifyOptions, plain_logprobs, verify_model
from longstraw.verify.check import random_group


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).double().eval()


def test_agrees_and_leaves_no_gradient(model: Any) -> None:
    result = verify_model(model, VerifyOptions(prompt_tokens=50))
    assert not result.failures
    assert result.logprob_difference < 1e-12
    assert {d.name for d in result.differences} == {name for name, _ in model.named_parameters()}
    assert all(d.norm > 0 for d in result.differences)
    assert all(p.grad is None for p in model.parameters())


def test_a_frozen_and_an_unused_parameter_have_no_gradient_on_either_side(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    result = verify_model(model, VerifyOptions(prompt_tokens=20))
    notes = {d.name: d.note for d in result.differences if d.note}
    assert notes == {
        "model.layers.0.mlp.up_proj.weight": "no gradient on either side",
        "unused": "no gradient on either side",
    }
    assert not result.failures


def test_a_detached_prompt_is_found_out(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard removed: without the sweep, most parameters are far off."""
    right = Runtime.__init__

    def detached(self: Runtime, model: Any, config: Any) -> None:
        right(self, model, config, gradient={"prompt": "detached"})

    monkeypatch.setattr(Runtime, "__init__", detached)
    result = verify_model(model, VerifyOptions(prompt_tokens=50))
    assert len(result.failures) > 10
    assert 0.01 < result.failures[0].relative < math.inf


def test_detached_is_compared_with_a_detached_prompt(model: Any) -> None:
    result = verify_model(model, VerifyOptions(prompt_tokens=50, mode="detached"))
    assert not result.failures


def test_plain_logprobs_of_both_modes_are_equal_and_their_gradients_are_not(model: Any) -> None:
    prompt, responses = random_group(61, VerifyOptions(), torch.device("cpu"))

    def run(mode: Any) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        logprobs = plain_logprobs(model, prompt, responses[0], temperature=0.7, prompt=mode)
        logprobs.sum().backward()
        return logprobs.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    exact, detached = run("exact"), run("detached")
    torch.testing.assert_close(exact[0], detached[0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(exact[1], detached[1], rtol=1e-2)


@pytest.mark.parametrize(("responses", "tokens", "lengths"), [(1, 5, [5]), (3, 12, [12, 6, 1]), (2, 1, [1, 1])])
def test_lengths_are_unequal_and_end_with_1(responses: int, tokens: int, lengths: list[int]) -> None:
    options = VerifyOptions(responses=responses, response_tokens=tokens)
    _, drawn = random_group(61, options, torch.device("cpu"))
    assert [len(response) for response in drawn] == lengths


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="--responses 0 is too small; use at least 1"):
        VerifyOptions(responses=0)
