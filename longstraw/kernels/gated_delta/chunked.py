"""The gated delta rule chunk by chunk, in plain torch: any device, float32, and float64 for float64 inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw.kernels.gated_delta.layout import ChunkLayout
from longstraw.kernels.gated_delta.naive import EPSILON
from longstraw.kernels.recomputed import recomputed

CHUNK = 64
"""Most tokens of a chunk: its triangular systems are [CHUNK, CHUNK]."""
CHANNEL_CHUNK = 16
"""The same where every channel has a decay of its own: the decays between tokens are then [tokens, tokens, k_dim]."""


class ChunkedRule:
    """`DeltaRule` in plain torch.

    The algorithm is the chunked form of the gated delta rule (arXiv 2412.06464, section 3.3), which transformers'
    own torch function follows too. Autograd keeps the inputs only; the backward computes the rest again.
    """

    name = "torch"

    def __call__(
        self,
        q_SHK: Tensor,
        k_SHK: Tensor,
        v_SVD: Tensor,
        g_SV: Tensor,
        beta_SV: Tensor,
        *,
        lengths: Sequence[int],
        initial_VKD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return recomputed(_chunked, q_SHK, k_SHK, v_SVD, g_SV, beta_SV, initial_VKD, lengths=lengths)

    def workspace_bytes(
        self, num_v_heads: int, k_dim: int, v_dim: int, element: int, *, per_channel: bool = False
    ) -> int:
        """Bytes a token that a backward needs for a moment, counted from the tensors of `_chunked`."""
        size = CHANNEL_CHUNK if per_channel else CHUNK
        values = 6 * size * (k_dim if per_channel else 1) + 12 * (k_dim + v_dim) + 4 * k_dim * v_dim // size
        return num_v_heads * max(element, 4) * values


def _chunked(
    q_SHK: Tensor,
    k_SHK: Tensor,
    v_SVD: Tensor,
    g_SV: Tensor,
    beta_SV: Tensor,
    initial_VKD: Tensor | None,
    *,
    lengths: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    heads, k_dim, v_dim = v_SVD.shape[1], k_SHK.shape[2], v_SVD.shape[2]
    wide = torch.float64 if v_SVD.dtype == torch.float64 else torch.float32
    per_channel = g_SV.dim() == 3
    layout = ChunkLayout(lengths, min(CHANNEL_CHUNK if per_channel else CHUNK, max(lengths)))
    q, k = (_normalized(x.to(wide)) for x in (q_SHK, k_SHK))
    q = q * k_dim**-0.5
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    # N chunks in scan order; padded tokens have k = v = beta = g = 0 and change no state.
    q_NVCK, k_NVCK, v_NVCD = (layout.cut(x).transpose(1, 2) for x in (q, k, v_SVD.to(wide)))
    beta_NVC1 = layout.cut(beta_SV.to(wide)).transpose(1, 2).unsqueeze(-1)
    # One decay for all channels is a last dim of 1.
    g_NVCK = layout.cut((g_SV if per_channel else g_SV.unsqueeze(-1)).to(wide)).transpose(1, 2)

    decay_NVCK = g_NVCK.cumsum(2)
    between = decay_NVCK.unsqueeze(3) - decay_NVCK.unsqueeze(2)
    later = torch.ones(layout.size, layout.size, dtype=torch.bool, device=q.device).triu(1)
    # Masked before exp, where it would overflow.
    between = between.masked_fill(later.unsqueeze(-1), float("-inf")).exp()
    k_beta = k_NVCK * beta_NVC1
    # The UT transform: what each token writes, given what the earlier ones of its chunk wrote.
    system = _decayed_products(k_beta, k_NVCK, between)
    right = torch.cat([v_NVCD * beta_NVC1, k_beta * decay_NVCK.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, predicted = solved.split([v_dim, k_dim], dim=-1)
    within = _decayed_products(q_NVCK, k_NVCK, between)
    q_decayed = q_NVCK * decay_NVCK.exp()
    k_decayed = k_NVCK * (decay_NVCK[:, :, -1:] - decay_NVCK).exp()
    whole = decay_NVCK[:, :, -1].exp().unsqueeze(-1)

    if initial_VKD is None:
        initial_VKD = v_SVD.new_zeros(heads, k_dim, v_dim, dtype=wide)
    state = initial_VKD.to(wide).expand(len(lengths), heads, k_dim, v_dim)
    outs, finals = [], []
    # Split at once: the gradient of a slice would be as large as the whole tensor, at every step.
    scanned = (x.split(layout.steps) for x in (written, predicted, q_decayed, within, k_decayed, whole))
    for write, predict, query, attend, key, decay in zip(*scanned, strict=True):
        if len(write) < len(state):
            ended = len(state) - len(write)
            state, final = state.split([len(write), ended])
            finals.append(final)
        new = write - predict @ state
        outs.append(query @ state + attend @ new)
        state = state * decay + key.transpose(-1, -2) @ new
    finals.append(state)
    out = layout.join(torch.cat(outs).transpose(1, 2))
    return out.to(v_SVD.dtype), layout.by_branch(torch.cat(finals[::-1]))


def _decayed_products(left_NVCK: Tensor, right_NVCK: Tensor, between: Tensor) -> Tensor:
    """left_i . right_j, each channel times what is left of it between tokens j and i; [N, V, C, C]."""
    if between.shape[-1] == 1:
        return (left_NVCK @ right_NVCK.transpose(-1, -2)) * between.squeeze(-1)
    return (left_NVCK.unsqueeze(3) * between * right_NVCK.unsqueeze(2)).sum(-1)


def _normalized(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
