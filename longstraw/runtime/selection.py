"""Layers that keep index keys: which tokens each query of a pass attends to, and layers that share the answer."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.kernels.selection import RunningTopK, index_scores
from longstraw.resident.state import Field, StateKind
from longstraw.runtime.layer_io import LayerIO
from longstraw.runtime.layer_spec import StateSpec

INDEX = "index"

_SELECTION = "selection"


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """What selects tokens in one layer of a pass.

    Attributes:
        q_SHD: index queries [S, index heads, index head dim], position encoded.
        keys_SD: index keys of the pass's own rows; one a token for all heads.
        weights_SH: factor of each head, float32.
        scale: factor of the products of queries and keys.
        top_k: tokens to select.
    """

    q_SHD: Tensor
    keys_SD: Tensor
    weights_SH: Tensor
    scale: float
    top_k: int


def index_spec(index: Index) -> StateSpec:
    """The state of a layer that computes an index: no gradient flows through a selection."""
    field = Field(name="k", shape=(index.keys_SD.shape[1],))
    return StateSpec(name=INDEX, kind=StateKind.TOKEN, fields=(field,), dtype=index.keys_SD.dtype, backward=False)


def selection_bytes(index: Index) -> int:
    """Bytes a token of a selection."""
    return 4 * index.top_k


def select(io: LayerIO, index: Index | None) -> Tensor:
    """The tokens that each query attends to, int32 [S, K], ascending; counted from the prompt's first token.

    Without an `index` they are those of the last layer that had one. A recomputed layer gets the selection of its
    first run: the index keys stream by once.
    """
    selection = io.kept(_SELECTION)
    if selection is None:
        selection = io.shared(_SELECTION) if index is None else _select(io, index)
    assert selection is not None, f"layer {io.spec.index} shares a selection, but no layer before it made one"
    io.share(_SELECTION, selection)
    io.keep(_SELECTION, selection)
    return selection


@torch.no_grad()
def _select(io: LayerIO, index: Index) -> Tensor:
    q, weights, scale = index.q_SHD, index.weights_SH, index.scale
    top_k = min(index.top_k, io.prefix_rows + max(io.lengths))
    running = RunningTopK(len(q), top_k, q.device)
    with torch.autocast(q.device.type, enabled=False):
        at = 0
        with closing(io.blocks(INDEX)) as blocks:
            for block in blocks:
                for mine, scores in index_scores(q, block.rows_TC, weights, slice(0, len(q)), scale):
                    running.add(mine, scores, at)
                at += len(block.rows_TC)
        start = 0
        for length in io.lengths:
            branch = slice(start, start + length)
            for mine, scores in index_scores(q, index.keys_SD[branch], weights, branch, scale):
                hidden = torch.ones_like(scores, dtype=torch.bool).triu_(1 + mine.start - start)
                running.add(mine, scores.masked_fill(hidden, float("-inf")), at)
            start += length
    return running.result()
