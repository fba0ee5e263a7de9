"""What layers of a short convolution and a recurrence share: two carried states, read before and handed on behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from longstraw.kernels.gated_delta import causal_conv, last_rows
from longstraw.resident.state import Field, StateKind
from longstraw.runtime.carried import carried_in, carried_out
from longstraw.runtime.layer_io import LayerIO
from longstraw.runtime.layer_spec import StateSpec

RECURRENT, WINDOW = "recurrent", "convolution"


class ConvolvedInputs(Protocol):
    """What a layer's convolution works with; shapes as in `kernels.gated_delta.causal_conv`."""

    @property
    def mixed_SC(self) -> Tensor: ...

    @property
    def conv_weight_CK(self) -> Tensor: ...

    @property
    def conv_bias_C(self) -> Tensor | None: ...

    @property
    def activation(self) -> Callable[[Tensor], Tensor]: ...


def carried_fields(state: tuple[int, ...], kernel: int, channels: int) -> dict[str, Field]:
    """What is carried, by state name: the recurrence's state, and the last inputs of a convolution of `kernel` taps,
    where it has more than one."""
    fields = {RECURRENT: Field(name=RECURRENT, shape=state)}
    if kernel > 1:
        fields[WINDOW] = Field(name=WINDOW, shape=(kernel - 1, channels))
    return fields


def carried_states(
    fields: dict[str, Field], inputs: ConvolvedInputs, reaching: Iterable[Tensor]
) -> tuple[StateSpec, ...]:
    """The specs of both states, in float32 (float64 in a float64 model): they, and the gradients of all branches and
    chunks that meet in them, would lose bits in less. `reaching`: what else writes to the recurrence's state."""
    window_trained = inputs.mixed_SC.requires_grad
    writers = (inputs.conv_weight_CK, inputs.conv_bias_C, *reaching)
    recurrent_trained = window_trained or any(x is not None and x.requires_grad for x in writers)
    trained = {RECURRENT: recurrent_trained, WINDOW: window_trained}
    dtype = torch.promote_types(inputs.mixed_SC.dtype, torch.float32)
    return tuple(
        StateSpec(name=name, kind=StateKind.CARRIED, fields=(field,), dtype=dtype, trained=trained[name])
        for name, field in fields.items()
    )


class Carry:
    """The carried states of one layer in one pass.

    Attributes:
        initial: the recurrence's state before the pass's rows; None before the first row.
    """

    def __init__(self, io: LayerIO, fields: dict[str, Field]) -> None:
        self._io, self._fields = io, fields
        before = {name: carried_in(io, name, field.shape) for name, field in fields.items()}
        self.initial, self._window_WC = before[RECURRENT], before.get(WINDOW)

    def convolved(self, inputs: ConvolvedInputs) -> Tensor:
        """What the convolution and its activation make of the pass's rows, [S, channels]."""
        weight_CK, bias_C = inputs.conv_weight_CK, inputs.conv_bias_C
        return inputs.activation(
            causal_conv(inputs.mixed_SC, self._window_WC, weight_CK, bias_C, lengths=self._io.lengths)
        )

    def hand_on(self, inputs: ConvolvedInputs, final: Tensor, out: Tensor) -> Tensor:
        """Hand both states on, `final` [B, ...] being the recurrence's; use what is returned as the layer's output."""
        if not (self._io.is_capture or self._io.is_sweep):
            return out
        after = {RECURRENT: final[0]}
        if WINDOW in self._fields:
            window = self._fields[WINDOW].shape[0]
            after[WINDOW] = last_rows(inputs.mixed_SC, self._window_WC, window).to(final.dtype)
        for name in self._fields:
            out = carried_out(self._io, name, after[name], out)
        return out
