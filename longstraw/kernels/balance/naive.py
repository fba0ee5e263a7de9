"""The load balancing loss as transformers computes it on one batch, with a weight for each token: the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def naive_balance_loss(logits: Sequence[Tensor], weights_S: Tensor, top_k: int) -> Tensor:
    """N * sum_i f_i P_i (arXiv 2101.03961, equations 4 to 6): f_i choices of expert i a row, P_i its mean probability.

    Args:
        logits: for each router [S, N].
        weights_S: how often each token counts.
        top_k: experts that a token is sent to.
    """
    stacked_RSN = torch.stack(list(logits))
    probabilities_RSN = stacked_RSN.softmax(-1)
    chosen_RSk = probabilities_RSN.topk(top_k, dim=-1).indices
    chosen_RSN = torch.zeros_like(probabilities_RSN).scatter_(-1, chosen_RSk, 1.0)
    weighted_S1 = weights_S.to(probabilities_RSN.dtype)[:, None]
    rows = weights_S.sum() * len(stacked_RSN)
    f_N = (chosen_RSN * weighted_S1).sum((0, 1)) / rows
    p_N = (probabilities_RSN * weighted_S1).sum((0, 1)) / rows
    return stacked_RSN.shape[-1] * (f_N.detach() * p_N).sum()
