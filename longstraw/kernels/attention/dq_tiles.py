"""Where three matrix products of our own were measured faster than cuDNN's five, and in which tiles."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DqTiles:
    """How `fused_dq.add_dq` cuts its work.

    Attributes:
        queries, keys: a tile of scores; powers of two from 16 on.
        num_warps, num_stages: of a program; stages are tiles of keys and values on their way.
        copy_engine: whether tiles of keys and values come by the tensor copy engine (compute capability 9.0 and above)
            or by each thread's own loads. The result has the same bits.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    copy_engine: bool


FASTER_ON_HOPPER: dict[int, DqTiles] = {
    128: DqTiles(queries=128, keys=64, num_warps=8, num_stages=3, copy_engine=True),
    256: DqTiles(queries=64, keys=32, num_warps=4, num_stages=3, copy_engine=True),
}
"""By head dim, what beat cuDNN's backward of a block on an H200, by 2.0 and 2.4 times (benchmarks/RESULTS.md)."""

LEAST_QUERIES = 2048
"""Fewer queries make too few programs for the device: one goes over all keys of a block for one tile of queries."""
