"""Kinds of model and wrapper that are refused until they are supported: a case leaves this file when its kind is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from longstraw import Runtime
from longstraw.errors import UnsupportedModelError
from tests.parity.models import SMALL, build


@pytest.mark.parametrize(("kind", "name"), [("gemma2", "Gemma2Attention"), ("gpt_oss", "GptOssAttention")])
def test_attention_with_soft_caps_or_sinks(kind: str, name: str) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    if kind == "gpt_oss":
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    with pytest.raises(UnsupportedModelError, match=name):
        Runtime(model, SMALL)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("mistral", {"sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("phi3", {"sliding_window": 16}),
    ],
)
def test_windowed_layers(kind: str, config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="windowed"):
        Runtime(build(kind, **config), SMALL)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(build("llama"))
        with pytest.raises(UnsupportedModelError, match="DDP"):
            Runtime(model, SMALL)
    finally:
        dist.destroy_process_group()
