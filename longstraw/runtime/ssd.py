"""Mamba-2 layers, which carry a state space and a convolution window: their spec, and their mixing in a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from longstraw.kernels.ssd import ssd, workspace_bytes
from longstraw.resident.state import Field
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.passes import ForwardPass
from longstraw.runtime.recurrence import Carry, carried_fields, carried_states


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdShape:
    """Sizes of a Mamba-2 layer: heads of x, groups of B and C, and taps of its convolution."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int

    @property
    def channels(self) -> int:
        """Values of a token that the convolution sees: x, B and C."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size

    @property
    def fields(self) -> dict[str, Field]:
        """What is carried, by state name."""
        return carried_fields((self.num_heads, self.head_dim, self.state_size), self.kernel, self.channels)


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdInputs:
    """What a Mamba-2 layer has computed from its own rows, before anything that looks at other rows.

    Attributes:
        mixed_SC: x, B and C side by side, [S, channels].
        dt_SH: the steps' sizes, [S, num_heads], after softplus and limits.
        A_H: [num_heads], negative.
        D_H: the skip connection, [num_heads].
        conv_weight_CK, conv_bias_C: of the depthwise convolution.
        activation: what follows the convolution.
    """

    mixed_SC: Tensor
    dt_SH: Tensor
    A_H: Tensor
    D_H: Tensor
    conv_weight_CK: Tensor
    conv_bias_C: Tensor | None
    activation: Callable[[Tensor], Tensor]


def ssd_spec(layer: int, shape: SsdShape, inputs: SsdInputs) -> LayerSpec:
    """The spec of a Mamba-2 layer."""
    return LayerSpec(
        index=layer,
        states=carried_states(shape.fields, inputs, (inputs.dt_SH, inputs.A_H)),
        workspace_bytes=workspace_bytes(
            shape.num_heads, shape.head_dim, shape.num_groups, shape.state_size, inputs.mixed_SC.element_size()
        ),
    )


def mix(forward: ForwardPass, layer: int, shape: SsdShape, inputs: SsdInputs) -> Tensor:
    """Layer `layer`'s convolution and recurrence in a pass; [S, num_heads, head_dim] in the dtype of `mixed_SC`."""
    io = forward.layer(ssd_spec(layer, shape, inputs))
    carry = Carry(io, shape.fields)
    of_B = shape.num_groups * shape.state_size
    x_SC, B_SC, C_SC = carry.convolved(inputs).split([shape.num_heads * shape.head_dim, of_B, of_B], dim=-1)
    out_SHP, final_BHPN = ssd(
        x_SC.unflatten(-1, (shape.num_heads, shape.head_dim)),
        inputs.dt_SH,
        inputs.A_H,
        B_SC.unflatten(-1, (shape.num_groups, shape.state_size)),
        C_SC.unflatten(-1, (shape.num_groups, shape.state_size)),
        inputs.D_H,
        lengths=io.lengths,
        initial_HPN=carry.initial,
    )
    return carry.hand_on(inputs, final_BHPN, out_SHP)
