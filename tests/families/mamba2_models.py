"""Tiny Mamba-2 hybrids."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families.delta_models import remember
from tests.parity.models import VOCABULARY, randomize

PREFIXES = {"bamba": "Bamba"}
"""Model types, and transformers' prefix of their classes."""

KINDS = sorted(PREFIXES)
WINDOW = 3


def build(kind: str = "bamba", layers: str = "LLAL", *, dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    """A random hybrid; `layers` has an L for each Mamba-2 layer and an A for each attention layer."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 6,
        "mamba_d_conv": WINDOW + 1,
        "mamba_chunk_size": 16,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
    if kind == "bamba":
        sizes["attn_layer_indices"] = [i for i, letter in enumerate(layers) if letter == "A"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | config)))
    randomize(model)
    remember(model)
    return model.to(dtype).train()
