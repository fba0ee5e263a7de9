"""Gemma 2 and 3, text: windowed layers between full ones, soft-capped scores and logits."""

from __future__ import annotations

from longstraw.integrations.transformers.families.family import Family
from longstraw.integrations.transformers.families.layers import attention_spec, refuse_layer

FAMILY = Family(
    name="gemma",
    attention_classes=frozenset({"Gemma2Attention", "Gemma3Attention"}),
    refuse=refuse_layer,
    spec=attention_spec,
    head_softcap_key="final_logit_softcapping",
)
