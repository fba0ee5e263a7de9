"""Gated-delta hybrids: Qwen3-Next, Qwen3.5 and Qwen3.6 (mixtures and multimodal classes' text too), OLMo hybrid.

Their full-attention layers, gated or not, come through the attention interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from longstraw.errors import UnsupportedModelError
from longstraw.integrations.transformers.families.family import Family
from longstraw.integrations.transformers.families.layers import attention_spec, refuse_layer
from longstraw.kernels.gated_delta import choose_rule
from longstraw.kernels.gated_delta.chunked import ChunkedRule
from longstraw.runtime.gated_delta import DeltaInputs, DeltaShape, delta_spec, mix
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.passes import ForwardPass

# What a mixer may be given and need not look at: a pass has no cache, no padding, and its own branch borders.
_HARMLESS = frozenset({"cache", "cache_params", "past_key_values", "use_cache", "position_ids", "cache_position"})


def _shape(mixer: Any) -> DeltaShape:
    return DeltaShape(
        num_k_heads=mixer.num_k_heads,
        num_v_heads=mixer.num_v_heads,
        k_dim=mixer.head_k_dim,
        v_dim=mixer.head_v_dim,
        kernel=mixer.conv_kernel_size,
    )


def refuse_convolution(mixer: nn.Module, config: Any) -> str | None:
    """Why a mixer with a short convolution cannot be carried, or None."""
    convolution = mixer.conv1d
    if type(convolution) is not nn.Conv1d:
        return (
            f"the convolution of layer {mixer.layer_idx} is a {type(convolution).__name__}; only a plain one can start "
            "from a carried window (leave conv1d out of the adapter's target_modules)"
        )
    return None


def delta_layer(index: int, shape: DeltaShape, dtype: torch.dtype) -> LayerSpec:
    """What a gated-delta layer keeps."""
    rows = torch.empty(1, shape.channels, dtype=dtype, device="meta")
    gates = torch.empty(1, shape.num_v_heads, dtype=torch.float32, device="meta")
    weight = torch.empty(shape.channels, shape.kernel, dtype=dtype, device="meta")
    inputs = DeltaInputs(
        mixed_SC=rows, g_SV=gates, beta_SV=gates, conv_weight_CK=weight, conv_bias_C=None, activation=F.silu
    )
    return delta_spec(index, shape, inputs, ChunkedRule())


def _spec(mixer: nn.Module, config: Any, dtype: torch.dtype) -> LayerSpec:
    return delta_layer(mixer.layer_idx, _shape(mixer), dtype)  # type: ignore[arg-type]


def _exchange(mixer: nn.Module, forward: ForwardPass) -> Callable[..., Tensor]:
    def mixer_forward(hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        check_arguments(mixer, attention_mask, kwargs)
        return _mixer_forward(mixer, forward, hidden_states)

    return mixer_forward


def _mixer_forward(mixer: Any, forward: ForwardPass, hidden_1SE: Tensor) -> Tensor:
    """transformers' `...GatedDeltaNet.forward` on packed rows [1, S, hidden_size], through the module's own parts."""
    shape = _shape(mixer)
    mixed_1SC, z, b_1SV, a_1SV = _projected(mixer, hidden_1SE)
    beta_1SV = b_1SV.sigmoid()
    if getattr(mixer, "allow_neg_eigval", False):
        beta_1SV = beta_1SV * 2.0
    # As transformers computes them: in half precision exp(A_log) would overflow.
    g_1SV = -mixer.A_log.float().exp() * F.softplus(a_1SV.float() + mixer.dt_bias)
    inputs = DeltaInputs(
        mixed_SC=mixed_1SC[0],
        g_SV=g_1SV[0],
        beta_SV=beta_1SV[0],
        conv_weight_CK=mixer.conv1d.weight.squeeze(1),
        conv_bias_C=mixer.conv1d.bias,
        activation=ACT2FN[mixer.activation],
    )
    rule = choose_rule(mixed_1SC.device, mixed_1SC.dtype, forward.kernels.get("gated_delta", "auto"))
    out_SVD = mix(forward, mixer.layer_idx, shape, inputs, rule)
    olmo = hasattr(mixer, "o_norm")
    norm, project = (mixer.o_norm, mixer.o_proj) if olmo else (mixer.norm, mixer.out_proj)
    normed = norm(out_SVD.flatten(0, 1), z.reshape(-1, shape.v_dim))
    projected: Tensor = project(normed.view(1, hidden_1SE.shape[1], -1))
    return projected


def _projected(mixer: Any, hidden_1SE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values side by side; the output's gate z; the inputs of beta and of the decay."""
    if hasattr(mixer, "in_proj_qkvz"):
        q, k, v, z, b, a = mixer.fix_query_key_value_ordering(
            mixer.in_proj_qkvz(hidden_1SE), mixer.in_proj_ba(hidden_1SE)
        )
        return torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1), z, b, a
    if hasattr(mixer, "q_proj"):
        mixed = torch.cat([project(hidden_1SE) for project in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], dim=-1)
        return mixed, mixer.g_proj(hidden_1SE), mixer.b_proj(hidden_1SE), mixer.a_proj(hidden_1SE)
    return (
        mixer.in_proj_qkv(hidden_1SE),
        mixer.in_proj_z(hidden_1SE),
        mixer.in_proj_b(hidden_1SE),
        mixer.in_proj_a(hidden_1SE),
    )


def check_arguments(mixer: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raises UnsupportedModelError if a mixer is given what would be ignored."""
    if mask is not None:
        raise UnsupportedModelError(f"{type(mixer).__name__} brings a padding mask, which would be ignored")
    asked = {name for name, value in kwargs.items() if value is not None and value is not False}
    if unknown := asked - _HARMLESS:
        raise UnsupportedModelError(
            f"{type(mixer).__name__} is called with {', '.join(sorted(unknown))}, which is not supported yet"
        )


MIXER = Family(
    name="gated delta",
    attention_classes=frozenset(
        {"OlmoHybridGatedDeltaNet", "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"}
    ),
    refuse=refuse_convolution,
    spec=_spec,
    exchange=_exchange,
)

ATTENTION = Family(
    name="attention of gated-delta hybrids",
    attention_classes=frozenset(
        {"OlmoHybridAttention", "Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"}
    ),
    refuse=refuse_layer,
    spec=attention_spec,
    router_classes=frozenset({"Qwen3NextTopKRouter", "Qwen3_5MoeTopKRouter"}),
)
