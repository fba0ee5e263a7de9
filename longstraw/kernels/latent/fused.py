"""Attention over selected latent rows in Triton: rows are gathered into shared memory, not into new tensors.

One program is one query with a block of heads: all heads share the rows, so that every gathered row meets a matrix.
"""

# Kernels are in a language of their own: their arguments have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, ignore-missing-imports
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD = {"BH": 64, "BW": 32, "num_warps": 8, "num_stages": 2}
BACKWARD = {"BH": 32, "BW": 32, "num_warps": 8, "num_stages": 1}


@triton.jit
def _forward(
    q, rows, selection, starts, stops, out, lse, first_token, scale,
    q_s, q_h, rows_t, selection_s, out_s, out_h, lse_s,
    H: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(starts + s), tl.load(stops + s)
    if start >= stop:
        return
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    v, r = tl.arange(0, V), tl.arange(0, R)
    heads = h < H
    q_at = q + s * q_s + h[:, None] * q_h
    q_v = tl.load(q_at + v[None, :], mask=heads[:, None], other=0.0)
    q_r = tl.load(q_at + V + r[None, :], mask=heads[:, None], other=0.0)
    # What earlier blocks gave: an output of sum 1 at their log-sum-exp, or none.
    top = tl.load(lse + s * lse_s + h, mask=heads, other=float("-inf"))
    total = tl.where(top > float("-inf"), 1.0, 0.0)
    out_at = out + s * out_s + h[:, None] * out_h + v[None, :]
    acc = tl.load(out_at, mask=heads[:, None], other=0.0)
    for j in range(start, stop, BW):
        w = j + tl.arange(0, BW)
        ok = w < stop
        token = tl.load(selection + s * selection_s + w, mask=ok, other=first_token) - first_token
        row_at = rows + token.to(tl.int64)[:, None] * rows_t
        k_v = tl.load(row_at + v[None, :])
        k_r = tl.load(row_at + V + r[None, :])
        scores = (tl.dot(q_v, tl.trans(k_v)) + tl.dot(q_r, tl.trans(k_r))) * scale
        scores = tl.where(ok[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(k_v.dtype), k_v)
        top = new_top
    tl.store(out_at, acc / total[:, None], mask=heads[:, None])
    tl.store(lse + s * lse_s + h, top + tl.log(total), mask=heads)


@triton.jit
def _backward(
    grad, delta, q, rows, selection, starts, stops, lse, dq, drows, first_token, scale,
    grad_s, grad_h, q_s, q_h, rows_t, selection_s, lse_s, dq_s, dq_h, drows_t,
    H: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, TRAINED: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(starts + s), tl.load(stops + s)
    if start >= stop:
        return
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    v, r = tl.arange(0, V), tl.arange(0, R)
    heads = h < H
    q_at = q + s * q_s + h[:, None] * q_h
    q_v = tl.load(q_at + v[None, :], mask=heads[:, None], other=0.0)
    q_r = tl.load(q_at + V + r[None, :], mask=heads[:, None], other=0.0)
    g = tl.load(grad + s * grad_s + h[:, None] * grad_h + v[None, :], mask=heads[:, None], other=0.0)
    # A head that is none has probability 0 everywhere.
    log_sum = tl.load(lse + s * lse_s + h, mask=heads, other=float("inf"))
    d = tl.load(delta + s * lse_s + h, mask=heads, other=0.0)
    dq_at = dq + s * dq_s + h[:, None] * dq_h
    dq_v = tl.load(dq_at + v[None, :], mask=heads[:, None], other=0.0)
    dq_r = tl.load(dq_at + V + r[None, :], mask=heads[:, None], other=0.0)
    for j in range(start, stop, BW):
        w = j + tl.arange(0, BW)
        ok = w < stop
        token = tl.load(selection + s * selection_s + w, mask=ok, other=first_token) - first_token
        row_at = rows + token.to(tl.int64)[:, None] * rows_t
        k_v = tl.load(row_at + v[None, :])
        k_r = tl.load(row_at + V + r[None, :])
        scores = (tl.dot(q_v, tl.trans(k_v)) + tl.dot(q_r, tl.trans(k_r))) * scale
        p = tl.where(ok[None, :], tl.exp(scores - log_sum[:, None]), 0.0)
        ds = (p * (tl.dot(g, tl.trans(k_v)) - d[:, None]) * scale).to(k_v.dtype)
        dq_v += tl.dot(ds, k_v)
        dq_r += tl.dot(ds, k_r)
        if TRAINED:
            into = drows + token.to(tl.int64)[:, None] * drows_t
            dk_v = tl.dot(tl.trans(ds), q_v) + tl.dot(tl.trans(p.to(k_v.dtype)), g)
            tl.atomic_add(into + v[None, :], dk_v, mask=ok[:, None], sem="relaxed")
            tl.atomic_add(into + V + r[None, :], tl.dot(tl.trans(ds), q_r), mask=ok[:, None], sem="relaxed")
    tl.store(dq_at + v[None, :], dq_v, mask=heads[:, None])
    tl.store(dq_at + V + r[None, :], dq_r, mask=heads[:, None])


def takes(q_SHC: Tensor, rows_TC: Tensor, value_dim: int) -> bool:
    """Whether the kernels are made for these: half precision, and both widths a power of two, values at most 512."""
    parts = (value_dim, q_SHC.shape[2] - value_dim)
    half = q_SHC.dtype == rows_TC.dtype and q_SHC.dtype in (torch.float16, torch.bfloat16)
    return half and value_dim <= 512 and all(n >= 16 and n & (n - 1) == 0 for n in parts) and rows_TC.stride(1) == 1


def forward(
    q_NHC: Tensor,
    rows_TC: Tensor,
    selection_NK: Tensor,
    starts_N: Tensor,
    stops_N: Tensor,
    out_NHV: Tensor,
    lse_NH: Tensor,
    *,
    first_token: int,
    scale: float,
) -> None:
    """Merge the attention of N queries to the tokens `selection[n, start:stop]` into their running output, in place."""
    heads, value_dim = out_NHV.shape[1:]
    meta = FORWARD
    _forward[(len(q_NHC), triton.cdiv(heads, meta["BH"]))](
        q_NHC, rows_TC, selection_NK, starts_N, stops_N, out_NHV, lse_NH, first_token, scale,
        q_NHC.stride(0), q_NHC.stride(1), rows_TC.stride(0), selection_NK.stride(0),
        out_NHV.stride(0), out_NHV.stride(1), lse_NH.stride(0),
        H=heads, V=value_dim, R=q_NHC.shape[2] - value_dim, **meta,
    )  # fmt: skip


def backward(
    grad_NHV: Tensor,
    delta_NH: Tensor,
    q_NHC: Tensor,
    rows_TC: Tensor,
    selection_NK: Tensor,
    starts_N: Tensor,
    stops_N: Tensor,
    lse_NH: Tensor,
    dq_NHC: Tensor,
    drows_TC: Tensor | None,
    *,
    first_token: int,
    scale: float,
) -> None:
    """Add the gradients of the same tokens to `dq_NHC` and `drows_TC`, both float32."""
    heads, value_dim = grad_NHV.shape[1:]
    assert lse_NH.stride() == delta_NH.stride(), "one stride serves both"
    into = dq_NHC if drows_TC is None else drows_TC
    meta = BACKWARD
    _backward[(len(q_NHC), triton.cdiv(heads, meta["BH"]))](
        grad_NHV, delta_NH, q_NHC, rows_TC, selection_NK, starts_N, stops_N, lse_NH, dq_NHC, into, first_token, scale,
        grad_NHV.stride(0), grad_NHV.stride(1), q_NHC.stride(0), q_NHC.stride(1), rows_TC.stride(0),
        selection_NK.stride(0), lse_NH.stride(0), dq_NHC.stride(0), dq_NHC.stride(1), into.stride(0),
        H=heads, V=value_dim, R=q_NHC.shape[2] - value_dim, TRAINED=drows_TC is not None, **meta,
    )  # fmt: skip
