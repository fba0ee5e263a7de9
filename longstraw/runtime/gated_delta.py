"""Layers that carry a recurrent matrix and a convolution window: their spec, and their mixing in a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.kernels.gated_delta import DeltaRule, causal_conv, last_rows
from longstraw.resident.state import Field, StateKind
from longstraw.runtime.carried import carried_in, carried_out
from longstraw.runtime.layer_spec import LayerSpec, StateSpec
from longstraw.runtime.passes import ForwardPass

RECURRENT, WINDOW = "recurrent", "convolution"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaShape:
    """Sizes of a gated-delta layer: heads and dims of keys and values, and taps of its convolution."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Values of a token that the convolution sees: queries, keys and values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def fields(self) -> dict[str, Field]:
        """What is carried, by state name. A convolution of one tap carries nothing."""
        fields = {RECURRENT: Field(name=RECURRENT, shape=(self.num_v_heads, self.k_dim, self.v_dim))}
        if self.kernel > 1:
            fields[WINDOW] = Field(name=WINDOW, shape=(self.kernel - 1, self.channels))
        return fields


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaInputs:
    """What a gated-delta layer has computed from its own rows, before anything that looks at other rows.

    Attributes:
        mixed_SC: queries, keys and values side by side, [S, channels].
        g_SV: log of the decay, [S, num_v_heads], or [S, num_v_heads, k_dim] where each channel has its own.
        beta_SV: how much of a token is written, [S, num_v_heads].
        conv_weight_CK, conv_bias_C: of the depthwise convolution.
        activation: what follows the convolution.
    """

    mixed_SC: Tensor
    g_SV: Tensor
    beta_SV: Tensor
    conv_weight_CK: Tensor
    conv_bias_C: Tensor | None
    activation: Callable[[Tensor], Tensor]


def delta_spec(layer: int, shape: DeltaShape, inputs: DeltaInputs, rule: DeltaRule) -> LayerSpec:
    """The spec of a gated-delta layer. Both states are float32 (float64 in a float64 model): they, and the gradients
    of all branches and chunks that meet in them, would lose bits in less."""
    window_trained = inputs.mixed_SC.requires_grad
    convolution = (inputs.conv_weight_CK, inputs.conv_bias_C)
    recurrent_trained = (
        window_trained
        or any(x is not None and x.requires_grad for x in convolution)
        or inputs.g_SV.requires_grad
        or inputs.beta_SV.requires_grad
    )
    trained = {RECURRENT: recurrent_trained, WINDOW: window_trained}
    dtype = torch.promote_types(inputs.mixed_SC.dtype, torch.float32)
    return LayerSpec(
        index=layer,
        states=tuple(
            StateSpec(name=name, kind=StateKind.CARRIED, fields=(field,), dtype=dtype, trained=trained[name])
            for name, field in shape.fields.items()
        ),
        workspace_bytes=rule.workspace_bytes(
            shape.num_v_heads,
            shape.k_dim,
            shape.v_dim,
            inputs.mixed_SC.element_size(),
            per_channel=inputs.g_SV.dim() == 3,
        ),
    )


def mix(forward: ForwardPass, layer: int, shape: DeltaShape, inputs: DeltaInputs, rule: DeltaRule) -> Tensor:
    """Layer `layer`'s convolution and delta rule in a pass; [S, num_v_heads, v_dim] in the dtype of `mixed_SC`."""
    io = forward.layer(delta_spec(layer, shape, inputs, rule))
    fields = shape.fields
    before = {name: carried_in(io, name, field.shape) for name, field in fields.items()}
    mixed_SC, window_WC = inputs.mixed_SC, before.get(WINDOW)
    convolved_SC = inputs.activation(
        causal_conv(mixed_SC, window_WC, inputs.conv_weight_CK, inputs.conv_bias_C, lengths=io.lengths)
    )
    keys = shape.num_k_heads * shape.k_dim
    q_SC, k_SC, v_SC = convolved_SC.split([keys, keys, shape.num_v_heads * shape.v_dim], dim=-1)
    out_SVD, final_BVKD = rule(
        q_SC.unflatten(-1, (shape.num_k_heads, shape.k_dim)),
        k_SC.unflatten(-1, (shape.num_k_heads, shape.k_dim)),
        v_SC.unflatten(-1, (shape.num_v_heads, shape.v_dim)),
        inputs.g_SV,
        inputs.beta_SV,
        lengths=io.lengths,
        initial_VKD=before[RECURRENT],
    )
    if io.is_capture or io.is_sweep:
        after = {RECURRENT: final_BVKD[0]}
        if WINDOW in fields:
            after[WINDOW] = last_rows(mixed_SC, window_WC, shape.kernel - 1).to(final_BVKD.dtype)
        for name in fields:
            out_SVD = carried_out(io, name, after[name], out_SVD)
    return out_SVD
