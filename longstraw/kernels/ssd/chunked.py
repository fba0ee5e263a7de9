"""Mamba-2's state space recurrence chunk by chunk, in plain torch: any device, float32, float64 for float64 inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw.kernels.gated_delta.layout import ChunkLayout
from longstraw.kernels.recomputed import recomputed

CHUNK = 64
"""Most tokens of a chunk: what each of its tokens keeps of an earlier one is [CHUNK, CHUNK] a head."""


def ssd(
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
    """Mamba-2's recurrence with gradients of every tensor. Arguments as in `naive_ssd`.

    The algorithm is the block decomposition of arXiv 2405.21060, section 6. Products run in float32 (float64 for
    float64 inputs), under autocast too. Autograd keeps the inputs only; the backward computes the rest again.

    Returns:
        Outputs [S, num_heads, head_dim] in the dtype of `x_SHP`; final states [B, num_heads, head_dim, state_size] in
        float32, or float64 for float64 inputs.
    """
    return recomputed(_chunked, x_SHP, dt_SH, A_H, B_SGN, C_SGN, D_H, initial_HPN, lengths=lengths)


def workspace_bytes(num_heads: int, head_dim: int, num_groups: int, state_size: int, element: int) -> int:
    """Bytes a token that the backward of `ssd` needs for a moment, counted from the tensors of `_chunked`.

    `element` is the bytes of a value of the inputs.
    """
    of_a_head = 6 * CHUNK + 10 * head_dim + 4 * head_dim * state_size // CHUNK
    of_a_group = 4 * CHUNK + 6 * state_size
    return max(element, 4) * (num_heads * of_a_head + num_groups * of_a_group)


def _chunked(
    x_SHP: Tensor,
    dt_SH: Tensor,
    A_H: Tensor,
    B_SGN: Tensor,
    C_SGN: Tensor,
    D_H: Tensor,
    initial_HPN: Tensor | None,
    *,
    lengths: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Suffixes: L chunks in scan order, T tokens of one; G groups of E heads, whose P values lie side by side."""
    heads, head_dim, (groups, state_size) = x_SHP.shape[1], x_SHP.shape[2], B_SGN.shape[1:]
    wide = torch.float64 if x_SHP.dtype == torch.float64 else torch.float32
    layout = ChunkLayout(lengths, min(CHUNK, max(lengths)))
    x, dt = x_SHP.to(wide), dt_SH.to(wide)
    # Padded tokens have dt = 0: they write nothing and the state stays as it is.
    B_LGTN, C_LGTN = (layout.cut(each.to(wide)).transpose(1, 2) for each in (B_SGN, C_SGN))
    written_LGETP = layout.cut(x * dt.unsqueeze(-1)).permute(0, 2, 3, 1).unflatten(1, (groups, -1)).transpose(3, 4)
    decay_LGET = layout.cut(dt * A_H.to(wide)).transpose(1, 2).unflatten(1, (groups, -1))

    between = _between(decay_LGET)
    attend = (C_LGTN @ B_LGTN.transpose(-1, -2)).unsqueeze(2) * between
    within_LGTEP = (attend @ written_LGETP).transpose(2, 3)
    # One product serves all heads of a group: B and C are never repeated for each.
    left_LGTE1 = decay_LGET.cumsum(-1).exp().transpose(2, 3).unsqueeze(-1)
    kept_LGTF = (written_LGETP * between[..., -1, :].unsqueeze(-1)).transpose(2, 3).flatten(3)
    added_LGNF = B_LGTN.transpose(-1, -2) @ kept_LGTF
    whole_LGE = decay_LGET.sum(-1).exp()
    whole_LG1F = whole_LGE.repeat_interleave(head_dim, dim=2).unsqueeze(2)

    if initial_HPN is None:
        initial_HPN = x_SHP.new_zeros(heads, head_dim, state_size, dtype=wide)
    initial_GNF = initial_HPN.to(wide).unflatten(0, (groups, -1)).permute(0, 3, 1, 2).flatten(2)
    state = initial_GNF.expand(len(lengths), *initial_GNF.shape)
    carried, finals = [], []
    # Split at once: the gradient of a slice would be as large as the whole tensor, at every step.
    for query, added, whole in zip(*(x.split(layout.steps) for x in (C_LGTN, added_LGNF, whole_LG1F)), strict=True):
        if len(query) < len(state):
            state, final = state.split([len(query), len(state) - len(query)])
            finals.append(final)
        carried.append(query @ state)
        state = state * whole + added
    finals.append(state)
    carried_LGTEP = torch.cat(carried).unflatten(-1, (-1, head_dim)) * left_LGTE1
    out_LTGEP = (within_LGTEP + carried_LGTEP).transpose(1, 2)
    out_SHP = layout.join(out_LTGEP).flatten(1, 2) + D_H.to(wide).unsqueeze(-1) * x
    final_BHPN = torch.cat(finals[::-1]).unflatten(-1, (-1, head_dim)).permute(0, 1, 3, 4, 2).flatten(1, 2)
    return out_SHP.to(x_SHP.dtype), layout.by_branch(final_BHPN)


def _between(decay_LGET: Tensor) -> Tensor:
    """What token i keeps of what token j wrote, [L, G, E, i, j]; 0 for later ones.

    The sums of log decays are taken for each pair: a difference of two sums over the chunk would lose the small ones
    behind a large one.
    """
    size = decay_LGET.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=decay_LGET.device).tril()
    steps = decay_LGET.unsqueeze(-1).expand(*decay_LGET.shape, size)
    sums = steps.masked_fill(~lower.tril(-1), 0.0).cumsum(-2)
    return sums.masked_fill(~lower, float("-inf")).exp()
