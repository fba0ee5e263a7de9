"""Mixtures of experts around plain or windowed attention: the experts see packed tokens, none of them padding."""

from __future__ import annotations

from longstraw.integrations.transformers.families.family import Family
from longstraw.integrations.transformers.families.layers import attention_spec, refuse_layer

FAMILY = Family(
    name="mixtures",
    attention_classes=frozenset({"MixtralAttention", "Qwen3MoeAttention"}),
    refuse=refuse_layer,
    spec=attention_spec,
    router_classes=frozenset({"MixtralTopKRouter", "Qwen3MoeTopKRouter"}),
)
