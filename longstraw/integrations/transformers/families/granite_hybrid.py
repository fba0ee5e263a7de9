"""Granite 4 hybrids: Mamba-2 layers between attention layers with or without positions, experts or not."""

from __future__ import annotations

from longstraw.integrations.transformers.families.family import Family
from longstraw.integrations.transformers.families.gated_delta import refuse_convolution
from longstraw.integrations.transformers.families.layers import attention_spec, refuse_layer
from longstraw.integrations.transformers.families.mamba2 import exchange_mixer, mixer_spec

_LOGITS = "logits_scaling"

MIXER = Family(
    name="Mamba-2 in Granite",
    attention_classes=frozenset({"GraniteMoeHybridMambaLayer"}),
    refuse=refuse_convolution,
    spec=mixer_spec,
    head_divisor_key=_LOGITS,
    router_classes=frozenset({"GraniteMoeHybridTopKRouter"}),
    exchange=exchange_mixer,
)

ATTENTION = Family(
    name="attention in Granite hybrids",
    attention_classes=frozenset({"GraniteMoeHybridAttention"}),
    refuse=refuse_layer,
    spec=attention_spec,
    head_divisor_key=_LOGITS,
)
