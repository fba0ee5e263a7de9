"""The queries' gradient of attention alone, in Triton: three matrix products where a whole backward takes five.

One program is a tile of one head's queries, and goes over all keys of a block (FlashAttention-2, arXiv 2307.08691,
algorithm 2, with the loops exchanged and without dK and dV). No two programs add to the same row, and each adds in the
order of the keys: the bits do not depend on how programs are scheduled.
"""

# Kernels are in a language of their own: their arguments have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, ignore-missing-imports
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longstraw.kernels.attention.dq_tiles import DqTiles

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _delta(
    grad, out, delta, H, S, grad_b, grad_h, grad_s, out_b, out_h, out_s,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    h = (tl.program_id(0) % H).to(tl.int64)
    s = (tl.program_id(0) // H * BS + tl.arange(0, BS)).to(tl.int64)
    n = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BD)
    seen = (s < S)[:, None] & (d < D)[None, :]
    g = tl.load(grad + n * grad_b + h * grad_h + s[:, None] * grad_s + d[None, :], mask=seen, other=0.0)
    o = tl.load(out + n * out_b + h * out_h + s[:, None] * out_s + d[None, :], mask=seen, other=0.0)
    tl.store(delta + (n * H + h) * S + s, tl.sum(g.to(tl.float32) * o.to(tl.float32), 1), mask=s < S)


@triton.jit
def _rows(x, at, x_s, S, D: tl.constexpr, BS: tl.constexpr, MASKED: tl.constexpr):
    s, d = at + tl.arange(0, BS), tl.arange(0, D)
    where = x + s.to(tl.int64)[:, None] * x_s + d[None, :]
    if MASKED:
        return tl.load(where, mask=(s < S)[:, None], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def _step(
    acc, q_tile, g_tile, log_sum, d, k, v, at, column, k_t, v_t, T, scale,
    D: tl.constexpr, BT: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if TMA:
        k_tile, v_tile = k.load([at, column]), v.load([at, column])
    else:
        k_tile, v_tile = _rows(k, at, k_t, T, D, BT, MASKED), _rows(v, at, v_t, T, D, BT, MASKED)
    p = tl.exp2(tl.dot(q_tile, tl.trans(k_tile)) * scale - log_sum[:, None])
    ds = p * (tl.dot(g_tile, tl.trans(v_tile)) - d[:, None])
    if MASKED:
        ds = tl.where((at + tl.arange(0, BT) < T)[None, :], ds, 0.0)
    return tl.dot(ds.to(k_tile.dtype), k_tile, acc)


@triton.jit
def _add_dq(
    grad, q, k, v, lse, delta, dq, S, T, tiles, groups, scale, scale_log2,
    grad_h, grad_s, q_h, q_s, k_h, k_t, v_h, v_t, dq_h, dq_s,
    D: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, TAIL: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # Neighbours share keys and values: they are programs of one head, and then of one group of heads.
    at_s = tl.program_id(0) % tiles * BS
    h = (tl.program_id(0) // tiles).to(tl.int64)
    column = 0
    if TMA:
        column = (h // groups * D).to(tl.int32)
    else:
        k += h // groups * k_h
        v += h // groups * v_h
    s, d = at_s + tl.arange(0, BS), tl.arange(0, D)
    seen = s < S
    q_tile = _rows(q + h * q_h, at_s, q_s, S, D, BS, True)
    g_tile = _rows(grad + h * grad_h, at_s, grad_s, S, D, BS, True)
    # A row that is none has probability 0 everywhere.
    log_sum = tl.load(lse + h * S + s, mask=seen, other=float("inf")) * LOG2_E
    row_delta = tl.load(delta + h * S + s, mask=seen, other=0.0)
    acc = tl.zeros((BS, D), tl.float32)
    whole = T // BT * BT
    for at in range(0, whole, BT):
        acc = _step(acc, q_tile, g_tile, log_sum, row_delta, k, v, at, column, k_t, v_t, T, scale_log2,
                    D, BT, False, TMA)  # fmt: skip
    if TAIL:
        acc = _step(acc, q_tile, g_tile, log_sum, row_delta, k, v, whole, column, k_t, v_t, T, scale_log2,
                    D, BT, True, TMA)  # fmt: skip
    # An addition in memory, though nobody else adds to these rows: registers hold no second tile of this size.
    into = dq + h * dq_h + s.to(tl.int64)[:, None] * dq_s + d[None, :]
    tl.atomic_add(into, acc * scale, mask=seen[:, None], sem="relaxed")


def softmax_delta(grad_BHSD: Tensor, out_BHSD: Tensor) -> Tensor:
    """The sum [B, H, S] over the head of grad * out, float32, of half-precision tensors; once for all blocks."""
    batch, heads, rows, head_dim = out_BHSD.shape
    delta = torch.empty(batch, heads, rows, dtype=torch.float32, device=out_BHSD.device)
    width = triton.next_power_of_2(head_dim)
    share = max(4096 // width, 1)
    with torch.cuda.device_of(out_BHSD):
        _delta[(heads * triton.cdiv(rows, share), batch)](
            grad_BHSD, out_BHSD, delta, heads, rows, *grad_BHSD.stride()[:3], *out_BHSD.stride()[:3],
            D=head_dim, BD=width, BS=share, num_warps=4,
        )  # fmt: skip
    return delta


def add_dq(
    dq_BHSD: Tensor,
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    *,
    scale: float,
    tiles: DqTiles,
) -> None:
    """Add the queries' gradient of attention to T keys, all of which every query sees, to `dq_BHSD` in place.

    Args:
        dq_BHSD: float32 [1, H, S, D].
        grad_BHSD, q_BHSD: half precision, head dim 64, 128 or 256; as all tensors here, of any strides whose last is 1.
        k_BKTD, v_BKTD: [1, K, T, D] of the queries' dtype; a key's heads lie side by side, as `kv_views` gives them.
        lse_BHS, delta_BHS: float32, contiguous, of the softmax over all keys: these and others.
    """
    _, heads, rows, head_dim = q_BHSD.shape
    kv_heads, tokens = k_BKTD.shape[1:3]
    assert lse_BHS.is_contiguous() and delta_BHS.is_contiguous()
    assert all(x.stride(3) == 1 for x in (dq_BHSD, grad_BHSD, q_BHSD, k_BKTD, v_BKTD))
    keys: list[Tensor | TensorDescriptor] = [k_BKTD, v_BKTD]
    if tiles.copy_engine:
        assert all(x.stride(1) == head_dim for x in (k_BKTD, v_BKTD)), "a key's heads lie side by side"
        keys = [
            TensorDescriptor(x, [tokens, kv_heads * head_dim], [x.stride(2), 1], [tiles.keys, head_dim])
            for x in (k_BKTD, v_BKTD)
        ]
    blocks = triton.cdiv(rows, tiles.queries)
    with torch.cuda.device_of(q_BHSD):
        _add_dq[(heads * blocks,)](
            grad_BHSD, q_BHSD, *keys, lse_BHS, delta_BHS, dq_BHSD, rows, tokens, blocks, heads // kv_heads,
            scale, scale * LOG2_E.value,
            *grad_BHSD.stride()[1:3], *q_BHSD.stride()[1:3], *k_BKTD.stride()[1:3], *v_BKTD.stride()[1:3],
            *dq_BHSD.stride()[1:3],
            D=head_dim, BS=tiles.queries, BT=tiles.keys, TAIL=tokens % tiles.keys != 0, TMA=tiles.copy_engine,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
