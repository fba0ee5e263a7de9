"""The oracle of selection: all scores at once, and a stable sort."""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.kernels.selection.topk import NOT_SELECTED


def naive_index_scores(q_SHD: Tensor, keys_TD: Tensor, weights_SH: Tensor, scale: float) -> Tensor:
    """Index scores [S, T] in float32: heads' ReLU scores, weighted and summed (DeepSeek-V3.2, section 2.1)."""
    scores = (torch.einsum("shd,td->sht", q_SHD.float(), keys_TD.float()) * scale).relu()
    return torch.einsum("sh,sht->st", weights_SH.float(), scores)


def naive_topk(scores_ST: Tensor, k: int) -> Tensor:
    """The `k` best tokens of each query, ties to the lower token, ascending; -inf is never selected.

    Returns int32 [S, min(k, T)], `NOT_SELECTED` at the end.
    """
    values, tokens = scores_ST.sort(dim=-1, descending=True, stable=True)
    values, tokens = values[:, :k], tokens[:, :k].to(torch.int32)
    return tokens.masked_fill(values == float("-inf"), NOT_SELECTED).sort(dim=-1).values
