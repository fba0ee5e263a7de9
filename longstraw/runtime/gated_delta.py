"""Layers that carry a recurrent matrix and a convolution window: their spec, and their mixing in a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from longstraw.kernels.gated_delta import DeltaRule
from longstraw.resident.state import Field
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.passes import ForwardPass
from longstraw.runtime.recurrence import Carry, carried_fields, carried_states


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
        """What is carried, by state name."""
        return carried_fields((self.num_v_heads, self.k_dim, self.v_dim), self.kernel, self.channels)


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
    """The spec of a gated-delta layer."""
    return LayerSpec(
        index=layer,
        states=carried_states(shape.fields, inputs, (inputs.g_SV, inputs.beta_SV)),
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
    carry = Carry(io, shape.fields)
    keys = shape.num_k_heads * shape.k_dim
    q_SC, k_SC, v_SC = carry.convolved(inputs).split([keys, keys, shape.num_v_heads * shape.v_dim], dim=-1)
    out_SVD, final_BVKD = rule(
        q_SC.unflatten(-1, (shape.num_k_heads, shape.k_dim)),
        k_SC.unflatten(-1, (shape.num_k_heads, shape.k_dim)),
        v_SC.unflatten(-1, (shape.num_v_heads, shape.v_dim)),
        inputs.g_SV,
        inputs.beta_SV,
        lengths=io.lengths,
        initial_VKD=carry.initial,
    )
    return carry.hand_on(inputs, final_BVKD, out_SVD)
