"""Index scores by tiles of one shape, so that a score does not depend on how queries and keys are cut.

Half precision on CUDA runs in one fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

_QUERIES, _KEYS = {"cuda": 128, "cpu": 32}, {"cuda": 4096, "cpu": 256}
_FUSED_QUERIES = 512


def index_scores(
    q_SHD: Tensor, keys_TD: Tensor, weights_SH: Tensor, queries: slice, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """Scores of the queries `queries` over a block of keys, some queries at a time.

    The score of a query and a key is sum over heads of weight x relu(q . k x scale), in float32 (DeepSeek-V3.2,
    section 2.1, as transformers computes it). Matrix products of one shape sum in one order: tiles are padded, for
    else two cuts of the same tokens would round differently, and a near tie be decided differently.

    Args:
        q_SHD: [S, index heads, index head dim], all queries.
        keys_TD: [T, index head dim].
        weights_SH: float32, factor of each head.
        scale: factor of the products.

    Yields:
        a slice of queries with their scores, float32 [N, T].
    """
    if _fused(q_SHD, keys_TD):
        from longstraw.kernels.selection.fused import fused_index_scores

        for at in range(queries.start, queries.stop, _FUSED_QUERIES):
            mine = slice(at, min(at + _FUSED_QUERIES, queries.stop))
            yield mine, fused_index_scores(q_SHD[mine], keys_TD, weights_SH[mine].float(), scale)
        return
    queries_tile, keys_tile = _QUERIES.get(q_SHD.device.type, 32), _KEYS.get(q_SHD.device.type, 256)
    for at in range(queries.start, queries.stop, queries_tile):
        mine = slice(at, min(at + queries_tile, queries.stop))
        missing = queries_tile - (mine.stop - at)
        q = pad(q_SHD[mine].float(), (0, 0, 0, 0, 0, missing)).flatten(0, 1)
        weights = pad(weights_SH[mine].float(), (0, 0, 0, missing)).unsqueeze(1)
        parts = []
        for key_at in range(0, len(keys_TD), keys_tile):
            keys = keys_TD[key_at : key_at + keys_tile].float()
            products = q @ pad(keys, (0, 0, 0, keys_tile - len(keys))).t()
            heads = products.mul_(scale).relu_().view(queries_tile, -1, keys_tile)
            parts.append((weights @ heads)[: mine.stop - at, 0, : len(keys)])
        yield mine, torch.cat(parts, dim=1)


def _fused(q_SHD: Tensor, keys_TD: Tensor) -> bool:
    """Whether the fused kernel is for this call."""
    if q_SHD.device.type != "cuda":
        return False
    from longstraw.kernels.selection import fused

    return fused.takes(q_SHD, keys_TD)
