"""Dense decoders with causal attention over keys and values, windowed or not: Llama and those built alike."""

from __future__ import annotations

from longstraw.integrations.transformers.families.family import Family
from longstraw.integrations.transformers.families.layers import attention_spec, refuse_layer

FAMILY = Family(
    name="dense",
    attention_classes=frozenset(
        {
            "LlamaAttention",
            "MistralAttention",
            "Olmo2Attention",
            "Phi3Attention",
            "Qwen2Attention",
            "Qwen3Attention",
            "SmolLM3Attention",
            "Starcoder2Attention",
        }
    ),
    refuse=refuse_layer,
    spec=attention_spec,
)
