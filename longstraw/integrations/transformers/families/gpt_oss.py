"""gpt-oss: a learnable sink a head, windowed layers between full ones, experts."""

from __future__ import annotations

from longstraw.integrations.transformers.families.family import Family
from longstraw.integrations.transformers.families.layers import attention_spec, refuse_layer

FAMILY = Family(
    name="gpt-oss",
    attention_classes=frozenset({"GptOssAttention"}),
    refuse=refuse_layer,
    spec=attention_spec,
    router_classes=frozenset({"GptOssTopKRouter"}),
)
