"""Attention over host pages against one monolithic cuDNN call with everything on the device.

Both sides compute the same prefix; the paged side also each query's own causal rows, which the ratio allows for.

    python -m benchmarks.attention_over_pages --prefix 524288 --queries 8192 --profile
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.common import Record, free_memory, seconds
from benchmarks.kernel_times import KernelTimes, Timer
from longstraw.kernels.attention import choose_ops, kv_views, paged_attention
from longstraw.pagers.device import DevicePager
from longstraw.pagers.host import HostPager
from longstraw.pagers.staging import StagingPool
from longstraw.resident.store import PageStore
from longstraw.runtime.kv import KV, KvPages, kv_spec
from longstraw.runtime.passes import ForwardPass, Purpose
from longstraw.runtime.prompt_state import PromptState

SHAPES = {"32/8 x 128": (32, 8, 128), "24/4 x 256": (24, 4, 256)}


def measure(
    record: Record, name: str, prefix: int, queries: int, block: int, tier: str, layers: int, profile: bool
) -> None:
    heads, kv_heads, head_dim = SHAPES[name]
    device, dtype = torch.device("cuda"), torch.bfloat16
    scale = head_dim**-0.5
    torch.manual_seed(0)
    q = torch.randn(1, queries, heads, head_dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
    k, v = (
        torch.randn(1, queries, kv_heads, head_dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for _ in range(2)
    )
    grad = torch.randn(1, queries, heads, head_dim, device=device, dtype=dtype).transpose(1, 2)
    ops = choose_ops(device, dtype, head_dim)
    specs = [kv_spec(layer, q, k, v) for layer in range(layers)]
    budget = layers * prefix * 2 * kv_heads * head_dim * 6 + (1 << 24)
    pager = HostPager(budget, device) if tier == "host" else DevicePager(budget, device)
    state = PromptState(
        PageStore([pager], page_rows=1024), "benchmark", specs, chunks=[(0, prefix)], exact=True, accumulate_wide=True,
        keep_outputs="never", block_tokens=block, lookahead=2, staging=StagingPool(device),
    )  # fmt: skip
    starts = range(0, prefix, block)
    fills = [state.fill(layer, KV, at, min(at + block, prefix)) for layer in range(layers) for at in starts]
    with state.stream(fills) as stream:
        for request in fills:
            with stream.next(request.segment, request.start, request.stop) as rows:
                rows.normal_()

    def paged(watch: Timer | KernelTimes) -> None:
        """A pass over all layers, forward and backward."""
        with ForwardPass(Purpose.REPLAY, [queries], state=state, prefix_rows=prefix) as forward:
            outs = []
            torch.cuda.synchronize()
            with watch.section("paged forward"):
                for layer in range(layers):
                    pages = KvPages(forward.layer(specs[layer]))
                    outs.append(paged_attention(q, k, v, lengths=[queries], pages=pages, ops=ops, scale=scale))
            with watch.section("paged backward"):
                for out in reversed(outs):
                    torch.autograd.grad(out, [q, k, v], grad)
            torch.cuda.synchronize()
        state.gradients_started = True

    timers = [Timer() for _ in range(5)]
    for timer in timers:
        paged(timer)
    runs = [timer.seconds() for timer in timers[2:]]
    forward_s, backward_s = (
        statistics.median(run[side] for run in runs) / layers for side in ("paged forward", "paged backward")
    )
    kernel_times = KernelTimes()
    if profile:
        paged(kernel_times)
    state.release()
    pager.close()
    free_memory()
    rows = torch.randn(prefix, 2 * kv_heads * head_dim, device=device, dtype=dtype)
    whole_k, whole_v = (x.contiguous() for x in kv_views(rows, kv_heads, head_dim))
    del rows
    plain_q = q.detach().contiguous()
    out, lse = ops.forward(plain_q, whole_k, whole_v, causal=False, scale=scale)

    def whole_forward() -> None:
        ops.forward(plain_q, whole_k, whole_v, causal=False, scale=scale)

    def whole_backward() -> None:
        ops.backward(grad, plain_q, whole_k, whole_v, out, lse, causal=False, scale=scale)

    mono_forward, mono_backward = seconds(whole_forward), seconds(whole_backward)
    # The monolithic call leaves the queries' own causal rows out; the paged one has them.
    own = 1 + queries / 2 / prefix
    flops = 4 * queries * prefix * heads * head_dim * own
    record.add(
        "attention over pages against one monolithic call",
        shape=name, prefix=prefix, queries=queries, block=block, tier=tier, layers=layers, ops=ops.name,
        paged_forward_s=forward_s, monolithic_forward_s=mono_forward, forward_ratio=forward_s / mono_forward / own,
        paged_backward_s=backward_s, monolithic_backward_s=mono_backward,
        backward_ratio=backward_s / mono_backward / own,
        forward_tflops=flops / forward_s / 1e12, backward_tflops=2.5 * flops / backward_s / 1e12,
    )  # fmt: skip
    if profile:
        with kernel_times.section("monolithic forward"):
            whole_forward()
        with kernel_times.section("monolithic backward"):
            whole_backward()
        for side, times in kernel_times.found.items():
            # The monolithic side is one layer.
            record.add(f"GPU microseconds, {side}", shape=name, block=block, layers=layers, **times)
    free_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", type=int, default=524_288)
    parser.add_argument("--queries", type=int, default=8192)
    parser.add_argument("--block", type=int, nargs="+", default=[65_536])
    parser.add_argument("--tier", nargs="+", default=["host"])
    parser.add_argument("--shape", nargs="+", default=list(SHAPES))
    parser.add_argument("--layers", type=int, default=3, help="layers in a pass; the time is a layer's share")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="one more pass of each side, its GPU time by kernel (paged: of all layers)",
    )
    parser.add_argument("--out")
    options = parser.parse_args()
    record = Record(options.out)
    for name in options.shape:
        for tier in options.tier:
            for block in options.block:
                measure(record, name, options.prefix, options.queries, block, tier, options.layers, options.profile)


if __name__ == "__main__":
    main()
