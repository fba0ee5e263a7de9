"""Latent attention over the selected rows of a block: they are gathered, query by query, in bounded tiles.

Half precision on CUDA runs in fused kernels, where widths allow it and no deterministic sums are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from longstraw.kernels.latent.merge import RunningOutput
from longstraw.kernels.latent.products import tile_elements, wide_product


def attend_selected(
    q_SHC: Tensor,
    rows_TC: Tensor,
    selection_SK: Tensor,
    running: RunningOutput,
    queries: slice,
    *,
    first_token: int,
    scale: float,
) -> None:
    """Let each of the queries `queries` attend to those of `rows_TC` that it selected; merge that into `running`.

    Args:
        q_SHC: all queries.
        rows_TC: a block of rows, of consecutive tokens.
        selection_SK: int32, the tokens that each query selected, in ascending order.
        first_token: the token of the block's first row.
    """
    fused = _fused(q_SHC, rows_TC, running.out_SHV.shape[2])
    if fused is not None:
        selection, starts, stops = _runs(selection_SK, queries, first_token, len(rows_TC))
        fused.forward(
            q_SHC[queries], rows_TC, selection, starts, stops, running.out_SHV[queries], running.lse_SH[queries],
            first_token=first_token, scale=scale,
        )  # fmt: skip
        return
    for mine, local, missing in _gathers(q_SHC, rows_TC, selection_SK, queries, first_token):
        rows = rows_TC[local]
        scores = _scores(q_SHC[mine], rows, missing, scale)
        running.add(mine, scores, rows[..., : running.out_SHV.shape[2]])


def attend_selected_backward(
    grad_SHV: Tensor,
    delta_SH: Tensor,
    q_SHC: Tensor,
    rows_TC: Tensor,
    selection_SK: Tensor,
    lse_SH: Tensor,
    dq_SHC: Tensor,
    drows_TC: Tensor | None,
    queries: slice,
    *,
    first_token: int,
    scale: float,
) -> None:
    """The backward of `attend_selected`; the arguments are those of `attend_rows_backward`.

    Many queries select the same row: on CUDA the order in which their gradients are added to it is not fixed, unless
    `torch.use_deterministic_algorithms` is on.
    """
    value_dim = grad_SHV.shape[2]
    fused = _fused(q_SHC, rows_TC, value_dim)
    if fused is not None:
        selection, starts, stops = _runs(selection_SK, queries, first_token, len(rows_TC))
        fused.backward(
            grad_SHV[queries], delta_SH[queries], q_SHC[queries], rows_TC, selection, starts, stops, lse_SH[queries],
            dq_SHC[queries], drows_TC, first_token=first_token, scale=scale,
        )  # fmt: skip
        return
    for mine, local, missing in _gathers(q_SHC, rows_TC, selection_SK, queries, first_token):
        rows, q, grad = rows_TC[local], q_SHC[mine], grad_SHV[mine]
        p = _scores(q, rows, missing, scale).sub_(lse_SH[mine][..., None]).exp_()
        ds = wide_product(grad, rows[..., :value_dim].transpose(1, 2)).sub_(delta_SH[mine][..., None])
        ds = ds.mul_(p).mul_(scale).to(q.dtype)
        dq_SHC[mine] += wide_product(ds, rows)
        if drows_TC is not None:
            drows = wide_product(ds.transpose(1, 2), q)
            drows[..., :value_dim] += wide_product(p.to(q.dtype).transpose(1, 2), grad)
            drows_TC.index_add_(0, local.flatten(), drows.flatten(0, 1))


def _fused(q_SHC: Tensor, rows_TC: Tensor, value_dim: int) -> ModuleType | None:
    """The fused kernels, if they are for this call."""
    if q_SHC.device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return None
    from longstraw.kernels.latent import fused

    return fused if fused.takes(q_SHC, rows_TC, value_dim) else None


def _runs(selection_SK: Tensor, queries: slice, first_token: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The selections of `queries`, and where the block's tokens start and end in each: [N, K], [N], [N].

    Tokens ascend, so what a query selected of a block is one run of its list.
    """
    selection = selection_SK[queries].contiguous()
    bounds = torch.tensor([first_token, first_token + rows], dtype=selection.dtype, device=selection.device)
    starts, stops = torch.searchsorted(selection, bounds.repeat(len(selection), 1)).unbind(1)
    return selection, starts.contiguous(), stops.contiguous()


def _gathers(
    q_SHC: Tensor, rows_TC: Tensor, selection_SK: Tensor, queries: slice, first_token: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Queries, rows that they gather (int64 [N, W], row 0 where there are fewer) and which of these are none."""
    selection, starts, stops = _runs(selection_SK, queries, first_token, len(rows_TC))
    counts = stops - starts
    width = min(selection.shape[1], len(rows_TC))
    step = max(tile_elements(q_SHC.device) // (width * rows_TC.shape[1]), 1)
    widths = torch.stack([part.max() for part in counts.split(step)]).tolist()
    for tile, widest in enumerate(widths):
        if widest == 0:
            continue
        part = slice(tile * step, min((tile + 1) * step, len(selection)))
        columns = torch.arange(widest, device=selection.device)
        missing = columns[None] >= counts[part, None]
        chosen = (starts[part, None] + columns).clamp_max_(selection.shape[1] - 1)
        local = selection[part].gather(1, chosen).long() - first_token
        yield (
            slice(queries.start + part.start, queries.start + part.stop),
            local.masked_fill_(missing, 0),
            missing,
        )


def _scores(q_NHC: Tensor, rows_NWC: Tensor, missing_NW: Tensor, scale: float) -> Tensor:
    scores = wide_product(q_NHC, rows_NWC.transpose(1, 2)).mul_(scale)
    return scores.masked_fill_(missing_NW[:, None], float("-inf"))
