"""Sampling: one prefill, log-probs of the policy, responses that end where they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longstraw.demo.ordinary import ordinary_logprobs, ordinary_step
from longstraw.demo.sampling import sample_group
from longstraw.verify import clone_gradients, compare_gradients, plain_gradients, plain_logprobs

EOS = 7


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.5,
        pad_token_id=0,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).double().eval()


def sample(model: Any, *, group: int = 8, max_tokens: int = 12, **settings: Any) -> list[torch.Tensor]:
    settings = {"temperature": 1.0, "eos_token_id": EOS, **settings}
    generator = torch.Generator().manual_seed(3)
    prompt = torch.arange(20) % 11
    return sample_group(model, prompt, group=group, max_tokens=max_tokens, generator=generator, **settings)


def test_responses_end_with_the_first_eos_or_at_the_limit(model: Any) -> None:
    responses = sample(model, group=32)
    lengths = {len(response) for response in responses}
    assert len(lengths) > 1
    for response in responses:
        assert EOS not in response[:-1]
        assert len(response) == 12 or response[-1] == EOS


def test_the_prompt_runs_once(model: Any) -> None:
    rows: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(lambda _, args: rows.append(tuple(args[0].shape)))
    try:
        sample(model, group=5, max_tokens=4, eos_token_id=-1)
    finally:
        hook.remove()
    assert rows == [(1, 20), (5, 1), (5, 1), (5, 1)]


def test_tokens_follow_the_model(model: Any) -> None:
    """Nearly greedy sampling through the repeated cache takes the tokens that plain rows find likeliest."""
    prompt = torch.arange(20) % 11
    for response in sample(model, group=3, max_tokens=6, temperature=1e-4):
        for end in range(1, len(response) + 1):
            candidates = [
                plain_logprobs(model, prompt, torch.cat([response[: end - 1], torch.tensor([token])]))[-1]
                for token in range(11)
            ]
            assert int(torch.stack(candidates).argmax()) == int(response[end - 1])


def test_the_same_seed_gives_the_same_responses(model: Any) -> None:
    assert [r.tolist() for r in sample(model)] == [r.tolist() for r in sample(model)]


def test_the_ordinary_step_has_plain_autograds_gradient(model: Any) -> None:
    prompt = torch.arange(20) % 11
    responses = [torch.tensor([1, 2, 3, EOS]), torch.tensor([EOS]), torch.tensor([4, 4])]
    weights = [0.5, -1.0, 2.0]
    model.zero_grad()
    expected = plain_gradients(model, prompt, responses, lambda i, lp: weights[i] * lp.sum(), temperature=0.7)
    reference = clone_gradients(model)
    model.zero_grad()
    found: list[torch.Tensor] = []

    def loss(logprobs: list[torch.Tensor]) -> torch.Tensor:
        found.extend(lp.detach() for lp in logprobs)
        return torch.stack([w * lp.sum() for w, lp in zip(weights, logprobs, strict=True)]).sum()

    ordinary_step(model, prompt, responses, loss, temperature=0.7)
    for ours, theirs in zip(found, expected, strict=True):
        # ordinary_logprobs computes them in float32.
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    assert compare_gradients(clone_gradients(model), reference)[0].relative < 1e-5
    assert not model.training
    assert not model.model.layers[0].gradient_checkpointing
    model.zero_grad()


def test_the_ordinary_step_checkpoints(model: Any) -> None:
    """Each layer runs twice: once forward, once again in the backward."""
    prompt, responses = torch.arange(20) % 11, [torch.tensor([1, 2])]
    runs: list[int] = []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    try:
        ordinary_step(model, prompt, responses, lambda lps: lps[0].sum(), temperature=1.0)
        assert len(runs) == 2
        runs.clear()
        ordinary_logprobs(model, prompt, responses, temperature=1.0)[0].sum().backward()
        assert len(runs) == 1
    finally:
        hook.remove()
        model.zero_grad()
