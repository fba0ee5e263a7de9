"""Dense decoders with plain causal attention over keys and values: Llama and those built alike."""

from __future__ import annotations

from typing import Any

from torch import nn

from longstraw.integrations.transformers.families.family import Family


def _refuse(attention: nn.Module, config: Any) -> str | None:
    if not getattr(attention, "is_causal", True):
        return "its attention is not causal"
    index = attention.layer_idx
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds else "full_attention"
    if kind != "full_attention":
        return f"layer {index} is of type {kind!r}; windowed and linear layers are not supported yet"
    window = getattr(attention, "sliding_window", None)
    if window is None and kinds is None:
        window = getattr(config, "sliding_window", None)
    if window is not None:
        return (
            f"layer {index} has a sliding window of {window} tokens; windowed layers are not supported yet "
            "(set config.sliding_window to None if the model may see the whole prompt)"
        )
    return None


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
    refuse=_refuse,
)
