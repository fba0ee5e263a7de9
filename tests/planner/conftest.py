"""The blueprint of the model that the measured steps ran, with adapters and with all weights trained."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from benchmarks.common import QWEN3_8B
from longstraw.integrations.transformers.blueprint import blueprint
from longstraw.planner import Blueprint


@pytest.fixture(scope="session")
def qwen3_8b_lora() -> Blueprint:
    """Qwen3-8B in bfloat16, LoRA r 16 on every linear layer."""
    return blueprint(AutoConfig.for_model("qwen3", **QWEN3_8B), lora_rank=16)


@pytest.fixture(scope="session")
def qwen3_8b() -> Blueprint:
    """Qwen3-8B in bfloat16, all weights trained."""
    return blueprint(AutoConfig.for_model("qwen3", **QWEN3_8B))
