"""Runs a group of random tokens through the runtime and through plain autograd; compares the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from longstraw import Config, Runtime
from longstraw.errors import ConfigError
from longstraw.verify.gradients import (
    GradientDifference,
    clone_gradients,
    compare_gradients,
    default_tolerance,
)
from longstraw.verify.plain import plain_gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """What to run. Lengths are in tokens.

    Attributes:
        responses: branches of the group, of unequal length: from `response_tokens` down to 1.
        tolerance: the largest relative error that passes, or None for the dtype's own.
        mode: `exact`, or `detached`, which is then compared with autograd through a detached prompt.
    """

    prompt_tokens: int = 100
    responses: int = 3
    response_tokens: int = 12
    tolerance: float | None = None
    mode: Literal["exact", "detached"] = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 2), ("responses", 1), ("response_tokens", 1)):
            if getattr(self, name) < least:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} {getattr(self, name)} is too small; use at least {least}")
        if self.tolerance is not None and not self.tolerance > 0:
            raise ConfigError(f"--tolerance {self.tolerance} must be above 0; leave it out for the default")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyResult:
    """What was found.

    Attributes:
        differences: every parameter, the worst first.
        logprob_difference: the largest difference of any response token's log-prob, in nats.
        tolerance, reason: what a relative error may be, and why that much.
        config: the settings that the runtime ran with.
    """

    differences: list[GradientDifference]
    logprob_difference: float
    tolerance: float
    reason: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def failures(self) -> list[GradientDifference]:
        return [difference for difference in self.differences if not difference.relative <= self.tolerance]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": not self.failures}


def verify_model(model: Any, options: VerifyOptions) -> VerifyResult:
    """Compare every parameter's gradient of one random group with plain autograd's, row by row.

    `model` is a transformers causal LM, in evaluation mode; its `.grad` fields are empty before and after.
    Raises UnsupportedModelError where the runtime does.
    """
    device, dtype = model.device, model.dtype
    tolerance, reason = default_tolerance(dtype)
    if options.tolerance is not None:
        tolerance, reason = options.tolerance, "as asked"
    config = small_config(options)
    prompt_ids, responses = random_group(model.config.get_text_config().vocab_size, options, device)
    loss = _weighted_loss(responses, options.seed)

    model.zero_grad(set_to_none=True)
    expected = plain_gradients(model, prompt_ids, responses, loss, prompt=options.mode)
    reference = clone_gradients(model, device="cpu")
    model.zero_grad(set_to_none=True)

    found: list[Tensor] = [torch.empty(0)] * len(responses)
    with Runtime(model, config).transaction(prompt_ids) as transaction:
        for lane in transaction.replay(responses):
            for index, logprobs_R in zip(lane.indices, lane.logprobs, strict=True):
                found[index] = logprobs_R.detach()
            lane.backward(sum_of(loss(i, lp) for i, lp in zip(lane.indices, lane.logprobs, strict=True)))
    differences = compare_gradients(clone_gradients(model, device="cpu"), reference)
    model.zero_grad(set_to_none=True)
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return VerifyResult(
        differences=differences,
        logprob_difference=worst,
        tolerance=tolerance,
        reason=reason,
        config=config.to_dict(),
    )


def small_config(options: VerifyOptions) -> Config:
    """Pages, chunks and lanes so small that a short prompt crosses the borders that a long one does."""
    rows = options.prompt_tokens
    return Config.load(
        gradient={"prompt": options.mode},
        # No multiple of one another, so that chunks begin inside pages.
        capture={"chunk_tokens": max(rows // 3 - 1, 1)},
        pages={"tokens": max(rows // 5, 1), "block_tokens": max(rows // 5, 1) * 2},
        replay={"lane_tokens": options.response_tokens, "logit_block_tokens": 8},
    )


def random_group(vocab_size: int, options: VerifyOptions, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Random tokens: a prompt [P], and responses [R_i] whose lengths fall evenly to 1."""
    generator = torch.Generator().manual_seed(options.seed)

    def draw(count: int) -> Tensor:
        return torch.randint(0, vocab_size, (count,), generator=generator).to(device)

    longest, last = options.response_tokens, options.responses - 1
    lengths = [longest - round(i * (longest - 1) / last) if last else longest for i in range(last + 1)]
    return draw(options.prompt_tokens), [draw(length) for length in lengths]


def sum_of(losses: Any) -> Tensor:
    return torch.stack(list(losses)).sum()


def _weighted_loss(responses: list[Tensor], seed: int) -> Callable[[int, Tensor], Tensor]:
    """Every token's log-prob with a weight of its own, so that no two errors can cancel out."""
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = sum(len(response) for response in responses)
    weights = [torch.randn(len(response), generator=generator) / tokens for response in responses]

    def loss(index: int, logprobs_R: Tensor) -> Tensor:
        return -(logprobs_R * weights[index].to(logprobs_R)).sum()

    return loss
