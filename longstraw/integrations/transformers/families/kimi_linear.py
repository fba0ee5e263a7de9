"""Kimi Linear: delta attention with a decay for each channel, and latent attention without positions between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from longstraw.integrations.transformers.families.family import Family
from longstraw.integrations.transformers.families.gated_delta import check_arguments, delta_layer, refuse_convolution
from longstraw.integrations.transformers.families.latent import (
    latent_layer,
    latents,
    project_out,
    refuse_latent,
    refuse_mask,
)
from longstraw.kernels.gated_delta import choose_rule
from longstraw.runtime.gated_delta import DeltaInputs, DeltaShape, mix
from longstraw.runtime.latent import attend
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.passes import ForwardPass


def _shape(mixer: Any) -> DeltaShape:
    return DeltaShape(
        num_k_heads=mixer.num_heads,
        num_v_heads=mixer.num_heads,
        k_dim=mixer.head_dim,
        v_dim=mixer.head_dim,
        kernel=mixer.conv_kernel_size,
    )


def _mixer_spec(mixer: Any, config: Any, dtype: torch.dtype) -> LayerSpec:
    return delta_layer(mixer.layer_idx, _shape(mixer), dtype)


def _exchange_mixer(mixer: nn.Module, forward: ForwardPass) -> Callable[..., Tensor]:
    def mixer_forward(hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        check_arguments(mixer, attention_mask, kwargs)
        return _mixer_forward(mixer, forward, hidden_states)

    return mixer_forward


def _mixer_forward(mixer: Any, forward: ForwardPass, hidden_1SE: Tensor) -> Tensor:
    """transformers' `KimiLinearDeltaAttention.forward` on packed rows [1, S, hidden_size], through its own parts."""
    shape = _shape(mixer)
    mixed_1SC = torch.cat([project(hidden_1SE) for project in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], dim=-1)
    inputs = DeltaInputs(
        mixed_SC=mixed_1SC[0],
        g_SV=mixer.forget_gate(hidden_1SE)[0],
        beta_SV=mixer.b_proj(hidden_1SE)[0].sigmoid(),
        conv_weight_CK=mixer.conv1d.weight.squeeze(1),
        conv_bias_C=mixer.conv1d.bias,
        activation=ACT2FN[mixer.activation],
    )
    backend = forward.kernels.get("gated_delta", "auto")
    rule = choose_rule(mixed_1SC.device, mixed_1SC.dtype, backend, per_channel=True)
    out_SVD = mix(forward, mixer.layer_idx, shape, inputs, rule)
    gate = mixer.g_b_proj(mixer.g_a_proj(hidden_1SE)).view(1, *out_SVD.shape)
    projected: Tensor = mixer.o_proj(mixer.o_norm(out_SVD[None], gate).flatten(2))
    return projected


def _unrotated(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


def _attention_spec(attention: nn.Module, config: Any, dtype: torch.dtype) -> LayerSpec:
    return latent_layer(attention, dtype)


def _exchange_attention(attention: nn.Module, forward: ForwardPass) -> Callable[..., Any]:
    module: Any = attention

    def run(hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        refuse_mask(module, attention_mask)
        found = latents(module, hidden_states, (), _unrotated)
        out = attend(
            forward, module.layer_idx, found.q_SHC, found.rows_SC, value_dim=module.kv_lora_rank, scale=module.scaling
        )
        return project_out(module, out, found), None

    return run


MIXER = Family(
    name="Kimi delta",
    attention_classes=frozenset({"KimiLinearDeltaAttention"}),
    refuse=refuse_convolution,
    spec=_mixer_spec,
    exchange=_exchange_mixer,
)

ATTENTION = Family(
    name="latent without positions",
    attention_classes=frozenset({"KimiLinearAttention"}),
    refuse=refuse_latent,
    spec=_attention_spec,
    exchange=_exchange_attention,
)
