"""Latent attention over all rows of a block, by bounded tiles of matrix products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from longstraw.kernels.latent.merge import RunningOutput
from longstraw.kernels.latent.products import tile_elements, wide_product

_KEYS = {"cuda": 4096, "cpu": 512}


def attend_rows(
    q_SHC: Tensor, rows_TC: Tensor, running: RunningOutput, queries: slice, *, scale: float, causal: bool
) -> None:
    """Let the queries `queries` attend to `rows_TC`, and merge that into `running`.

    Args:
        q_SHC: all queries.
        causal: query i of `queries` sees rows 0..i only; there are as many rows as queries then.
    """
    for mine, keys in _tiles(q_SHC, queries, len(rows_TC), causal):
        scores = _scores(q_SHC, rows_TC, mine, keys, queries.start if causal else None, scale)
        running.add(mine, scores, rows_TC[keys, : running.out_SHV.shape[2]])


def attend_rows_backward(
    grad_SHV: Tensor,
    delta_SH: Tensor,
    q_SHC: Tensor,
    rows_TC: Tensor,
    lse_SH: Tensor,
    dq_SHC: Tensor,
    drows_TC: Tensor | None,
    queries: slice,
    *,
    scale: float,
    causal: bool,
) -> None:
    """The backward of `attend_rows`: adds to `dq_SHC` and to `drows_TC` (None if nobody wants it), both wide.

    `lse_SH` is the log-sum-exp over all keys, of this block and of others; `delta_SH` the sum of grad times out
    (FlashAttention-2, arXiv 2307.08691, algorithm 2).
    """
    value_dim = grad_SHV.shape[2]
    for mine, keys in _tiles(q_SHC, queries, len(rows_TC), causal):
        rows = rows_TC[keys]
        q_NC, grad_NV = q_SHC[mine].flatten(0, 1), grad_SHV[mine].flatten(0, 1)
        scores = _scores(q_SHC, rows_TC, mine, keys, queries.start if causal else None, scale).flatten(0, 1)
        p = scores.sub_(lse_SH[mine].reshape(-1, 1)).exp_()
        ds = wide_product(grad_NV, rows[:, :value_dim].t()).sub_(delta_SH[mine].reshape(-1, 1)).mul_(p).mul_(scale)
        ds = ds.to(q_SHC.dtype)
        dq_SHC[mine] += wide_product(ds, rows).view(-1, *q_SHC.shape[1:])
        if drows_TC is not None:
            drows_TC[keys] += wide_product(ds.t(), q_NC)
            drows_TC[keys, :value_dim] += wide_product(p.to(q_SHC.dtype).t(), grad_NV)


def _tiles(q_SHC: Tensor, queries: slice, rows: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    keys = _KEYS.get(q_SHC.device.type, 512)
    step = max(tile_elements(q_SHC.device) // (q_SHC.shape[1] * keys), 1)
    for at in range(queries.start, queries.stop, step):
        stop = min(at + step, queries.stop)
        seen = stop - queries.start if causal else rows
        for key_at in range(0, seen, keys):
            yield slice(at, stop), slice(key_at, min(key_at + keys, rows))


def _scores(q_SHC: Tensor, rows_TC: Tensor, mine: slice, keys: slice, first_query: int | None, scale: float) -> Tensor:
    """Scaled scores [N, num_heads, T], wide; `first_query` is the query of row 0 where attention is causal."""
    q = q_SHC[mine]
    scores = wide_product(q.flatten(0, 1), rows_TC[keys].t()).mul_(scale).view(*q.shape[:2], -1)
    if first_query is not None and keys.stop > mine.start - first_query:
        at_q = torch.arange(mine.start - first_query, mine.stop - first_query, device=q.device)
        at_k = torch.arange(keys.start, keys.stop, device=q.device)
        scores.masked_fill_((at_k[None] > at_q[:, None])[:, None], float("-inf"))
    return scores
