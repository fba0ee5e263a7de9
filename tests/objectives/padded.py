"""The second way to compute every loss: padded [G, R] matrices and a mask, straight from the formulas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LENGTHS = (3, 1, 7, 4, 2)
MAX_TOKENS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A seeded float64 group with one response of length 1 and ratios on both sides of every clip bound."""

    logprobs: list[Tensor]
    old: list[Tensor]
    ref: list[Tensor]
    advantages: Tensor


def make_group(seed: int = 0, *, spread: float = 0.5, lengths: tuple[int, ...] = LENGTHS) -> Group:
    generator = torch.Generator().manual_seed(seed)

    def noise(length: int, scale: float) -> Tensor:
        return scale * torch.randn(length, generator=generator, dtype=torch.float64)

    base = [-2.0 + noise(length, 0.5) for length in lengths]
    return Group(
        logprobs=[x.clone().requires_grad_() for x in base],
        old=[x + noise(len(x), spread) for x in base],
        ref=[x + noise(len(x), spread) for x in base],
        advantages=noise(len(lengths), 1.0),
    )


def pad(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """[R_i] each to [G, R] and a float mask. Padding is 0, so that a wrongly counted position shows."""
    width = max(len(x) for x in tensors)
    rows = [torch.cat([x, x.new_zeros(width - len(x))]) for x in tensors]
    mask = torch.stack([(torch.arange(width) < len(x)).double() for x in tensors])
    return torch.stack(rows), mask


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    value = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        value = torch.where(advantages < 0, torch.maximum(value, dual * advantages), value)
    return value


def kl(logp: Tensor, old: Tensor, ref: Tensor, estimator: str, weighted: bool) -> Tensor:
    ratio = torch.exp(ref - logp)
    value = {"k1": -ratio.log(), "k2": 0.5 * ratio.log() ** 2, "k3": ratio - ratio.log() - 1}[estimator]
    if weighted:
        weight = torch.exp(logp - old)
        value = value * (weight.detach() if estimator == "k2" else weight)
    return value


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    return ((values * mask).sum(1) / mask.sum(1)).mean()


def fixed_length(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / (mask.shape[0] * MAX_TOKENS)


def partitions(items: list[int]) -> list[list[list[int]]]:
    """Every way to split a group over lanes."""
    if not items:
        return [[]]
    first, rest = items[0], items[1:]
    found = []
    for part in partitions(rest):
        found.append([[first], *part])
        found.extend([*part[:i], [first, *lane], *part[i + 1 :]] for i, lane in enumerate(part))
    return found
