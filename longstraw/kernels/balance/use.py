"""What one router did with packed tokens: whom it chose for each branch, and the probabilities that it gave."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertUse:
    """Sums over tokens.

    Attributes:
        counts_BN: int64 [B, N], how often a token of branch b was sent to expert i.
        probability_N: float64 [N], the probabilities of all branches' tokens.
    """

    counts_BN: Tensor
    probability_N: Tensor


@torch.no_grad()
def expert_use(logits_SN: Tensor, branch_S: Tensor, branches: int, top_k: int) -> ExpertUse:
    """Counts and sums of one router, with transformers' own reading of its logits (`load_balancing_loss_func`).

    Args:
        logits_SN: [S, N] in any floating dtype; probabilities are rounded to it, as transformers rounds them.
        branch_S: int64 [S], the branch of each token.
        branches: B.
        top_k: experts that a token is sent to.
    """
    experts = logits_SN.shape[1]
    probabilities_SN = logits_SN.softmax(-1)
    chosen_Sk = probabilities_SN.topk(top_k, dim=-1).indices
    # Integers add up to the same in any order, so that scattering them is deterministic.
    slots = (branch_S[:, None] * experts + chosen_Sk).flatten()
    counts = torch.zeros(branches * experts, dtype=torch.int64, device=logits_SN.device)
    counts.scatter_add_(0, slots, torch.ones_like(slots))
    return ExpertUse(
        counts_BN=counts.view(branches, experts), probability_N=probabilities_SN.sum(0, dtype=torch.float64)
    )
