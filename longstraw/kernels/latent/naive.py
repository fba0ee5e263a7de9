"""The oracle of latent attention: plain autograd over dense tensors, written for reading."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def naive_latent_attention(
    q_SHC: Tensor,
    own_SC: Tensor,
    prefix_TC: Tensor,
    lengths: Sequence[int],
    *,
    value_dim: int,
    scale: float,
    selection_SK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention with one key and value head, whose values are the first `value_dim` elements of the keys.

    Row `i` of a branch sees the prefix rows and rows `0..i` of its own branch, of these only the selected ones if
    there is a selection, and nothing of another branch.

    Args:
        q_SHC: [S, num_heads, C], the branches one after another along S.
        own_SC, prefix_TC: latent rows of the branches and of the prefix.
        lengths: tokens of each branch; they add up to S.
        value_dim: at most C.
        scale: factor of the scores.
        selection_SK: tokens that each query sees, counted from the prefix's first; any larger number is none.

    Returns:
        out [S, num_heads, value_dim] and log-sum-exp [S, num_heads], in the inputs' dtype.
    """
    rows = torch.cat([prefix_TC, own_SC])
    visible = visible_tokens(lengths, len(prefix_TC), selection_SK).to(q_SHC.device)
    scores = torch.einsum("shc,tc->sht", q_SHC, rows) * scale
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    return torch.einsum("sht,tv->shv", scores.softmax(-1), rows[:, :value_dim]), scores.logsumexp(-1)


def visible_tokens(lengths: Sequence[int], prefix: int, selection_SK: Tensor | None = None) -> Tensor:
    """Which of the prefix's rows and of the packed branches' rows each query sees, bool [S, prefix + S]."""
    total = sum(lengths)
    visible = torch.zeros(total, prefix + total, dtype=torch.bool)
    start = 0
    for length in lengths:
        for i in range(length):
            mine = torch.zeros(prefix + length, dtype=torch.bool)
            mine[: prefix + i + 1] = True
            if selection_SK is not None:
                chosen = selection_SK[start + i].cpu().long()
                selected = torch.zeros_like(mine)
                selected[chosen[chosen < prefix + length]] = True
                mine &= selected
            visible[start + i, :prefix] = mine[:prefix]
            visible[start + i, prefix + start : prefix + start + length] = mine[prefix:]
        start += length
    return visible
