"""Nemotron-H: each layer is a Mamba-2 mixer, an attention without positions, an MLP or experts, one of them alone."""

from __future__ import annotations

from longstraw.integrations.transformers.families.family import Family
from longstraw.integrations.transformers.families.gated_delta import refuse_convolution
from longstraw.integrations.transformers.families.layers import attention_spec, refuse_layer
from longstraw.integrations.transformers.families.mamba2 import exchange_mixer, mixer_spec

_ROWWISE = frozenset({"NemotronHMLP", "NemotronHMoE"})

MIXER = Family(
    name="Mamba-2 in Nemotron-H",
    attention_classes=frozenset({"NemotronHMamba2Mixer"}),
    refuse=refuse_convolution,
    spec=mixer_spec,
    casts_logits=True,
    rowwise_classes=_ROWWISE,
    exchange=exchange_mixer,
)

ATTENTION = Family(
    name="attention in Nemotron-H",
    attention_classes=frozenset({"NemotronHAttention"}),
    refuse=refuse_layer,
    spec=attention_spec,
    casts_logits=True,
    rowwise_classes=_ROWWISE,
)
