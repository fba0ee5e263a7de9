"""Attention over pages as one autograd function: its backward streams the same pages again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from longstraw.kernels.attention.merge import sink_gradient
from longstraw.kernels.attention.ops import AttentionOps
from longstraw.kernels.attention.queries import QueryGradient
from longstraw.kernels.attention.rows import add_kv_gradient, kv_views
from longstraw.kernels.attention.running import PartialMerge
from longstraw.kernels.rows import PrefixPages


def paged_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    lengths: Sequence[int],
    pages: PrefixPages,
    ops: AttentionOps,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of packed branches over the prefix on pages and over each branch's own causal rows.

    Partial outputs are merged in float32 (float64 for float64 inputs); backward takes the merged output and
    log-sum-exp, adds the prefix's dK and dV into the gradient pages, and adds to the own rows' gradient what later
    passes left for them on gradient pages.

    Args:
        q_BHSD: [1, num_heads, S, head_dim], the branches one after another along S.
        k_BKSD, v_BKSD: [1, num_kv_heads, S, head_dim].
        lengths: tokens of each branch; they add up to S.
        pages: the prefix.
        ops: the attention ops to use for every block.
        scale: factor of the scores.
        sinks_H: scores [num_heads] of a key without a value that every query sees once, or None.

    Returns:
        [1, num_heads, S, head_dim] in the dtype of `q_BHSD`.
    """
    assert sum(lengths) == q_BHSD.shape[2] and q_BHSD.shape[0] == 1, (lengths, q_BHSD.shape)
    return _PagedAttention.apply(q_BHSD, k_BKSD, v_BKSD, sinks_H, tuple(lengths), pages, ops, scale)


def keep_state_only(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, pages: PrefixPages) -> Tensor:
    """The attention of a layer whose output nobody reads: zeros out, while K and V still receive their gradient.

    True of the last layer when only the prompt's state is wanted, in capture and in the sweep.
    """
    return _StateOnly.apply(q_BHSD, k_BKSD, v_BKSD, pages)


class _PagedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        lengths: tuple[int, ...],
        pages: PrefixPages,
        ops: AttentionOps,
        scale: float,
    ) -> Tensor:
        known = pages.kept_output()
        if known is None:
            merge = PartialMerge()
            with closing(pages.forward_blocks()) as blocks:
                for block in blocks:
                    prefix_k, prefix_v = kv_views(block.rows_TC, k.shape[1], k.shape[3])
                    merge.add(*ops.forward(q, prefix_k, prefix_v, causal=False, scale=scale))
            merge.add(*ops.forward_packed(q, k, v, lengths, scale=scale))
            if sinks is not None:
                merge.add_sink(sinks)
            out, lse = merge.result(q.dtype)
            pages.keep_output(out, lse)
        else:
            out, lse = known
        # A kept tensor must not become this node's output itself: autograd would hang the graph on it.
        out = out.detach()
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.lengths, ctx.pages, ctx.ops, ctx.scale = lengths, pages, ops, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, out, lse = ctx.saved_tensors
        ops: AttentionOps = ctx.ops
        wide = lse.dtype
        dq = QueryGradient(grad, q, out, lse, ops, ctx.scale)
        with closing(ctx.pages.backward_blocks()) as blocks:
            for block in blocks:
                prefix_k, prefix_v = kv_views(block.rows_TC, k.shape[1], k.shape[3])
                if block.gradient is None:
                    dq.add_block(prefix_k, prefix_v)
                    continue
                dq_part, dk_part, dv_part = ops.backward(
                    grad, q, prefix_k, prefix_v, out, lse, causal=False, scale=ctx.scale
                )
                dq.add(dq_part)
                add_kv_gradient(block.gradient, dk_part, dv_part)
        dq_own, dk, dv = ops.backward_packed(grad, q, k, v, out, lse, ctx.lengths, scale=ctx.scale)
        dq.add(dq_own)
        dk, dv = dk.to(wide), dv.to(wide)
        _add_own_gradient(ctx.pages, dk, dv)
        d_sinks = sink_gradient(grad, out, lse, sinks) if ctx.needs_input_grad[3] else None
        return dq.result(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None, None


class _StateOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pages: PrefixPages) -> Tensor:
        ctx.pages, ctx.like = pages, (k.shape, k.dtype, k.device)
        return torch.zeros_like(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        shape, dtype, device = ctx.like
        dk, dv = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        _add_own_gradient(ctx.pages, dk, dv)
        return None, dk, dv, None


def _add_own_gradient(pages: PrefixPages, dk: Tensor, dv: Tensor) -> None:
    with closing(pages.own_gradient()) as gradients:
        for rows_SC in gradients:
            k_rows, v_rows = kv_views(rows_SC, dk.shape[1], dk.shape[3])
            dk += k_rows
            dv += v_rows
