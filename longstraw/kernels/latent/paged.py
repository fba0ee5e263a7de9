"""Latent attention over pages as one autograd function: its backward streams the same pages again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from longstraw.kernels.latent.dense import attend_rows, attend_rows_backward
from longstraw.kernels.latent.merge import RunningOutput
from longstraw.kernels.latent.sparse import attend_selected, attend_selected_backward
from longstraw.kernels.rows import PrefixPages, branch_rows


def latent_attention(
    q_SHC: Tensor,
    own_SC: Tensor,
    *,
    lengths: Sequence[int],
    pages: PrefixPages,
    value_dim: int,
    scale: float,
    selection_SK: Tensor | None = None,
) -> Tensor:
    """Absorbed attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over the prefix on pages and own causal rows.

    One row a token is key and value of every head. Scores, softmax and merging are in float32 (float64 for float64
    inputs). Backward adds the prefix's gradient to the gradient pages, and to the own rows' gradient what later
    passes left for them.

    Args:
        q_SHC: [S, num_heads, C], queries in latent coordinates, the branches one after another along S.
        own_SC: [S, C], the pass's own latent rows; C = kv_lora_rank + qk_rope_head_dim.
        lengths: tokens of each branch; they add up to S.
        pages: the prefix.
        value_dim: the first elements of a row that are its value, kv_lora_rank.
        scale: factor of the scores.
        selection_SK: int32, the tokens that each query attends to (counted from the prefix's first token, the
            branch's own follow), ascending, `NOT_SELECTED` at the end; None for all that it may see.

    Returns:
        [S, num_heads, value_dim] in the dtype of `q_SHC`.
    """
    assert sum(lengths) == len(q_SHC) == len(own_SC), (lengths, q_SHC.shape, own_SC.shape)
    assert q_SHC.dtype == own_SC.dtype, (q_SHC.dtype, own_SC.dtype)
    return _PagedLatent.apply(q_SHC, own_SC, selection_SK, tuple(lengths), pages, value_dim, scale)


def latent_state_only(q_SHC: Tensor, own_SC: Tensor, pages: PrefixPages, *, value_dim: int) -> Tensor:
    """The attention of a layer whose output nobody reads: zeros out, while the rows still receive their gradient."""
    return _StateOnly.apply(q_SHC, own_SC, pages, value_dim)


class _PagedLatent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        own: Tensor,
        selection: Tensor | None,
        lengths: tuple[int, ...],
        pages: PrefixPages,
        value_dim: int,
        scale: float,
    ) -> Tensor:
        known = pages.kept_output()
        if known is None:
            with torch.autocast(q.device.type, enabled=False):
                running = RunningOutput(q, value_dim)
                prefix = 0
                with closing(pages.forward_blocks()) as blocks:
                    for block in blocks:
                        every = slice(0, len(q))
                        _attend(q, block.rows_TC, selection, running, every, prefix, scale, causal=False)
                        prefix += len(block.rows_TC)
                for rows in branch_rows(lengths):
                    _attend(q, own[rows], selection, running, rows, prefix, scale, causal=True)
            out, lse = running.out_SHV.to(q.dtype), running.lse_SH
            pages.keep_output(out, lse)
        else:
            out, lse = known
        # A kept tensor must not become this node's output itself: autograd would hang the graph on it.
        out = out.detach()
        ctx.save_for_backward(q, own, selection, out, lse)
        ctx.lengths, ctx.pages, ctx.scale = lengths, pages, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, own, selection, out, lse = ctx.saved_tensors
        wide = lse.dtype
        with torch.autocast(q.device.type, enabled=False):
            grad = grad.to(q.dtype).contiguous()
            delta = (grad.to(wide) * out.to(wide)).sum(-1)
            dq = torch.zeros(q.shape, dtype=wide, device=q.device)
            call = _Backward(grad, delta, q, lse, dq, selection, ctx.scale)
            prefix = 0
            with closing(ctx.pages.backward_blocks()) as blocks:
                for block in blocks:
                    drows = None
                    if block.gradient is not None:
                        drows = torch.zeros(block.rows_TC.shape, dtype=wide, device=q.device)
                    call.block(block.rows_TC, drows, prefix)
                    if block.gradient is not None and drows is not None:
                        block.gradient.add(drows)
                    prefix += len(block.rows_TC)
            down = torch.zeros(own.shape, dtype=wide, device=q.device)
            call.own(own, down, ctx.lengths, prefix)
            _add_own_gradient(ctx.pages, down)
        return dq.to(q.dtype), down.to(own.dtype), None, None, None, None, None


class _Backward:
    """The backward of one call: what all of its blocks share."""

    def __init__(
        self,
        grad: Tensor,
        delta: Tensor,
        q: Tensor,
        lse: Tensor,
        dq: Tensor,
        selection: Tensor | None,
        scale: float,
    ) -> None:
        self._grad, self._delta, self._q, self._lse, self._dq = grad, delta, q, lse, dq
        self._selection, self._scale = selection, scale

    def block(self, rows: Tensor, drows: Tensor | None, first_token: int) -> None:
        self._add(rows, drows, slice(0, len(self._q)), first_token, causal=False)

    def own(self, own: Tensor, down: Tensor, lengths: Sequence[int], prefix: int) -> None:
        for rows in branch_rows(lengths):
            self._add(own[rows], down[rows], rows, prefix, causal=True)

    def _add(self, rows: Tensor, drows: Tensor | None, queries: slice, first_token: int, *, causal: bool) -> None:
        if self._selection is None:
            attend_rows_backward(
                self._grad, self._delta, self._q, rows, self._lse, self._dq, drows, queries,
                scale=self._scale, causal=causal,
            )  # fmt: skip
        else:
            attend_selected_backward(
                self._grad, self._delta, self._q, rows, self._selection, self._lse, self._dq, drows, queries,
                first_token=first_token, scale=self._scale,
            )  # fmt: skip


def _attend(
    q: Tensor,
    rows: Tensor,
    selection: Tensor | None,
    running: RunningOutput,
    queries: slice,
    first_token: int,
    scale: float,
    *,
    causal: bool,
) -> None:
    if selection is None:
        attend_rows(q, rows, running, queries, scale=scale, causal=causal)
    else:
        # A selection holds visible tokens only.
        attend_selected(q, rows, selection, running, queries, first_token=first_token, scale=scale)


class _StateOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, own: Tensor, pages: PrefixPages, value_dim: int) -> Tensor:
        ctx.pages, ctx.like = pages, (own.shape, own.dtype, own.device)
        return q.new_zeros(*q.shape[:2], value_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        shape, dtype, device = ctx.like
        down = torch.zeros(shape, dtype=dtype, device=device)
        _add_own_gradient(ctx.pages, down)
        return None, down, None, None


def _add_own_gradient(pages: PrefixPages, down: Tensor) -> None:
    with closing(pages.own_gradient()) as gradients:
        for rows_SC in gradients:
            down += rows_SC
