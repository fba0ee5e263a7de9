"""Windowed attention as one autograd function: the window's rows come in, their gradient goes out, beside q, k, v."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from longstraw.kernels.attention.merge import merge_dtype, sink_gradient
from longstraw.kernels.attention.running import PartialMerge
from longstraw.kernels.rows import KeptOutput, branch_rows
from longstraw.kernels.windowed.ops import WindowOps
from longstraw.kernels.windowed.slide import Slide


class WindowState(KeptOutput, Protocol):
    """A layer's window in one pass: the last W - 1 tokens before it, and what becomes of their gradient."""

    @property
    def slide(self) -> Slide:
        """The window in front of the pass's rows."""
        ...

    def next_gradient(self) -> tuple[Tensor, Tensor] | None:
        """Gradients of keys and values, [1, num_kv_heads, slide.after, head_dim] each, that later tokens sent to the
        window behind this pass's rows; None if there are none. Asked for first in a backward, once."""
        ...

    def add_gradient(self, dk_BKTD: Tensor, dv_BKTD: Tensor) -> None:
        """Takes the gradient of the window's rows, [1, num_kv_heads, slide.before, head_dim] each; once a backward."""
        ...


def windowed_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    window_k_BKTD: Tensor,
    window_v_BKTD: Tensor,
    sinks_H: Tensor | None,
    *,
    lengths: Sequence[int],
    state: WindowState,
    ops: WindowOps,
    scale: float,
) -> Tensor:
    """Attention of packed branches, where a token sees itself and the W - 1 tokens before it.

    The window's gradient does not travel through autograd but in float32 (float64) to `state`, which adds it up over
    branches and passes.

    Args:
        q_BHSD: [1, num_heads, S, head_dim], the branches one after another along S.
        k_BKSD, v_BKSD: [1, num_kv_heads, S, head_dim].
        window_k_BKTD, window_v_BKTD: [1, num_kv_heads, T, head_dim], the min(prefix, W - 1) tokens before the branches.
        sinks_H: [num_heads] scores of a key without a value that every query sees once, or None.
        lengths: tokens of each branch; they add up to S.
        state: the window.
        ops: the ops to use for every branch.
        scale: factor of the scores.

    Returns:
        [1, num_heads, S, head_dim] in the dtype of `q_BHSD`.
    """
    assert q_BHSD.shape[:3:2] == (1, sum(lengths)), (lengths, q_BHSD.shape)
    assert window_k_BKTD.shape[2] == state.slide.before, (window_k_BKTD.shape, state.slide)
    return _WindowedAttention.apply(
        q_BHSD, k_BKSD, v_BKSD, sinks_H, window_k_BKTD, window_v_BKTD, tuple(lengths), state, ops, scale
    )


def keep_window_only(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, state: WindowState) -> Tensor:
    """The attention of a layer whose output nobody reads: zeros out, while the window still hands its gradient on."""
    return _WindowOnly.apply(q_BHSD, k_BKSD, v_BKSD, state)


class _WindowedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        window_k: Tensor,
        window_v: Tensor,
        lengths: tuple[int, ...],
        state: WindowState,
        ops: WindowOps,
        scale: float,
    ) -> Tensor:
        known = state.kept_output()
        if known is None:
            parts = [
                ops.forward(
                    q[:, :, rows],
                    torch.cat([window_k, k[:, :, rows]], dim=2),
                    torch.cat([window_v, v[:, :, rows]], dim=2),
                    window=state.slide.window,
                    scale=scale,
                )
                for rows in branch_rows(lengths)
            ]
            merge = PartialMerge()
            merge.add(torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2))
            if sinks is not None:
                merge.add_sink(sinks)
            out, lse = merge.result(q.dtype)
            state.keep_output(out, lse)
        else:
            out, lse = known
        # A kept tensor must not become this node's output itself: autograd would hang the graph on it.
        out = out.detach()
        ctx.save_for_backward(q, k, v, sinks, window_k, window_v, out, lse)
        ctx.lengths, ctx.state, ctx.ops, ctx.scale = lengths, state, ops, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, window_k, window_v, out, lse = ctx.saved_tensors
        state: WindowState = ctx.state
        dq, dk, dv, d_window_k, d_window_v = (
            torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v, window_k, window_v)
        )
        before = state.slide.before
        for rows in branch_rows(ctx.lengths):
            dq[:, :, rows], dk_part, dv_part = ctx.ops.backward(
                grad[:, :, rows],
                q[:, :, rows],
                torch.cat([window_k, k[:, :, rows]], dim=2),
                torch.cat([window_v, v[:, :, rows]], dim=2),
                out[:, :, rows],
                lse[:, :, rows],
                window=state.slide.window,
                scale=ctx.scale,
            )
            d_window_k += dk_part[:, :, :before]
            d_window_v += dv_part[:, :, :before]
            dk[:, :, rows], dv[:, :, rows] = dk_part[:, :, before:], dv_part[:, :, before:]
        d_sinks = sink_gradient(grad, out, lse, sinks) if ctx.needs_input_grad[3] else None
        _pass_on(state, dk, dv, d_window_k, d_window_v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None, None, None, None


class _WindowOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, state: WindowState) -> Tensor:
        ctx.state, ctx.like = state, (k.shape, k.dtype, k.device)
        return torch.zeros_like(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        shape, dtype, device = ctx.like
        before = (*shape[:2], ctx.state.slide.before, shape[3])
        dk, dv, d_window_k, d_window_v = (
            torch.zeros(size, dtype=merge_dtype(dtype), device=device) for size in (shape, shape, before, before)
        )
        _pass_on(ctx.state, dk, dv, d_window_k, d_window_v)
        return None, dk.to(dtype), dv.to(dtype), None


def _pass_on(state: WindowState, dk: Tensor, dv: Tensor, d_window_k: Tensor, d_window_v: Tensor) -> None:
    """Share out what later tokens sent to the window behind these rows: to own rows, and to rows that came from the
    window before; then hand that window its gradient."""
    slide, arrived = state.slide, state.next_gradient()
    if arrived is not None:
        for into_own, into_window, gradient in zip((dk, dv), (d_window_k, d_window_v), arrived, strict=True):
            into_window[:, :, slide.before - slide.staying :] += gradient[:, :, : slide.staying]
            into_own[:, :, slide.own - slide.entering :] += gradient[:, :, slide.staying :]
    state.add_gradient(d_window_k, d_window_v)
