"""What a checkpointed layer takes in a backward, as planned and as counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from longstraw import Config, Runtime
from longstraw.integrations.transformers.blueprint import blueprint
from longstraw.planner import Machine, Workload, make_plan
from longstraw.runtime.sizing import checkpointed_bytes
from tests.live_bytes import LiveBytes
from tests.parity.models import add_lora

TOKENS = 2048
"""Of the lane, and of each of two chunks."""

SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 870, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_layer_that_runs_again(hybrid: bool) -> None:
    """The plan promises no less than is needed, and not much more. LoRA's own gradients are too small to count."""
    config: Any = Qwen3_5TextConfig(**SHAPE, **HYBRID) if hybrid else Qwen3Config(**SHAPE)
    model: Any = Qwen3_5ForCausalLM(config) if hybrid else Qwen3ForCausalLM(config)
    model = add_lora(model).to(torch.bfloat16).train()
    settings: dict[str, Any] = {
        "tiers": [{"kind": "host", "budget": "1GiB"}],
        "capture": {"chunk_tokens": TOKENS, "keep_attention": "never"},
        "replay": {"lane_tokens": TOKENS, "checkpoint": True, "logit_block_tokens": 64},
    }
    runtime = Runtime(model, settings)
    kept = checkpointed_bytes(runtime._engine.adapter.profile()) * TOKENS
    with LiveBytes() as live, runtime.transaction(torch.randint(512, (2 * TOKENS + 1,))) as txn:
        for lane in txn.replay([torch.randint(512, (TOKENS // 4,)) for _ in range(4)]):
            assert len(lane.indices) == 4
            before, live.peak = live.bytes, 0
            lane.backward(torch.stack([lp.sum() for lp in lane.logprobs]).sum())
            backward = live.peak - before
        del lane
        before, live.peak = live.bytes, 0
        txn.sweep()
        sweep = live.peak - before - kept
    made = blueprint(config, lora_rank=4, gated_delta="torch")
    workload = Workload(prompt=2 * TOKENS + 1, group=4, response=TOKENS // 4)
    memory = make_plan(made, workload, Config(**settings), Machine(), timed=False).memory
    assert memory.lane_layer == memory.chunk_layer and memory.lane_workspace == memory.chunk_workspace == 0
    most = max(backward, sweep)
    assert most < memory.lane_layer < 1.3 * most, (backward / memory.lane_layer, sweep / memory.lane_layer)
