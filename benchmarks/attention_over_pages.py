"""Attention over host pages against one monolithic cuDNN call with everything on the device.

    python -m benchmarks.attention_over_pages --prefix 524288 --queries 8192
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.common import Record, free_memory, seconds
from longstraw.kernels.attention import choose_ops, kv_views, paged_attention
from longstraw.pagers.device import DevicePager
from longstraw.pagers.host import HostPager
from longstraw.pagers.staging import StagingPool
from longstraw.resident.store import PageStore
from longstraw.runtime.kv import KV, _KvPages, kv_spec
from longstraw.runtime.passes import ForwardPass, Purpose
from longstraw.runtime.prompt_state import PromptState

SHAPES = {"32/8 x 128": (32, 8, 128), "24/4 x 256": (24, 4, 256)}


def measure(record: Record, name: str, prefix: int, queries: int, block: int, tier: str) -> None:
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
    spec = kv_spec(0, q, k, v)
    other = kv_spec(1, q, k, v)  # so that layer 0 is not the last, whose output nobody needs
    budget = prefix * 2 * kv_heads * head_dim * 20
    pager = HostPager(budget, device) if tier == "host" else DevicePager(budget, device)
    store = PageStore([pager], page_rows=1024)
    state = PromptState(
        store, "benchmark", [spec, other], chunks=[(0, prefix)], exact=True, accumulate_wide=True,
        block_tokens=block, lookahead=2, staging=StagingPool(device),
    )  # fmt: skip
    with state.stream([state.fill(0, KV, at, min(at + block, prefix)) for at in range(0, prefix, block)]) as stream:
        for at in range(0, prefix, block):
            request = state.fill(0, KV, at, min(at + block, prefix))
            with stream.next(request.segment, request.start, request.stop) as rows:
                rows.normal_()
    ops = choose_ops(device, dtype, head_dim)
    timers = {"forward": 0.0, "backward": 0.0}

    def paged(direction: str) -> float:
        forward = ForwardPass(Purpose.REPLAY, [queries], state=state, prefix_rows=prefix)
        forward.state.layers = state.layers[:1]
        with forward:
            pages = _KvPages(forward.layer(spec))
            start, middle, stop = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            start.record()
            out = paged_attention(q, k, v, lengths=[queries], pages=pages, ops=ops, scale=scale)
            middle.record()
            torch.autograd.grad(out, [q, k, v], grad)
            stop.record()
            torch.cuda.synchronize()
        state.gradients_started = True
        return (start.elapsed_time(middle) if direction == "forward" else middle.elapsed_time(stop)) / 1e3

    runs = [(paged("forward"), paged("backward")) for _ in range(6)][2:]
    timers["forward"] = sorted(a for a, _ in runs)[len(runs) // 2]
    timers["backward"] = sorted(b for _, b in runs)[len(runs) // 2]
    state.release()
    pager.close()
    free_memory()
    rows = torch.randn(prefix, 2 * kv_heads * head_dim, device=device, dtype=dtype)
    whole_k, whole_v = (x.contiguous() for x in kv_views(rows, kv_heads, head_dim))
    del rows
    plain_q = q.detach().contiguous()
    out, lse = ops.forward(plain_q, whole_k, whole_v, causal=False, scale=scale)
    mono_forward = seconds(lambda: ops.forward(plain_q, whole_k, whole_v, causal=False, scale=scale))
    mono_backward = seconds(
        lambda: ops.backward(grad, plain_q, whole_k, whole_v, out, lse, causal=False, scale=scale)
    )
    flops = 4 * queries * prefix * heads * head_dim
    record.add(
        "attention over pages against one monolithic call",
        shape=name, prefix=prefix, queries=queries, block=block, tier=tier, ops=ops.name,
        paged_forward_s=timers["forward"], monolithic_forward_s=mono_forward,
        forward_ratio=timers["forward"] / mono_forward,
        paged_backward_s=timers["backward"], monolithic_backward_s=mono_backward,
        backward_ratio=timers["backward"] / mono_backward,
        forward_tflops=flops / timers["forward"] / 1e12, backward_tflops=2.5 * flops / timers["backward"] / 1e12,
    )  # fmt: skip
    free_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", type=int, default=524_288)
    parser.add_argument("--queries", type=int, default=8192)
    parser.add_argument("--block", type=int, nargs="+", default=[65_536])
    parser.add_argument("--tier", nargs="+", default=["host"])
    parser.add_argument("--shape", nargs="+", default=list(SHAPES))
    parser.add_argument("--out")
    options = parser.parse_args()
    record = Record(options.out)
    for name in options.shape:
        for tier in options.tier:
            for block in options.block:
                measure(record, name, options.prefix, options.queries, block, tier)


if __name__ == "__main__":
    main()
