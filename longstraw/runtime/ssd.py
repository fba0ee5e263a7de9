"""Mamba-2 layers, which carry a state space and a convolution window: their spec, and their mixing in a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.kernels.gated_delta import causal_conv, last_rows
from longstraw.kernels.ssd import ssd, workspace_bytes
from longstraw.resident.state import Field, StateKind
from longstraw.runtime.carried import carried_in, carried_out
from longstraw.runtime.layer_spec import LayerSpec, StateSpec
from longstraw.runtime.passes import ForwardPass

RECURRENT, WINDOW = "recurrent", "convolution"


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
        """What is carried, by state name. A convolution of one tap carries nothing."""
        fields = {RECURRENT: Field(name=RECURRENT, shape=(self.num_heads, self.head_dim, self.state_size))}
        if self.kernel > 1:
            fields[WINDOW] = Field(name=WINDOW, shape=(self.kernel - 1, self.channels))
        return fields


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
    """The spec of a Mamba-2 layer. Both states are float32 (float64 in a float64 model): they, and the gradients of
    all branches and chunks that meet in them, would lose bits in less."""
    window_trained = inputs.mixed_SC.requires_grad
    reaching = (inputs.dt_SH, inputs.A_H, inputs.conv_weight_CK, inputs.conv_bias_C)
    recurrent_trained = window_trained or any(x is not None and x.requires_grad for x in reaching)
    trained = {RECURRENT: recurrent_trained, WINDOW: window_trained}
    dtype = torch.promote_types(inputs.mixed_SC.dtype, torch.float32)
    return LayerSpec(
        index=layer,
        states=tuple(
            StateSpec(name=name, kind=StateKind.CARRIED, fields=(field,), dtype=dtype, trained=trained[name])
            for name, field in shape.fields.items()
        ),
        workspace_bytes=workspace_bytes(
            shape.num_heads, shape.head_dim, shape.num_groups, shape.state_size, inputs.mixed_SC.element_size()
        ),
    )


def mix(forward: ForwardPass, layer: int, shape: SsdShape, inputs: SsdInputs) -> Tensor:
    """Layer `layer`'s convolution and recurrence in a pass; [S, num_heads, head_dim] in the dtype of `mixed_SC`."""
    io = forward.layer(ssd_spec(layer, shape, inputs))
    fields = shape.fields
    before = {name: carried_in(io, name, field.shape) for name, field in fields.items()}
    mixed_SC, window_WC = inputs.mixed_SC, before.get(WINDOW)
    convolved_SC = inputs.activation(
        causal_conv(mixed_SC, window_WC, inputs.conv_weight_CK, inputs.conv_bias_C, lengths=io.lengths)
    )
    of_B = shape.num_groups * shape.state_size
    x_SC, B_SC, C_SC = convolved_SC.split([shape.num_heads * shape.head_dim, of_B, of_B], dim=-1)
    out_SHP, final_BHPN = ssd(
        x_SC.unflatten(-1, (shape.num_heads, shape.head_dim)),
        inputs.dt_SH,
        inputs.A_H,
        B_SC.unflatten(-1, (shape.num_groups, shape.state_size)),
        C_SC.unflatten(-1, (shape.num_groups, shape.state_size)),
        inputs.D_H,
        lengths=io.lengths,
        initial_HPN=before[RECURRENT],
    )
    if io.is_capture or io.is_sweep:
        after = {RECURRENT: final_BHPN[0]}
        if WINDOW in fields:
            after[WINDOW] = last_rows(mixed_SC, window_WC, shape.kernel - 1).to(final_BHPN.dtype)
        for name in fields:
            out_SHP = carried_out(io, name, after[name], out_SHP)
    return out_SHP
