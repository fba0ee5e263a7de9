"""Falcon-H1: in each layer a Mamba-2 mixer and an attention side by side, with multipliers at many places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstraw.integrations.transformers.families.family import Family, index_beside
from longstraw.integrations.transformers.families.gated_delta import check_arguments, refuse_convolution
from longstraw.integrations.transformers.families.layers import attention_spec
from longstraw.integrations.transformers.families.mamba2 import mixed, mixer_layer
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.passes import ForwardPass


def _mixer_spec(mixer: nn.Module, config: Any, dtype: torch.dtype) -> LayerSpec:
    return mixer_layer(index_beside(mixer), mixer, dtype)


def _exchange(mixer: nn.Module, forward: ForwardPass) -> Callable[..., Tensor]:
    def mixer_forward(hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        check_arguments(mixer, attention_mask, kwargs)
        return _mixer_forward(mixer, forward, hidden_states)

    return mixer_forward


def _mixer_forward(mixer: Any, forward: ForwardPass, hidden_1SE: Tensor) -> Tensor:
    """transformers' `FalconH1Mixer.forward` on packed rows [1, S, hidden_size], through the module's own parts."""
    projected_1SC = mixer.in_proj(hidden_1SE * mixer.ssm_in_multiplier) * mixer.mup_vector
    out_1SI, gate_1SI = mixed(forward, index_beside(mixer), mixer, projected_1SC)
    gated = mixer.norm(out_1SI, gate_1SI) if mixer.mamba_rms_norm else out_1SI * F.silu(gate_1SI)
    projected: Tensor = mixer.out_proj(gated.to(hidden_1SE.dtype))
    return projected


def _refuse_attention(attention: nn.Module, config: Any) -> str | None:
    return None if getattr(attention, "is_causal", True) else "its attention is not causal"


MIXER = Family(
    name="Mamba-2 in Falcon-H1",
    attention_classes=frozenset({"FalconH1Mixer"}),
    refuse=refuse_convolution,
    spec=_mixer_spec,
    beside=True,
    exchange=_exchange,
)

ATTENTION = Family(
    name="attention in Falcon-H1",
    attention_classes=frozenset({"FalconH1Attention"}),
    refuse=_refuse_attention,
    spec=attention_spec,
    head_multiplier="lm_head_multiplier",
)
