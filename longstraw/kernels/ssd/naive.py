"""The oracle of Mamba-2's state space recurrence: one token after another, written for reading."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def naive_ssd(
    x_SHP: Tensor,
    dt_SH: Tensor,
    A_H: Tensor,
    B_SGN: Tensor,
    C_SGN: Tensor,
    D_H: Tensor,
    *,
    lengths: Sequence[int],
    initial_HPN: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's recurrence (arXiv 2405.21060, section 2 and equation 2), in the dtype of `x_SHP`.

    Each token does h = h exp(dt A) + dt x B^T; y = h C + D x. A group of B and C serves H / G consecutive heads.

    Args:
        x_SHP: [S, num_heads, head_dim], the branches one after another along S.
        dt_SH: the step's size, [S, num_heads], at least 0.
        A_H: [num_heads], at most 0.
        B_SGN, C_SGN: [S, num_groups, state_size].
        D_H: the skip connection, [num_heads].
        lengths: tokens of each branch; they add up to S.
        initial_HPN: [num_heads, head_dim, state_size], what every branch starts from; None for zeros.

    Returns:
        Outputs [S, num_heads, head_dim] and the final states [B, num_heads, head_dim, state_size].
    """
    heads, head_dim = x_SHP.shape[1:]
    dt_SH, A_H, D_H = (x.to(x_SHP.dtype) for x in (dt_SH, A_H, D_H))
    B_SHN, C_SHN = (x.to(x_SHP.dtype).repeat_interleave(heads // x.shape[1], dim=1) for x in (B_SGN, C_SGN))
    outputs, finals, start = [], [], 0
    for length in lengths:
        state = x_SHP.new_zeros(heads, head_dim, B_SGN.shape[2])
        if initial_HPN is not None:
            state = initial_HPN.to(x_SHP.dtype)
        for t in range(start, start + length):
            written = torch.einsum("hp,hn->hpn", x_SHP[t] * dt_SH[t][:, None], B_SHN[t])
            state = state * (dt_SH[t] * A_H).exp().view(heads, 1, 1) + written
            outputs.append(torch.einsum("hpn,hn->hp", state, C_SHN[t]) + D_H[:, None] * x_SHP[t])
        finals.append(state)
        start += length
    return torch.stack(outputs), torch.stack(finals)
