"""The kernels that attention over pages adds to cuDNN's, each beside torch's operations, on one block's tensors.

python -m benchmarks.attention_kernels --queries 8192 --block 65536
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_over_pages import SHAPES
from benchmarks.common import Record, free_memory, seconds
from longstraw.errors import KernelMismatchError
from longstraw.kernels.attention import AttentionOps, choose_ops, fused, fused_dq, kv_views, merge
from longstraw.kernels.attention.check import check_dq, check_sums
from longstraw.kernels.attention.dq_tiles import DqTiles
from longstraw.kernels.attention.ops import CudaFlashOps

SUM_TILES = [{"elements": elements, "num_warps": warps} for elements in (2048, 4096, 8192) for warps in (4, 8)]

DQ_TILES = {
    head_dim: [
        DqTiles(queries=queries, keys=keys, num_warps=warps, num_stages=stages, copy_engine=engine)
        for queries, keys, warps, stages, engine in tiles
    ]
    for head_dim, tiles in {
        64: [(128, 128, 8, 2, True), (128, 128, 8, 3, True), (128, 64, 8, 3, True), (64, 64, 4, 3, True)],
        128: [
            (128, 128, 8, 2, True), (128, 128, 8, 2, False), (128, 64, 8, 2, True), (128, 64, 8, 3, True),
            (64, 64, 4, 2, True), (64, 128, 4, 2, True),
        ],
        256: [
            (128, 32, 8, 2, True), (128, 32, 8, 2, False), (64, 64, 4, 2, True), (64, 32, 4, 3, True),
            (128, 64, 8, 1, True), (64, 64, 8, 2, True),
        ],
    }.items()
}  # fmt: skip


class Block:
    """One block of a shape, and how its measurements are recorded."""

    def __init__(self, record: Record, name: str, queries: int, block: int) -> None:
        self.heads, self.kv_heads, self.head_dim = SHAPES[name]
        self.queries, self.block, self.scale = queries, block, self.head_dim**-0.5
        self._record, self._name = record, name

    def tokens(self, heads: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Random [1, heads, tokens, head_dim], token-major as models and ops have it."""
        return torch.randn(1, tokens, heads, self.head_dim, device="cuda", dtype=dtype).transpose(1, 2)

    def add(self, kernel: str, work: Callable[[], object], **values: Any) -> float:
        """Measure and record one kernel: `moved` bytes or `flops` turn into a rate. Returns its seconds."""
        time = seconds(work, repeats=5)
        for key, unit, name in (("moved", 1e9, "gb_per_s"), ("flops", 1e12, "tflops")):
            if key in values:
                values[name] = round(values.pop(key) / time / unit, 1)
        self._record.add(
            "kernels of attention over pages", shape=self._name, queries=self.queries, block=self.block, kernel=kernel,
            microseconds=round(time * 1e6, 1), **values,
        )  # fmt: skip
        return time


def measure_sums(at: Block) -> None:
    """Merging outputs, adding dQ, adding dK and dV."""
    values = at.heads * at.queries * at.head_dim
    running, part, other = (at.tokens(at.heads, at.queries, x) for x in (torch.float32, torch.bfloat16, torch.bfloat16))
    lses = [torch.randn(1, at.heads, at.queries, device="cuda") for _ in range(3)]
    pages = torch.randn(at.block, 2 * at.kv_heads * at.head_dim, device="cuda")
    into = kv_views(pages, at.kv_heads, at.head_dim)
    dk, dv = (at.tokens(at.kv_heads, at.block) for _ in range(2))

    def both(kernel: str, tuned: dict[str, int], moved: int, function: str, *inputs: Any, **options: Any) -> None:
        def plain() -> None:
            getattr(merge, function)(*inputs, **options)

        def work() -> None:
            getattr(fused, function)(*inputs, **options)

        at.add(f"{kernel}, torch", plain, moved=moved)
        chosen, times = dict(tuned), []
        for tile in SUM_TILES:
            tuned.update(tile)
            times.append((round(seconds(work, repeats=5) * 1e6, 1), tile))
        tuned.update(chosen)
        best = min(times, key=lambda found: found[0])[1]
        by_tile = [[*tile.values(), time] for time, tile in times]
        at.add(f"{kernel}, fused", work, moved=moved, tile=chosen, best=best, by_tile=by_tile)

    f32, bf16 = torch.float32, torch.bfloat16
    both("merge two parts", fused.MERGE, 8 * values, "merge_parts", part, lses[0], other, lses[1], f32)
    both("merge into running", fused.MERGE, 10 * values, "merge_parts", running, lses[2], part, lses[1], f32)
    both("merge the last part", fused.MERGE, 8 * values, "merge_parts", running, lses[2], part, lses[1], bf16)
    both("add dq", fused.ADD, 10 * values, "add_parts", running, part, f32)
    both("add dk and dv", fused.ADD, 10 * pages.numel(), "add_pair", *into, dk, dv, overwrite=False)
    both("write dk and dv", fused.ADD, 6 * pages.numel(), "add_pair", *into, dk, dv, overwrite=True)


def measure_backward(at: Block) -> None:
    """The backward of a block: five products of cuDNN and FlashAttention, and three of our own in every tiling."""
    q, grad = at.tokens(at.heads, at.queries), at.tokens(at.heads, at.queries)
    rows = torch.randn(at.block, 2 * at.kv_heads * at.head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = kv_views(rows, at.kv_heads, at.head_dim)
    product = 2 * at.heads * at.queries * at.block * at.head_dim
    chosen = choose_ops(q.device, q.dtype, at.head_dim)
    out, lse = chosen.forward(q, k, v, causal=False, scale=at.scale)
    lse = lse.contiguous()
    at.add(f"forward, {chosen.name}", lambda: chosen.forward(q, k, v, causal=False, scale=at.scale), flops=2 * product)

    def whole(ops: AttentionOps) -> Tensor:
        return ops.backward(grad, q, k, v, out, lse, causal=False, scale=at.scale)[0]

    for ops in (chosen, CudaFlashOps()):
        at.add(f"backward, {ops.name}", functools.partial(whole, ops), flops=5 * product)
    want = whole(chosen).float()
    delta = fused_dq.softmax_delta(grad, out)
    at.add("delta", lambda: fused_dq.softmax_delta(grad, out), moved=4 * out.numel())

    def alone(tiles: DqTiles, dq: Tensor) -> Tensor:
        fused_dq.add_dq(dq, grad, q, k, v, lse, delta, scale=at.scale, tiles=tiles)
        return dq

    times: list[tuple[float, DqTiles]] = []
    for tiles in DQ_TILES[at.head_dim]:
        try:
            got = alone(tiles, torch.zeros_like(q, dtype=torch.float32))
        except Exception as error:  # noqa: BLE001  # a tile that does not fit the device is a result here
            print(f"dq alone, {tiles}: {type(error).__name__} {str(error)[:200]}", flush=True)
            continue
        from_whole = float((got - want).norm() / want.norm())
        time = at.add(
            "dq alone", functools.partial(alone, tiles, got), flops=3 * product, tiles=dataclasses.asdict(tiles),
            differs_from_whole=from_whole,
        )  # fmt: skip
        times.append((time, tiles))
    if not times:
        return
    best = min(times, key=lambda found: found[0])[1]
    try:
        check_dq(fused_dq.add_dq, q.device, q.dtype, at.head_dim, best)
        checked = "right"
    except KernelMismatchError as error:
        checked = str(error)
    work = functools.partial(alone, best, torch.zeros_like(q, dtype=torch.float32))
    at.add("dq alone, best", work, flops=3 * product, tiles=dataclasses.asdict(best), checked=checked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=8192)
    parser.add_argument("--block", type=int, default=65_536)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES))
    parser.add_argument("--out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    torch.manual_seed(0)
    record = Record(options.out)
    for head_dim in (64, 128, 256):
        check_sums(fused, torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, head_dim)
    for name in options.shape:
        at = Block(record, name, options.queries, options.block)
        measure_sums(at)
        free_memory()
        measure_backward(at)
        free_memory()


if __name__ == "__main__":
    main()
