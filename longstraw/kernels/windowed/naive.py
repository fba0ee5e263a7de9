"""The oracle of windowed attention: plain autograd over the whole rows, written for reading."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def naive_windowed_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    prefix_k_BKTD: Tensor,
    prefix_v_BKTD: Tensor,
    sinks_H: Tensor | None,
    *,
    lengths: Sequence[int],
    window: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Softmax attention where a token sees itself and the `window` - 1 tokens before it, prefix included.

    Args:
        q_BHSD: [1, num_heads, S, head_dim], the branches one after another along S.
        k_BKSD, v_BKSD: [1, num_kv_heads, S, head_dim].
        prefix_k_BKTD, prefix_v_BKTD: [1, num_kv_heads, T, head_dim], all T prefix rows.
        sinks_H: [num_heads] scores of a key without a value, or None.
        lengths: tokens of each branch; they add up to S.
        window: tokens that a token sees, itself included.
        scale: factor of the scores.
        softcap: c of c * tanh(score / c), or None.

    Returns:
        [1, num_heads, S, head_dim] in the inputs' dtype.
    """
    groups = q_BHSD.shape[1] // k_BKSD.shape[1]
    prefix = prefix_k_BKTD.shape[2]
    outs = []
    for q, k, v in zip(*(x.split(list(lengths), dim=2) for x in (q_BHSD, k_BKSD, v_BKSD)), strict=True):
        keys = torch.cat([prefix_k_BKTD, k], dim=2).repeat_interleave(groups, dim=1)
        values = torch.cat([prefix_v_BKTD, v], dim=2).repeat_interleave(groups, dim=1)
        scores = (q @ keys.transpose(-1, -2)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at_q = torch.arange(prefix, prefix + q.shape[2], device=q.device)[:, None]
        at_k = torch.arange(keys.shape[2], device=q.device)[None]
        scores = scores.masked_fill((at_k > at_q) | (at_k <= at_q - window), float("-inf"))
        if sinks_H is not None:
            scores = torch.cat([scores, sinks_H[None, :, None, None].expand(1, -1, q.shape[2], 1)], dim=-1)
        outs.append(scores.softmax(-1)[..., : keys.shape[2]] @ values)
    return torch.cat(outs, dim=2)
