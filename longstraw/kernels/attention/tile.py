"""One tile of attention in plain matrix products: its scores, soft-capped where asked, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.kernels.attention.merge import merge_dtype


def tile_forward(
    q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, hidden_ST: Tensor | None, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of a tile of queries over a tile of keys.

    Args:
        q_BHSD: [B, num_heads, S, head_dim].
        k_BKTD, v_BKTD: [B, num_kv_heads, T, head_dim].
        hidden_ST: bool [S, T], True where a query must not see a key; None if it sees all. Every query sees one.
        scale: factor of the scores.
        softcap: c of c * tanh(score / c), after scaling (Gemma 2, arXiv 2408.00118, section 2), or None.

    Returns:
        out [B, num_heads, S, head_dim] and log-sum-exp [B, num_heads, S], in float32 (float64 for float64 inputs).
    """
    scores = _scores(q_BHSD, k_BKTD, scale, softcap)
    if hidden_ST is not None:
        scores.masked_fill_(hidden_ST, float("-inf"))
    return _over_keys(scores.softmax(-1), v_BKTD), scores.logsumexp(-1)


def tile_backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    delta_BHS1: Tensor,
    lse_BHS: Tensor,
    hidden_ST: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a tile's q, k and v in the wide dtype; arguments as in `tile_forward`.

    The log-sum-exp, and `delta` = sum over the head of grad * out, may be those of a softmax over more keys than
    these: delta is the softmax's own term, the sum over all keys of p * dp (FlashAttention-2, arXiv 2307.08691,
    algorithm 2).
    """
    wide = lse_BHS.dtype
    scores = _scores(q_BHSD, k_BKTD, scale, softcap)
    slope = scale if softcap is None else (1 - (scores / softcap).square_()).mul_(scale)
    p = scores.sub_(lse_BHS[..., None]).exp_()
    if hidden_ST is not None:
        p.masked_fill_(hidden_ST, 0.0)
    grad = _grouped(grad_BHSD.to(wide), v_BKTD)
    dp = grad @ v_BKTD[:, :, None].to(wide).transpose(-1, -2)
    ds = p * (dp.flatten(1, 2) - delta_BHS1) * slope
    dq = _over_keys(ds, k_BKTD)
    dk = (_grouped(ds, k_BKTD).transpose(-1, -2) @ _grouped(q_BHSD.to(wide), k_BKTD)).sum(2)
    dv = (_grouped(p, v_BKTD).transpose(-1, -2) @ grad).sum(2)
    return dq, dk, dv


def softmax_delta(grad_BHSD: Tensor, out_BHSD: Tensor) -> Tensor:
    """`delta` [B, num_heads, S, 1] of `tile_backward`, in the wide dtype."""
    wide = merge_dtype(out_BHSD.dtype)
    return (grad_BHSD.to(wide) * out_BHSD.to(wide)).sum(-1, keepdim=True)


def _scores(q_BHSD: Tensor, k_BKTD: Tensor, scale: float, softcap: float | None) -> Tensor:
    wide = merge_dtype(q_BHSD.dtype)
    products = _grouped(q_BHSD.to(wide), k_BKTD) @ k_BKTD[:, :, None].to(wide).transpose(-1, -2)
    scores = products.flatten(1, 2).mul_(scale)
    return scores if softcap is None else torch.tanh(scores.div_(softcap)).mul_(softcap)


def _grouped(x_BHSD: Tensor, like_BKTD: Tensor) -> Tensor:
    """[B, H, ...] as [B, num_kv_heads, H / num_kv_heads, ...]."""
    return x_BHSD.unflatten(1, (like_BKTD.shape[1], -1))


def _over_keys(p_BHST: Tensor, x_BKTD: Tensor) -> Tensor:
    return (_grouped(p_BHST, x_BKTD) @ x_BKTD[:, :, None].to(p_BHST.dtype)).flatten(1, 2)
