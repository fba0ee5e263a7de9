"""Times of latent attention and selection on one block of rows, at the shapes of GLM-5.2 (64 heads of 512 + 64)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

from longstraw.kernels.latent import sparse
from longstraw.kernels.latent.dense import attend_rows, attend_rows_backward
from longstraw.kernels.latent.merge import RunningOutput
from longstraw.kernels.selection import RunningTopK, index_scores

HEADS, VALUE_DIM, ROPE_DIM, INDEX_HEADS, INDEX_DIM, TOP_K = 64, 512, 64, 32, 128, 2048


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Mean time of `work` on the device, after one run that is not counted."""
    work()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tune", action="store_true", help="time the fused kernels over their tile sizes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    torch.manual_seed(0)
    queries, rows, width = options.queries, options.rows, VALUE_DIM + ROPE_DIM

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q, latent, grad = normal(queries, HEADS, width), normal(rows, width), normal(queries, HEADS, VALUE_DIM)
    index_q, keys = normal(queries, INDEX_HEADS, INDEX_DIM), normal(rows, INDEX_DIM)
    weights = torch.randn(queries, INDEX_HEADS, device="cuda")
    scale, every = width**-0.5, slice(0, queries)
    running = RunningOutput(q, VALUE_DIM)

    def scores() -> None:
        for _ in index_scores(index_q, keys, weights, every, INDEX_DIM**-0.5):
            pass

    top = RunningTopK(queries, TOP_K, q.device)

    def select() -> None:
        for mine, found in index_scores(index_q, keys, weights, every, INDEX_DIM**-0.5):
            top.add(mine, found, 0)

    select()
    selection = top.result().clone()

    def forward() -> None:
        running.lse_SH.fill_(float("-inf"))
        sparse.attend_selected(q, latent, selection, running, every, first_token=0, scale=scale)

    forward()
    delta = (grad.float() * running.out_SHV).sum(-1)
    dq, drows = torch.zeros_like(q, dtype=torch.float32), torch.zeros_like(latent, dtype=torch.float32)

    def backward() -> None:
        sparse.attend_selected_backward(
            grad, delta, q, latent, selection, running.lse_SH, dq, drows, every, first_token=0, scale=scale
        )

    def dense_forward() -> None:
        attend_rows(q, latent, running, every, scale=scale, causal=False)

    def dense_backward() -> None:
        attend_rows_backward(
            grad, delta, q, latent, running.lse_SH, dq, drows, every, scale=scale, causal=False
        )  # fmt: skip

    def report(name: str, work: Callable[[], object], flops: float) -> None:
        time = milliseconds(work, options.repeats)
        print(f"{name:42s} {time:9.2f} ms {flops / time / 1e9:7.0f} TFLOP/s", flush=True)

    pairs, chosen = queries * rows, queries * TOP_K
    report("index scores", scores, 2.0 * pairs * INDEX_HEADS * INDEX_DIM)
    report("index scores and top-k", select, 2.0 * pairs * INDEX_HEADS * INDEX_DIM)
    one = 2.0 * HEADS * (width + VALUE_DIM)
    report("selected rows, forward", forward, one * chosen)
    report("selected rows, backward", backward, 2.5 * one * chosen)
    if options.tune:
        tune(forward, backward, report, one * chosen)
    torch.use_deterministic_algorithms(True, warn_only=True)
    report("selected rows, forward, torch", forward, one * chosen)
    report("selected rows, backward, torch", backward, 2.5 * one * chosen)
    torch.use_deterministic_algorithms(False)
    report("all rows, forward", dense_forward, one * pairs)
    report("all rows, backward", dense_backward, 2.5 * one * pairs)


def tune(
    forward: Callable[[], object], backward: Callable[[], object], report: Callable[..., None], flops: float
) -> None:
    """Times over tile sizes; those that do not fit the device are named so."""
    from longstraw.kernels.latent import fused

    for name, meta, work, share in (
        ("forward", fused.FORWARD, forward, 1.0),
        ("backward", fused.BACKWARD, backward, 2.5),
    ):
        best = dict(meta)
        for heads in (16, 32, 64):
            for width in (16, 32, 64):
                for warps in (4, 8):
                    for stages in (1, 2):
                        meta.update(BH=heads, BW=width, num_warps=warps, num_stages=stages)
                        label = f"  {name} {heads} {width} {warps} {stages}"
                        try:
                            report(label, work, share * flops)
                        except Exception as error:  # noqa: BLE001  # a tile that does not fit is a result here
                            print(f"{label}: {type(error).__name__} {str(error)[:60]}", flush=True)
        meta.update(best)


if __name__ == "__main__":
    main()
