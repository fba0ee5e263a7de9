"""Bytes of resident state from a config alone: those of real models, and those that tiny ones then write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from longstraw import Runtime, state_bytes
from longstraw.errors import UnsupportedModelError
from tests.families import delta_models, latent_models, mamba2_models, windowed_models
from tests.parity.models import build, make_group, settings

QWEN36_27B = {
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def test_qwen36_27b() -> None:
    found = state_bytes(AutoConfig.for_model("qwen3_5_text", **QWEN36_27B), "bfloat16")
    assert found.token_bytes == 65_536
    assert found.carried["recurrent"] == 144 * 2**20
    # 48 layers, 3 rows of queries and keys (2 x 16 heads) and values (48 heads) of 128, float32.
    assert found.carried["convolution"] == 48 * 3 * 80 * 128 * 4


def test_glm_52() -> None:
    config = AutoConfig.for_model("glm_moe_dsa", index_topk_freq=4)
    assert (len(config.indexer_types), config.indexer_types.count("full")) == (78, 21)
    found = state_bytes(config, torch.bfloat16)
    assert found.token == {"latent": 78 * 576 * 2, "index": 21 * 128 * 2}
    assert found.token_bytes == 95_232
    assert found.carried_bytes == 0


def test_bamba_9b() -> None:
    found = state_bytes(AutoConfig.for_model("bamba", mamba_d_state=128, attn_layer_indices=[9, 18, 27]), "bfloat16")
    assert found.token_bytes == 3 * 4_096
    # 29 layers; 128 heads of 64, one group of B and C.
    assert found.carried["recurrent"] == 29 * 128 * 64 * 128 * 4
    assert found.carried["convolution"] == 29 * 3 * (128 * 64 + 2 * 128) * 4


def test_whole_prompt() -> None:
    found = state_bytes(AutoConfig.for_model("qwen3_5_text", **QWEN36_27B), "bfloat16")
    assert found.prompt_bytes(2**20) == 2**20 * 65_536 + found.carried_bytes
    assert found.prompt_bytes(2**20, snapshots=128) == 2**20 * 65_536 + 128 * found.carried_bytes


TINY: dict[str, Callable[[], Any]] = {
    "llama": lambda: build("llama", dtype=torch.float32),
    "qwen3_next": lambda: delta_models.build("qwen3_next", dtype=torch.float32),
    "olmo_hybrid": lambda: delta_models.build("olmo_hybrid", dtype=torch.float32),
    "kimi_linear": lambda: delta_models.build("kimi_linear", dtype=torch.float32),
    "bamba": lambda: mamba2_models.build("bamba", dtype=torch.float32),
    "falcon_h1": lambda: mamba2_models.build("falcon_h1", dtype=torch.float32),
    "granitemoehybrid": lambda: mamba2_models.build("granitemoehybrid", dtype=torch.float32),
    "nemotron_h": lambda: mamba2_models.build("nemotron_h", "LEAML", dtype=torch.float32),
    "qwen3_5": lambda: delta_models.multimodal("qwen3_5").float(),
    "gemma2": lambda: windowed_models.windowed_model("gemma2").float(),
    "gpt_oss": lambda: windowed_models.windowed_model("gpt_oss").float(),
    "deepseek_v3": lambda: latent_models.tiny("deepseek_v3").float(),
    "glm_moe_dsa": lambda: latent_models.tiny("glm_moe_dsa").float(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", sorted(TINY))
def test_a_capture_writes_what_the_config_says(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In bfloat16 what a recurrence carries is float32 all the same."""
    model, prompt = TINY[kind]().to(dtype), make_group(61).prompt
    config = settings(
        gradient={"prompt": "detached"},
        capture={"chunk_tokens": 23, "keep_attention": "never"},
        tiers=[{"kind": "nvme", "path": str(tmp_path), "budget": "64MiB", "checksum": False}],
    )
    with Runtime(model, config) as runtime, runtime.transaction(prompt) as txn:
        written = dict(txn.report.bytes_written)
    expected = state_bytes(model.config, dtype).prompt_bytes(60, snapshots=txn.report.chunks)
    assert txn.report.chunks == 3
    assert written == {"nvme": expected}


def test_dtype_comes_from_the_config_or_is_asked_for() -> None:
    config = AutoConfig.for_model("qwen3_5_text", **QWEN36_27B)
    config.dtype = torch.float32
    assert state_bytes(config).token_bytes == 2 * 65_536
    config.dtype = None
    with pytest.raises(ValueError, match="names no dtype"):
        state_bytes(config)


def test_unknown_layers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="GPTNeoXAttention"):
        state_bytes(AutoConfig.for_model("gpt_neox", num_hidden_layers=2), "bfloat16")
