"""Tiny gated-delta hybrids, as language models and as the text part of multimodal ones."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parity.models import VOCABULARY, randomize

MODULES = {
    "qwen3_next": "qwen3_next",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "olmo_hybrid": "olmo_hybrid",
    "kimi_linear": "kimi_linear",
}
"""Model types, and where transformers keeps their modeling code."""

KINDS = sorted(MODULES)
WINDOW = 3


def build(
    kind: str = "qwen3_5_text", layers: str = "LLAL", *, dtype: torch.dtype = torch.float64, **config: Any
) -> Any:
    """A random hybrid; `layers` has an L for each gated-delta layer and an A for each attention layer."""
    names = {"L": "linear_attention", "A": "full_attention"}
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(layers),
        "layer_types": [names[letter] for letter in layers],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": WINDOW + 1,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    }
    if kind.startswith("qwen3_5"):
        sizes["rope_parameters"]["mrope_section"] = [1, 1, 0]
    if kind == "kimi_linear":
        del sizes["head_dim"], sizes["rope_parameters"]
        sizes |= {"linear_num_heads": 2, "linear_head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2}
        sizes |= {"kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 14}
        sizes |= {"num_key_value_heads": 4, "moe_intermediate_size": 12, "mlp_layer_types": ["sparse"] * len(layers)}
    if kind in ("qwen3_next", "qwen3_5_moe_text"):
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        sizes |= {"shared_expert_intermediate_size": 12}
    # torch's grouped matrix product has no float64.
    options = {"experts_implementation": "eager"} if "num_experts_per_tok" in sizes else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | config)), **options)
    randomize(model)
    remember(model)
    return model.to(dtype).train()


def remember(model: nn.Module) -> None:
    """Decays near 1, so that the first token of a prompt still counts at its end."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 - 4)


def multimodal(kind: str) -> Any:
    text = build(f"{kind}_text", "LA").config.to_dict()
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    classes = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    model = getattr(classes, f"{name}ForConditionalGeneration")(config)
    if kind == "qwen3_5_moe":
        model.set_experts_implementation("eager")
    randomize(model)
    remember(model)
    for parameter in model.model.visual.parameters():
        parameter.requires_grad_(False)
    return model.double().train()
