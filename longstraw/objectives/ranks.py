"""The size of a step's groups over all data-parallel ranks, for means over the global token count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist

from longstraw.errors import ConfigError
from longstraw.objectives.size import GroupSize


def size_over_ranks(
    sizes: Iterable[GroupSize],
    *,
    max_tokens: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> GroupSize:
    """The size of all groups of a step on all ranks. Every rank calls it, also one without a group.

    Gradients are averaged over data-parallel replicas. A mean over the responses or tokens of all ranks is that
    average only if each rank's loss is multiplied by the number of replicas: the result's `replicas` does it, in every
    loss that takes the size.

    Args:
        sizes: of this rank's groups; may be empty.
        max_tokens: the generation budget in tokens, the same on every rank; needed where `sizes` may be empty and
            a fixed-length average is wanted.
        group: the replicas, or None for all processes. Without torch.distributed there is one.
        device: where the counts are reduced: "cuda" for NCCL.

    Raises:
        ConfigError: sizes with different budgets, or another one than `max_tokens`.
    """
    mine = list(sizes)
    budgets = {size.max_tokens for size in mine} | ({max_tokens} if max_tokens is not None else set())
    if len(budgets) > 1:
        raise ConfigError(f"max_tokens differs between groups: {budgets}; the budget is one constant of the run")
    counts = [sum(getattr(size, name) for size in mine) for name in ("responses", "tokens", "filtered")]
    replicas = 1
    if dist.is_available() and dist.is_initialized():
        totals = torch.tensor(counts, dtype=torch.int64, device=device)
        dist.all_reduce(totals, group=group)
        counts = [int(count) for count in totals]
        replicas = dist.get_world_size(group)
    responses, tokens, filtered = counts
    whole = GroupSize(responses=responses, tokens=tokens, filtered=filtered, max_tokens=next(iter(budgets), None))
    return replace(whole, replicas=replicas)
