"""Tiny random models, groups of branches, and the same step taken by plain autograd and by the runtime."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from longstraw import Runtime

VOCABULARY = 97

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "olmo2": {},
    "phi3": {},
    "smollm3": {},
    "starcoder2": {"sliding_window": None},
}
"""Every supported model type, and what a tiny one needs beyond the common sizes."""

SMALL: dict[str, Any] = {
    "pages": {"tokens": 16, "block_tokens": 16},
    "capture": {"chunk_tokens": 23},
    "replay": {"lane_tokens": 14},
    "tiers": [{"kind": "host", "budget": "64MiB"}],
}
"""Settings that cut a prompt of some dozens of tokens into several chunks, pages and lanes."""

Loss = Callable[[int, Tensor, Tensor | None], Tensor]
"""The loss of branch i, from its log-probs [R_i] and, if computed, its entropies [R_i]."""


def build(kind: str = "qwen3", *, dtype: torch.dtype = torch.float64, seed: int = 0, **config: Any) -> Any:
    """A random causal LM in training mode, whose attention is far from uniform and whose biases are not zero."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }
    if kind == "starcoder2":
        sizes |= {"residual_dropout": 0.0, "embedding_dropout": 0.0}
    settings = AutoConfig.for_model(kind, **(sizes | FAMILIES.get(kind, {}) | config))
    model = AutoModelForCausalLM.from_config(settings)
    randomize(model, seed)
    return model.to(dtype).train()


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Seeded values for every parameter: wide matrices, norms around 1, biases away from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.copy_(noise * 0.2)
            else:
                parameter.copy_(1 + noise * 0.1)


def add_lora(model: Any, seed: int = 1, **options: Any) -> Any:
    """LoRA on attention and MLP, the base frozen, B not zero."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear"} | options
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.2).to(model.dtype)
    return wrapped


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One prompt [P], its responses [R_i], and the loss of each branch."""

    prompt: Tensor
    responses: list[Tensor]
    loss: Loss


def make_group(prompt_tokens: int = 61, lengths: Sequence[int] = (7, 1, 12, 5), seed: int = 0) -> Group:
    """A random group whose loss weighs every token differently and is not linear in the log-probs."""
    generator = torch.Generator().manual_seed(1000 + seed)
    prompt = torch.randint(VOCABULARY, (prompt_tokens,), generator=generator)
    responses = [torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths]
    weights = [torch.randn(2, n, generator=generator, dtype=torch.float64) for n in lengths]

    def loss(i: int, logprobs: Tensor, entropies: Tensor | None) -> Tensor:
        first, second = weights[i].to(logprobs)
        value = (first * logprobs).sum() + 0.05 * logprobs.square().sum()
        return value if entropies is None else value + (second * entropies).sum()

    return Group(prompt=prompt, responses=responses, loss=loss)


def plain_logprobs(
    model: Any, prompt: Tensor, response: Tensor, *, temperature: float = 1.0, row_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [R] of one row with its whole graph, straight from the model's logits.

    `row_tokens` pads the row on the right, where causality hides it from every token that counts.
    """
    device = next(model.parameters()).device
    prompt, response = prompt.to(device), response.to(device)
    row = torch.cat([prompt, response])
    if row_tokens is not None:
        row = torch.cat([row, row.new_zeros(row_tokens - len(row))])
    logits = model(input_ids=row[None], use_cache=False).logits[0, len(prompt) - 1 : len(prompt) - 1 + len(response)]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_p = wide.log_softmax(-1)
    return log_p.gather(-1, response[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def plain_step(
    model: Any,
    groups: Iterable[Group],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    row_tokens: int | None = None,
    extra: Callable[[Any], Tensor] | None = None,
) -> list[list[Tensor]]:
    """Add to `.grad` the gradient of all branches' losses, one unpadded row at a time. Returns the log-probs."""
    found: list[list[Tensor]] = []
    for group in groups:
        found.append([])
        for i, response in enumerate(group.responses):
            logprobs, entropies = plain_logprobs(
                model, group.prompt, response, temperature=temperature, row_tokens=row_tokens
            )
            loss = group.loss(i, logprobs, entropies if entropy else None)
            (loss if extra is None else loss + extra(model)).backward()
            found[-1].append(logprobs.detach())
    return found


def lane_loss(group: Group, lane: Any) -> Tensor:
    """The losses of a lane's branches, summed."""
    entropies = lane.entropies or [None] * len(lane.indices)
    return torch.stack(
        [group.loss(i, x, h) for i, x, h in zip(lane.indices, lane.logprobs, entropies, strict=True)]
    ).sum()


def replay_group(txn: Any, group: Group, extra: Callable[[], Tensor] | None = None) -> list[Tensor]:
    """Replay a group in an open transaction, backward on every lane. Returns the log-probs."""
    found: dict[int, Tensor] = {}
    for lane in txn.replay(group.responses):
        loss = lane_loss(group, lane)
        lane.backward(loss if extra is None else loss + len(lane.indices) * extra())
        found.update(zip(lane.indices, (x.detach() for x in lane.logprobs), strict=True))
    return [found[i] for i in range(len(group.responses))]


def paged_step(
    runtime: Runtime,
    groups: Sequence[Group],
    *,
    row_tokens: int | None = None,
    extra: Callable[[], Tensor] | None = None,
) -> list[list[Tensor]]:
    """The same step through transactions. Returns the log-probs."""
    found = []
    with runtime.accumulate() if len(groups) > 1 else nullcontext():
        for group in groups:
            with runtime.transaction(group.prompt, row_tokens=row_tokens) as txn:
                found.append(replay_group(txn, group, extra))
    return found


def settings(**changes: Mapping[str, Any] | Any) -> dict[str, Any]:
    """`SMALL` with keys of its sections replaced."""
    merged = copy.deepcopy(SMALL)
    for key, value in changes.items():
        merged[key] = merged.get(key, {}) | value if isinstance(value, Mapping) else value
    return merged


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of every parameter's `.grad`, by name; tied parameters once."""
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def worst(model: nn.Module, reference: nn.Module) -> list[tuple[float, str]]:
    """Relative error of every parameter's gradient, the worst first. A gradient on one side only is infinitely off."""
    ours, theirs = gradients(model), gradients(reference)
    assert ours.keys() == theirs.keys()
    whole = sum(float(g.double().square().sum()) for g in theirs.values() if g is not None) ** 0.5
    found = []
    for name, expected in theirs.items():
        got = ours[name]
        if (got is None) != (expected is None):
            found.append((float("inf"), name))
        elif got is not None and expected is not None:
            # What is below the rounding of the whole gradient is noise on both sides.
            scale = max(float(expected.double().norm()), whole * 1e-12)
            found.append((float((got.double() - expected.double()).norm()) / scale, name))
    return sorted(found, reverse=True)


def assert_parity(model: nn.Module, reference: nn.Module, tolerance: float = 1e-6) -> None:
    """Every parameter's gradient, by name, is that of plain autograd."""
    found = worst(model, reference)
    trained = [p for p in reference.parameters() if p.requires_grad]
    assert len(found) == len(trained), "some trained parameter has no gradient in the reference"
    assert found[0][0] <= tolerance, "\n".join(f"{error:.2e} {name}" for error, name in found[:8])


def distance(model: nn.Module, reference: nn.Module) -> float:
    """Euclidean distance of the whole gradient from the reference's."""
    ours, theirs = gradients(model), gradients(reference)
    squares = [
        float((g.double() - theirs[name].double()).square().sum())  # type: ignore[union-attr]
        for name, g in ours.items()
        if g is not None
    ]
    assert squares
    return math.sqrt(sum(squares))


def check_parity(
    model: Any,
    groups: Sequence[Group],
    config: Mapping[str, Any] | None = None,
    *,
    row_tokens: int | None = None,
    tolerance: float = 1e-6,
) -> Runtime:
    """One step of `model` by the runtime against one of its copy by plain autograd: gradients and log-probs."""
    config = SMALL if config is None else config
    replay = config.get("replay", {})
    reference = copy.deepcopy(model)
    expected = plain_step(
        reference,
        groups,
        temperature=replay.get("temperature", 1.0),
        entropy=replay.get("entropy", False),
        row_tokens=row_tokens,
    )
    runtime = Runtime(model, config)
    found = paged_step(runtime, groups, row_tokens=row_tokens)
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    assert_parity(model, reference, tolerance)
    assert_idle(runtime)
    return runtime


def assert_idle(runtime: Runtime) -> None:
    """Nothing is held: no page reserved, no byte of a tier in use."""
    store = runtime._engine.store
    assert store.pages_in_use() == 0
    assert all(pager.used == 0 for pager in store.pagers)
