"""Tiny Mamba-2 hybrids."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families.delta_models import remember
from tests.parity.models import VOCABULARY, randomize

PREFIXES = {
    "bamba": "Bamba",
    "falcon_h1": "FalconH1",
    "granitemoehybrid": "GraniteMoeHybrid",
    "nemotron_h": "NemotronH",
}
"""Model types, and transformers' prefix of their classes."""

MULTIPLIERS = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
"""Falcon-H1's, by their config keys."""

KINDS = sorted(PREFIXES)
WINDOW = 3


def build(kind: str = "bamba", layers: str = "LLAL", *, dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    """A random hybrid; `layers` has a letter a layer: L for Mamba-2, A for attention, in Nemotron-H E for experts and
    M for an MLP; Falcon-H1's layers are alike."""
    names = {"L": "linear_attention", "A": "full_attention", "E": "moe", "M": "mlp"}
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
    mamba = {"n_heads": 8, "d_head": 8, "n_groups": 2, "d_state": 6, "d_conv": WINDOW + 1, "chunk_size": 16}
    experts: dict[str, Any] = {"num_experts_per_tok": 2}
    if kind == "nemotron_h":
        sizes |= {"layers_block_type": [names[letter] for letter in layers], "head_dim": 8}
        sizes |= {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6}
        sizes |= {"conv_kernel": WINDOW + 1, "chunk_size": 16}
        experts |= {"n_routed_experts": 4, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 12}
    else:
        sizes |= {f"mamba_{name}": size for name, size in mamba.items()} | {"num_hidden_layers": len(layers)}
    if kind == "bamba":
        sizes["attn_layer_indices"] = [i for i, letter in enumerate(layers) if letter == "A"]
        experts = {}
    if kind == "falcon_h1":
        sizes |= {"mamba_d_ssm": 64, "mamba_rms_norm": True, "mlp_multipliers": [0.9, 0.8]}
        sizes |= {f"{name}_multiplier": 0.6 + 0.1 * i for i, name in enumerate(MULTIPLIERS)}
        sizes["ssm_multipliers"] = [0.8, 0.9, 1.1, 1.2, 0.7]
        experts = {}
    if kind == "granitemoehybrid":
        sizes |= {"layer_types": [names[letter] for letter in layers], "position_embedding_type": "rope"}
        sizes |= {"shared_intermediate_size": 12, "attention_multiplier": 0.3, "residual_multiplier": 0.7}
        sizes |= {"embedding_multiplier": 3.0, "logits_scaling": 2.5}
        experts |= {"num_local_experts": 4}
    # torch's grouped matrix product has no float64.
    options = {"experts_implementation": "eager"} if experts else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | experts | config)), **options)
    randomize(model)
    remember(model)
    return model.to(dtype).train()
