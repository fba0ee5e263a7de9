"""A blueprint from a config alone says what the real model's own short run says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from benchmarks.common import QWEN3_8B
from benchmarks.operations import exact_step, qwen3_8b
from longstraw import Config
from longstraw.errors import ConfigError, UnsupportedModelError
from longstraw.integrations import adapt
from longstraw.integrations.transformers.blueprint import blueprint, read_config
from longstraw.planner import Machine, Workload, make_plan
from tests.families import delta_models, latent_models, mamba2_models, windowed_models
from tests.parity.models import build

TINY: dict[str, Callable[[], Any]] = {
    "llama": lambda: build("llama", dtype=torch.float32),
    "qwen2, tied": lambda: build("qwen2", dtype=torch.float32, tie_word_embeddings=True),
    "qwen3_next": lambda: delta_models.build(
        "qwen3_next", dtype=torch.float32, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "bamba": lambda: mamba2_models.build("bamba", dtype=torch.float32),
    "falcon_h1": lambda: mamba2_models.build("falcon_h1", dtype=torch.float32),
    "granitemoehybrid": lambda: mamba2_models.build("granitemoehybrid", dtype=torch.bfloat16),
    "nemotron_h": lambda: mamba2_models.build(
        "nemotron_h", "LEAML", dtype=torch.bfloat16, moe_intermediate_size=16, moe_shared_expert_intermediate_size=16
    ),
    "gemma2": lambda: windowed_models.windowed_model("gemma2").float(),
    "gpt_oss": lambda: windowed_models.windowed_model("gpt_oss").float(),
    "deepseek_v3": lambda: latent_models.tiny("deepseek_v3").float(),
    "kimi_linear": lambda: delta_models.build("kimi_linear", dtype=torch.bfloat16, moe_intermediate_size=16),
    "glm_moe_dsa": lambda: latent_models.tiny("glm_moe_dsa").float(),
}


@pytest.mark.parametrize("kind", sorted(TINY))
def test_it_is_the_profile_of_the_real_model(kind: str) -> None:
    model = TINY[kind]()
    if hasattr(model.config, "num_experts_per_tok"):
        model.bfloat16().set_experts_implementation("grouped_mm")
    expected = adapt(model, None, Config()).profile()
    found = blueprint(model.config, dtype=model.dtype, gated_delta="torch")
    assert found.profile.layers == expected.layers
    assert found.profile.graph_bytes == pytest.approx(expected.graph_bytes, rel=0.01)
    assert (found.profile.hidden_size, found.profile.vocab_size) == (expected.hidden_size, expected.vocab_size)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    # Routers stay in float32, as transformers loads them.
    assert found.weight_bytes == pytest.approx(model.dtype.itemsize * found.parameters, rel=0.02)


def test_lora() -> None:
    config = build("qwen3", dtype=torch.float32).config
    whole, lora = blueprint(config), blueprint(config, lora_rank=4)
    assert whole.trained == whole.parameters
    assert lora.trained == lora.parameters - whole.parameters
    assert lora.trained_matrices == lora.trained == lora.matrices - whole.matrices
    assert lora.gradient_bytes == 4 * lora.trained
    assert (whole.head_trained, lora.head_trained) == (True, False)
    assert lora.profile.layers[0].spec("kv").trained


def test_a_token_meets_its_own_experts_only() -> None:
    config = windowed_models.windowed_model("gpt_oss").config
    found = blueprint(config)
    config.num_experts_per_tok += 1
    one_more = blueprint(config).matrices - found.matrices
    # A fused gate and up projection, and a down projection.
    assert one_more == config.num_hidden_layers * 3 * config.hidden_size * config.intermediate_size
    assert config.num_experts_per_tok < config.num_local_experts


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_experts_in_float32(kind: str) -> None:
    model = windowed_models.windowed_model(kind, oracle=False).float()
    model.set_experts_implementation("grouped_mm")
    found = blueprint(model.config, dtype=torch.float32)
    assert found.profile.graph_bytes == pytest.approx(adapt(model, None, Config()).profile().graph_bytes, rel=0.01)
    assert found.looped_experts is None


@pytest.mark.parametrize(
    ("width", "dtype", "why"), [(21, torch.bfloat16, "has one of 42"), (16, torch.float64, "take no float64")]
)
def test_experts_that_grouped_products_do_not_take(width: int, dtype: torch.dtype, why: str) -> None:
    model = windowed_models.windowed_model("qwen3_moe", oracle=False, moe_intermediate_size=width).to(dtype)
    found = blueprint(model.config, dtype=dtype)
    assert why in (found.looped_experts or "")
    # The model runs its experts in a loop, which keeps a little more.
    looped = adapt(model, None, Config()).profile().graph_bytes
    assert found.profile.graph_bytes <= looped <= 1.1 * found.profile.graph_bytes


def test_operations_are_those_of_the_second_count() -> None:
    """`benchmarks.operations` counts from the shape by hand."""
    layers = 2
    found = blueprint(AutoConfig.for_model("qwen3", **(QWEN3_8B | {"num_hidden_layers": layers})))
    config = Config(tiers=[{"kind": "host", "budget": "100GiB"}], capture={"keep_attention": "never"})
    plan = make_plan(found, Workload(prompt=32_768, group=8, response=1024), config, Machine())
    expected = exact_step(
        qwen3_8b(layers, lora=False), 32_768, 8, 1024, recompute_replay=False, recompute_sweep=False, kept=False
    )
    # Of the last layer, capture and sweep compute no attention, which the count by hand leaves in.
    attention = 4.0 * 32_768**2 / 2 * 4096
    counted = sum(cost.operations for cost in plan.phases.values())
    assert counted + 4.5 * attention == pytest.approx(expected, rel=0.01)


def test_unknown_families_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="GPTNeoXAttention"):
        blueprint(AutoConfig.for_model("gpt_neox", num_hidden_layers=2))


def test_configs_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder or file"):
        read_config(tmp_path / "missing")
    with pytest.raises(ConfigError, match="no config that transformers can read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no config that transformers can read"):
        read_config(tmp_path / "config.json")


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear"])
def test_gated_delta_rules_as_a_gpu_computes_them(kind: str) -> None:
    config = TINY[kind]().config
    torch_rule = blueprint(config, gated_delta="torch")
    wide = blueprint(config, dtype=torch.float32)
    for rule in ("auto", "fla"):
        found = blueprint(config, gated_delta=rule)
        kinds = {(a.kind, b.kind) for a, b in zip(torch_rule.work, found.work, strict=True)}
        assert ("recurrent", "fused recurrent") in kinds
        changed = [
            a.workspace_bytes > b.workspace_bytes
            for a, b, work in zip(torch_rule.profile.layers, found.profile.layers, found.work, strict=True)
            if work.kind == "fused recurrent"
        ]
        assert all(changed)
    # flash-linear-attention would narrow it.
    assert "fused recurrent" not in {work.kind for work in wide.work}
    with pytest.raises(ConfigError, match=r"kernels.gated_delta is fla, .*, not torch.float32; set it to"):
        blueprint(config, dtype=torch.float32, gated_delta="fla")
