"""Which kernels a step's time goes to: torch's profiler over one transaction, after a warm one.

python -m benchmarks.profile_step --layers 4 --prompt 32768 --trace step.json
"""

from __future__ import annotations

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import qwen3, random_group
from benchmarks.step import loss_of
from longstraw import Runtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=32_768)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--no-lora", action="store_true")
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--trace")
    options = parser.parse_args()
    model = qwen3(options.layers, "cuda", torch.bfloat16, lora=not options.no_lora)
    ids, responses = random_group(options.prompt, options.group, options.response, 151_936)

    def step(runtime: Runtime) -> None:
        with runtime.transaction(ids) as transaction:
            for lane in transaction.replay(responses):
                parts = [loss_of(lp, 1.0, 1) for lp in lane.logprobs]
                lane.backward(sum(parts[1:], parts[0]))
        print(transaction.report.to_dict())

    with Runtime(model, tiers=[{"kind": "host", "budget": "40GiB"}]) as runtime:
        step(runtime)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step(runtime)
    print(
        profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=options.rows, max_name_column_width=70)
    )
    if options.trace:
        profiler.export_chrome_trace(options.trace)


if __name__ == "__main__":
    main()
