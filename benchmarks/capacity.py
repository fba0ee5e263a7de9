"""How long a prompt Qwen3.6-27B's shape trains on one GPU: LoRA on every linear layer, bfloat16, random weights.

    python -m benchmarks.capacity --mode exact --prompt 131072
    python -m benchmarks.capacity --mode detached --prompt 524288

Each prompt is one transaction, the first of its `Runtime`, so that pinning host memory and planning kernels are in it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from benchmarks.common import Record, free_memory, random_group
from benchmarks.family_layers import SHAPES, ours
from longstraw import Runtime
from longstraw.runtime.sizing import workspace_bytes

LINEAR = [
    "q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "gate_proj", "up_proj", "down_proj",
]  # fmt: skip


def build(layers: int, device: str, **shape: Any) -> torch.nn.Module:
    """Qwen3.6-27B's text model: three gated-delta layers, then one of full attention, and so on."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    pattern = SHAPES["qwen3_6"]["layer_types"]
    config = Qwen3_5TextConfig(
        **SHAPES["qwen3_6"]
        | {"num_hidden_layers": layers, "layer_types": [pattern[i % len(pattern)] for i in range(layers)]}
        | shape
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3_5ForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)
    peft = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=LINEAR))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                # A zero B would leave lora_A without a gradient.
                parameter.normal_(0, 0.02)
    return peft.to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--mode", choices=["exact", "detached"], default="exact")
    parser.add_argument("--prompt", type=int, nargs="+", default=[131_072])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--rule", default="auto", choices=["auto", "torch", "fla"], help="what computes the delta rule")
    parser.add_argument("--chunk", default="auto")
    parser.add_argument("--host-budget", default="90GiB")
    parser.add_argument("--out")
    options = parser.parse_args()
    record = Record(options.out)
    start = time.perf_counter()
    model = build(options.layers, "cuda")
    print(f"built in {time.perf_counter() - start:.1f} s", flush=True)
    settings = {
        "tiers": [{"kind": "host", "budget": options.host_budget}],
        "gradient": {"prompt": options.mode},
        "capture": {"chunk_tokens": options.chunk if options.chunk == "auto" else int(options.chunk)},
        "kernels": {"gated_delta": options.rule},
    }
    vocab = SHAPES["qwen3_6"]["vocab_size"]
    for prompt in options.prompt:
        ids, responses = random_group(prompt, options.group, options.response, vocab)
        model.zero_grad(set_to_none=True)
        free_memory()
        before = torch.cuda.memory_allocated()
        with Runtime(model, settings) as runtime:
            profile = runtime._engine.adapter.profile()
            sizes = {"graph": profile.graph_bytes, "layer workspace": workspace_bytes(profile)}
            free = runtime._engine.free_bytes()
            report = ours(runtime, ids, responses)
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(g is not None and bool(g.isfinite().all()) for g in gradients)
        record.add(
            "capacity: Qwen3.6-27B, LoRA", layers=options.layers, mode=options.mode, prompt=prompt,
            group=options.group, response=options.response, rule=options.rule, weights_gib=before / 2**30,
            peak_beyond_weights_gib=(report["peak_device_bytes"] - before) / 2**30, bytes_per_token=sizes,
            free_gib=free / 2**30, settings=settings, report=report,
        )  # fmt: skip


if __name__ == "__main__":
    main()
