"""Attention by tiles of plain matrix products: every dtype on every device, and soft caps, which no fused op has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from longstraw.kernels.attention.branches import BranchByBranch
from longstraw.kernels.attention.merge import merge_dtype
from longstraw.kernels.attention.running import PartialMerge
from longstraw.kernels.attention.tile import softmax_delta, tile_backward, tile_forward

TILE = 2048
"""Queries and keys a tile; a tile's scores are [B, num_heads, TILE, TILE]."""


class TiledOps(BranchByBranch):
    """`AttentionOps` without a fused kernel. Memory beyond inputs and outputs is a few tiles of scores.

    Args:
        softcap: c of c * tanh(score / c), or None.
    """

    name = "tiled"

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for q_at in range(0, q.shape[2], TILE):
            q_tile = q[:, :, q_at : q_at + TILE]
            merge = PartialMerge()
            for k_at in _key_tiles(q_at, q_tile.shape[2], k.shape[2], causal):
                k_tile, v_tile = k[:, :, k_at : k_at + TILE], v[:, :, k_at : k_at + TILE]
                hidden = _hidden(q_tile, k_tile, q_at, k_at) if causal else None
                merge.add(*tile_forward(q_tile, k_tile, v_tile, hidden, scale=scale, softcap=self._softcap))
            out, lse = merge.result(q.dtype)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = merge_dtype(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        delta = softmax_delta(grad, out)
        for q_at in range(0, q.shape[2], TILE):
            rows = slice(q_at, min(q_at + TILE, q.shape[2]))
            for k_at in _key_tiles(q_at, rows.stop - q_at, k.shape[2], causal):
                keys = slice(k_at, min(k_at + TILE, k.shape[2]))
                hidden = _hidden(q[:, :, rows], k[:, :, keys], q_at, k_at) if causal else None
                dq_tile, dk_tile, dv_tile = tile_backward(
                    grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], delta[:, :, rows], lse[:, :, rows],
                    hidden, scale=scale, softcap=self._softcap,
                )  # fmt: skip
                dq[:, :, rows] += dq_tile
                dk[:, :, keys] += dk_tile
                dv[:, :, keys] += dv_tile
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _key_tiles(q_at: int, rows: int, keys: int, causal: bool) -> Iterator[int]:
    yield from range(0, min(keys, q_at + rows) if causal else keys, TILE)


def _hidden(q_tile: Tensor, k_tile: Tensor, q_at: int, k_at: int) -> Tensor:
    at_q = torch.arange(q_at, q_at + q_tile.shape[2], device=q_tile.device)[:, None]
    at_k = torch.arange(k_at, k_at + k_tile.shape[2], device=q_tile.device)[None]
    return at_k > at_q
