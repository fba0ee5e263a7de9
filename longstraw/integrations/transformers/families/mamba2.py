"""Mamba-2 mixers, and the hybrids that put plain attention between them: Bamba.

The mixers of Bamba, Granite 4 and Nemotron-H are built alike and share what is here; what is special to the last two
is in files of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from longstraw.integrations.transformers.families.family import Family
from longstraw.integrations.transformers.families.gated_delta import check_arguments, refuse_convolution
from longstraw.integrations.transformers.families.layers import attention_spec, refuse_layer
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.passes import ForwardPass
from longstraw.runtime.ssd import SsdInputs, SsdShape, mix, ssd_spec


def _shape(mixer: Any) -> SsdShape:
    return SsdShape(
        num_heads=mixer.num_heads,
        head_dim=mixer.head_dim,
        num_groups=mixer.n_groups,
        state_size=mixer.ssm_state_size,
        kernel=mixer.conv_kernel_size,
    )


def mixer_spec(mixer: Any, config: Any, dtype: torch.dtype) -> LayerSpec:
    """What a Mamba-2 mixer keeps that has its layer for itself."""
    return mixer_layer(mixer.layer_idx, mixer, dtype)


def mixer_layer(index: int, mixer: Any, dtype: torch.dtype) -> LayerSpec:
    """What a Mamba-2 mixer keeps, as layer `index`."""
    shape = _shape(mixer)
    of_a_head = torch.empty(1, shape.num_heads, dtype=torch.float32, device="meta")
    inputs = SsdInputs(
        mixed_SC=torch.empty(1, shape.channels, dtype=dtype, device="meta"),
        dt_SH=of_a_head,
        A_H=of_a_head[0],
        D_H=of_a_head[0],
        conv_weight_CK=torch.empty(shape.channels, shape.kernel, dtype=dtype, device="meta"),
        conv_bias_C=None,
        activation=F.silu,
    )
    return ssd_spec(index, shape, inputs)


def exchange_mixer(mixer: nn.Module, forward: ForwardPass) -> Callable[..., Tensor]:
    """The forward that a Mamba-2 mixer runs in a pass."""

    def mixer_forward(hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        check_arguments(mixer, attention_mask, kwargs)
        return _mixer_forward(mixer, forward, hidden_states)

    return mixer_forward


def _mixer_forward(mixer: Any, forward: ForwardPass, hidden_1SE: Tensor) -> Tensor:
    """transformers' `...Mixer.forward` on packed rows [1, S, hidden_size], through the module's own parts."""
    out_1SI, gate_1SI = mixed(forward, mixer.layer_idx, mixer, mixer.in_proj(hidden_1SE))
    normed = mixer.norm(out_1SI, gate_1SI)
    projected: Tensor = mixer.out_proj(normed.to(hidden_1SE.dtype))
    return projected


def mixed(forward: ForwardPass, index: int, mixer: Any, projected_1SC: Tensor) -> tuple[Tensor, Tensor]:
    """Layer `index`'s convolution and recurrence: outputs [1, S, heads x head_dim], and the gate for them.

    Steps are computed in float32, as the kernels of mamba_ssm do; transformers' torch function computes them in the
    model's dtype.
    """
    shape = _shape(mixer)
    inner = shape.num_heads * shape.head_dim
    gate, mixed_1SC, dt_1SH = projected_1SC.split([inner, shape.channels, shape.num_heads], dim=-1)
    wide = torch.promote_types(mixed_1SC.dtype, torch.float32)
    low, high = mixer.time_step_limit
    inputs = SsdInputs(
        mixed_SC=mixed_1SC[0],
        dt_SH=F.softplus(dt_1SH[0].to(wide) + mixer.dt_bias.to(wide)).clamp(low, high),
        A_H=-mixer.A_log.float().exp(),
        D_H=mixer.D,
        conv_weight_CK=mixer.conv1d.weight.squeeze(1),
        conv_bias_C=mixer.conv1d.bias,
        activation=ACT2FN[mixer.activation],
    )
    return mix(forward, index, shape, inputs).flatten(1)[None], gate


MIXER = Family(
    name="Mamba-2",
    attention_classes=frozenset({"BambaMixer"}),
    refuse=refuse_convolution,
    spec=mixer_spec,
    exchange=exchange_mixer,
)

ATTENTION = Family(
    name="attention of Mamba-2 hybrids",
    attention_classes=frozenset({"BambaAttention"}),
    refuse=refuse_layer,
    spec=attention_spec,
)
