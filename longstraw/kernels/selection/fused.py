"""Index scores in one Triton kernel: no head's scores ever reach memory."""

# Kernels are in a language of their own: their arguments have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, ignore-missing-imports
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_QUERIES, _KEYS = 64, 128


@triton.jit
def _kernel(
    q, keys, weights, out, queries, tokens, q_s, q_h, keys_t, weights_s, out_s, scale,
    H: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)
    seen_s, seen_t = s < queries, t < tokens
    k = tl.load(keys + t[:, None].to(tl.int64) * keys_t + d[None, :], mask=seen_t[:, None], other=0.0)
    total = tl.zeros((BS, BT), tl.float32)
    for h in range(H):
        q_h_rows = tl.load(q + s[:, None].to(tl.int64) * q_s + h * q_h + d[None, :], mask=seen_s[:, None], other=0.0)
        weight = tl.load(weights + s.to(tl.int64) * weights_s + h, mask=seen_s, other=0.0)
        products = tl.dot(q_h_rows, tl.trans(k)) * scale
        total += tl.maximum(products, 0.0) * weight[:, None]
    at = out + s[:, None].to(tl.int64) * out_s + t[None, :]
    tl.store(at, total, mask=seen_s[:, None] & seen_t[None, :])


def fused_index_scores(q_SHD: Tensor, keys_TD: Tensor, weights_SH: Tensor, scale: float) -> Tensor:
    """Scores [S, T], float32, of half-precision queries and keys; shapes as in `index_scores`.

    Products of half-precision values are exact in float32 and summed there, so this differs from the float32 version
    by the order of sums alone. A score's order of sums does not depend on the tile that it is in.
    """
    queries, heads, width = q_SHD.shape
    out = torch.empty(queries, len(keys_TD), dtype=torch.float32, device=q_SHD.device)
    q_SHD = q_SHD if q_SHD.stride(2) == 1 else q_SHD.contiguous()
    keys_TD = keys_TD if keys_TD.stride(1) == 1 else keys_TD.contiguous()
    weights_SH = weights_SH.contiguous()
    grid = (triton.cdiv(len(keys_TD), _KEYS), triton.cdiv(queries, _QUERIES))
    _kernel[grid](
        q_SHD, keys_TD, weights_SH, out, queries, len(keys_TD),
        q_SHD.stride(0), q_SHD.stride(1), keys_TD.stride(0), weights_SH.stride(0), out.stride(0), scale,
        H=heads, D=width, BS=_QUERIES, BT=_KEYS, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def takes(q_SHD: Tensor, keys_TD: Tensor) -> bool:
    """Whether the kernel is made for these: half precision, a head dim that is a power of two of 16 to 256."""
    width = q_SHD.shape[2]
    half = q_SHD.dtype == keys_TD.dtype and q_SHD.dtype in (torch.float16, torch.bfloat16)
    return half and 16 <= width <= 256 and width & (width - 1) == 0
