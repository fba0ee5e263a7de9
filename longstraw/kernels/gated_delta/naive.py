"""The oracle of the gated delta rule: one token after another, written for reading."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the squared norm of queries and keys, as in flash-linear-attention and transformers."""


def naive_delta_rule(
    q_SHK: Tensor,
    k_SHK: Tensor,
    v_SVD: Tensor,
    g_SV: Tensor,
    beta_SV: Tensor,
    *,
    lengths: Sequence[int],
    initial_VKD: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (arXiv 2412.06464, equation 10), in the dtype of `v_SVD`.

    With q and k normalized to length 1 and q scaled by K^-0.5, each token does S = S exp(g);
    S = S + beta k (v - k^T S)^T; o = q^T S. A head of q and k serves V / H consecutive heads of v. With a decay for
    each channel of the keys it is Kimi delta attention (arXiv 2510.26692, section 3).

    Args:
        q_SHK, k_SHK: [S, num_k_heads, k_dim], the branches one after another along S.
        v_SVD: [S, num_v_heads, v_dim].
        g_SV: log of the decay, [S, num_v_heads], or [S, num_v_heads, k_dim].
        beta_SV: how much of a token is written, [S, num_v_heads].
        lengths: tokens of each branch; they add up to S.
        initial_VKD: [num_v_heads, k_dim, v_dim], what every branch starts from; None for zeros.

    Returns:
        Outputs [S, num_v_heads, v_dim] and the final states [B, num_v_heads, k_dim, v_dim].
    """
    heads, k_dim, v_dim = v_SVD.shape[1], k_SHK.shape[2], v_SVD.shape[2]
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1).to(v_SVD.dtype) for x in (q_SHK, k_SHK))
    q, k = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (q, k))
    q = q * k_dim**-0.5
    outputs, finals, start = [], [], 0
    for length in lengths:
        state = v_SVD.new_zeros(heads, k_dim, v_dim) if initial_VKD is None else initial_VKD.to(v_SVD.dtype)
        for t in range(start, start + length):
            state = state * g_SV[t].to(v_SVD.dtype).exp().view(heads, -1, 1)
            correction = v_SVD[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], correction * beta_SV[t].to(v_SVD.dtype)[:, None])
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        finals.append(state)
        start += length
    return torch.stack(outputs), torch.stack(finals)
