"""The oracle of the attention kernels: plain autograd over dense tensors, written for reading."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def naive_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    prefix_k_TKD: Tensor,
    prefix_v_TKD: Tensor,
    lengths: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Softmax attention with the scores of every query written out.

    Row `i` of a branch sees all `T` prefix rows and rows `0..i` of its own branch, and nothing of another branch.

    Args:
        q_BHSD: [1, num_heads, S, head_dim], the branches one after another along S.
        k_BKSD, v_BKSD: [1, num_kv_heads, S, head_dim], the branches' own keys and values.
        prefix_k_TKD, prefix_v_TKD: [T, num_kv_heads, head_dim].
        lengths: tokens of each branch; they add up to S.
        scale: factor of the scores.

    Returns:
        out [1, num_heads, S, head_dim] and log-sum-exp [1, num_heads, S], in the inputs' dtype.
    """
    groups = q_BHSD.shape[1] // k_BKSD.shape[1]
    k_all = torch.cat([prefix_k_TKD.transpose(0, 1)[None], k_BKSD], dim=2).repeat_interleave(groups, dim=1)
    v_all = torch.cat([prefix_v_TKD.transpose(0, 1)[None], v_BKSD], dim=2).repeat_interleave(groups, dim=1)
    prefix = prefix_k_TKD.shape[0]
    visible = torch.zeros(q_BHSD.shape[2], prefix + q_BHSD.shape[2], dtype=torch.bool, device=q_BHSD.device)
    visible[:, :prefix] = True
    start = 0
    for length in lengths:
        own = torch.ones(length, length, dtype=torch.bool, device=q_BHSD.device).tril()
        visible[start : start + length, prefix + start : prefix + start + length] = own
        start += length
    scores = (q_BHSD @ k_all.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ v_all, scores.logsumexp(-1)
