"""Attention by tiles of plain matrix products: every dtype on every device, for reference runs on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from longstraw.kernels.attention.merge import PartialMerge, merge_dtype

TILE = 2048
"""Queries and keys a tile; a tile's scores are [B, num_heads, TILE, TILE]."""


class TiledOps:
    """`AttentionOps` without a fused kernel. Memory beyond inputs and outputs is a few tiles of scores."""

    name = "tiled"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for q_at in range(0, q.shape[2], TILE):
            q_tile = q[:, :, q_at : q_at + TILE]
            merge = PartialMerge()
            for k_at in _key_tiles(q_at, q_tile.shape[2], k.shape[2], causal):
                scores = _scores(q_tile, k[:, :, k_at : k_at + TILE], q_at, k_at, causal, scale)
                merge.add(_over_values(scores.softmax(-1), v[:, :, k_at : k_at + TILE]), scores.logsumexp(-1))
            out, lse = merge.result(q.dtype)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = merge_dtype(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        # delta is the softmax's own term, sum over keys of p * dp (FlashAttention-2, arXiv 2307.08691, algorithm 2).
        delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        for q_at in range(0, q.shape[2], TILE):
            rows = slice(q_at, min(q_at + TILE, q.shape[2]))
            for k_at in _key_tiles(q_at, rows.stop - q_at, k.shape[2], causal):
                keys = slice(k_at, min(k_at + TILE, k.shape[2]))
                scores = _scores(q[:, :, rows], k[:, :, keys], q_at, k_at, causal, scale)
                p = (scores - lse[:, :, rows, None]).exp_()
                dp = _grouped(grad[:, :, rows].to(wide), v) @ v[:, :, None, keys].to(wide).transpose(-1, -2)
                ds = p * (dp.flatten(1, 2) - delta[:, :, rows]) * scale
                dv[:, :, keys] += (_grouped(p, v).transpose(-1, -2) @ _grouped(grad[:, :, rows].to(wide), v)).sum(2)
                dk[:, :, keys] += (_grouped(ds, k).transpose(-1, -2) @ _grouped(q[:, :, rows].to(wide), k)).sum(2)
                dq[:, :, rows] += _over_values(ds, k[:, :, keys])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _key_tiles(q_at: int, rows: int, keys: int, causal: bool) -> Iterator[int]:
    yield from range(0, min(keys, q_at + rows) if causal else keys, TILE)


def _grouped(x_BHSD: Tensor, like_BKTD: Tensor) -> Tensor:
    """[B, H, ...] as [B, num_kv_heads, H / num_kv_heads, ...]."""
    return x_BHSD.unflatten(1, (like_BKTD.shape[1], -1))


def _over_values(p_BHST: Tensor, v_BKTD: Tensor) -> Tensor:
    return (_grouped(p_BHST, v_BKTD) @ v_BKTD[:, :, None].to(p_BHST.dtype)).flatten(1, 2)


def _scores(q: Tensor, k: Tensor, q_at: int, k_at: int, causal: bool, scale: float) -> Tensor:
    wide = merge_dtype(q.dtype)
    scores = (_grouped(q.to(wide), k) @ k[:, :, None].to(wide).transpose(-1, -2)).flatten(1, 2) * scale
    if causal:
        at_q = torch.arange(q_at, q_at + q.shape[2], device=q.device)[:, None]
        at_k = torch.arange(k_at, k_at + k.shape[2], device=q.device)[None]
        scores = scores.masked_fill(at_k > at_q, float("-inf"))
    return scores
