"""Attention inside a band below the diagonal, by a fused op or by tiles of plain matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from longstraw.errors import UnsupportedModelError
from longstraw.kernels.attention.merge import merge_dtype
from longstraw.kernels.attention.tile import softmax_delta, tile_backward, tile_forward

aten = torch.ops.aten

TILE = 256
"""Queries a tile; a tile's scores are [B, num_heads, TILE, TILE + window - 1]."""


class WindowOps(Protocol):
    """Attention of S queries over T >= S keys, the last query beside the last key, forward and backward.

    Query i sees key T - S + i and the `window` - 1 keys before it. q and out are [B, num_heads, S, head_dim], k and v
    [B, num_kv_heads, T, head_dim]; the log-sum-exp is [B, num_heads, S] in float32 (float64 for float64 inputs), as
    are the outputs of `BandedOps`. Backward takes an output and a log-sum-exp that may include more (a sink).
    """

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, window: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class BandedOps:
    """`WindowOps` for every dtype and device: a tile of queries over just the keys that its window touches.

    Args:
        softcap: c of c * tanh(score / c), or None.
    """

    name = "banded"

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float) -> tuple[Tensor, Tensor]:
        parts = [
            tile_forward(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], _hidden(rows, keys, q, k, window),
                scale=scale, softcap=self._softcap,
            )
            for rows, keys in _tiles(q.shape[2], k.shape[2], window)
        ]  # fmt: skip
        return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, window: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = merge_dtype(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        delta = softmax_delta(grad, out)
        for rows, keys in _tiles(q.shape[2], k.shape[2], window):
            dq[:, :, rows], dk_tile, dv_tile = tile_backward(
                grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], delta[:, :, rows], lse[:, :, rows],
                _hidden(rows, keys, q, k, window), scale=scale, softcap=self._softcap,
            )  # fmt: skip
            dk[:, :, keys] += dk_tile
            dv[:, :, keys] += dv_tile
        return dq, dk, dv


class CudaFlashWindowOps:
    """torch's FlashAttention-2 with its own window, which counts from the last key backwards as ours does."""

    name = "flash-window"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None, q.shape[2], k.shape[2],
            0.0, True, False, scale=scale, window_size_left=window - 1, window_size_right=0,
        )  # fmt: skip
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, window: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)
        q, k, v, out, grad = (x.transpose(1, 2) for x in (q, k, v, out, grad))
        grads = aten._flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, True, nothing, nothing,
            scale=scale, window_size_left=window - 1, window_size_right=0,
        )  # fmt: skip
        return tuple(x.transpose(1, 2) for x in grads)


def choose_window_ops(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None = None
) -> WindowOps:
    """torch's flash op on CUDA in half precision, without a soft cap, where it takes the head dim; else `BandedOps`.

    Raises:
        UnsupportedModelError: the device is neither a CPU nor a CUDA device.
    """
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedModelError(f"no windowed attention for device {device.type!r}: use a cpu or cuda model")
    half = dtype in (torch.float16, torch.bfloat16)
    if device.type == "cuda" and half and softcap is None and head_dim % 8 == 0 and head_dim <= 256:
        return CudaFlashWindowOps()
    return BandedOps(softcap)


def _tiles(queries: int, keys: int, window: int) -> Iterator[tuple[slice, slice]]:
    past = keys - queries
    for at in range(0, queries, TILE):
        stop = min(at + TILE, queries)
        yield slice(at, stop), slice(max(past + at - window + 1, 0), past + stop)


def _hidden(rows: slice, keys: slice, q: Tensor, k: Tensor, window: int) -> Tensor:
    past = k.shape[2] - q.shape[2]
    at_q = torch.arange(past + rows.start, past + rows.stop, device=q.device)[:, None]
    at_k = torch.arange(keys.start, keys.stop, device=q.device)[None]
    return (at_k > at_q) | (at_k <= at_q - window)
