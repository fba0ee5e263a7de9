"""Peak device memory beyond weights as the prompt grows, pages on the host tier.

python -m benchmarks.memory_growth --layers 2 --prompt 65536 131072 262144 524288
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.common import Record, free_memory, qwen3, random_group
from benchmarks.step import measure_ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prompt", type=int, nargs="+", default=[65_536, 131_072, 262_144, 524_288])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--mode", choices=["exact", "detached"], default="exact")
    parser.add_argument("--host-budget", default="60GiB")
    parser.add_argument("--out")
    options = parser.parse_args()
    record = Record(options.out)
    model = qwen3(options.layers, "cuda", torch.bfloat16, lora=True)
    settings = {
        "tiers": [{"kind": "host", "budget": options.host_budget}],
        "gradient": {"prompt": options.mode},
        "capture": {"chunk_tokens": 8192},
    }
    for prompt in options.prompt:
        ids, responses = random_group(prompt, options.group, options.response, 151_936)
        free_memory()
        result = measure_ours(model, ids, responses, settings, 1)
        report = result["report"]
        record.add(
            "memory growth", layers=options.layers, mode=options.mode, prompt=prompt, group=options.group,
            response=options.response, seconds=result["seconds"],
            peak_beyond_weights_gib=result["peak_beyond_weights_gib"],
            tier_bytes=report["tier_bytes"], settings=settings, report=report,
        )  # fmt: skip


if __name__ == "__main__":
    main()
