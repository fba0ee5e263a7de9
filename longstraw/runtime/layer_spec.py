"""What a layer keeps of the prompt, as its family declares it in every pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longstraw.resident.state import Field, State, StateKind


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """One state of a layer.

    Attributes:
        name: tells the states of a layer apart ("kv", "latent", "recurrent").
        kind: TOKEN, a row a token; or CARRIED, of fixed size, a row a chunk boundary.
        fields: the values of a row.
        dtype: of the values.
        trained: whether a gradient that reaches the state trains anything. Known in passes with autograd only; the
            probe's word counts.
        backward: whether the backward of a token state streams its rows again.
        output: whether it is no state but what the layer put out for the prompt's tokens: kept, where that is planned,
            so that the sweep need not compute it again.
    """

    name: str
    kind: StateKind
    fields: tuple[Field, ...]
    dtype: torch.dtype
    trained: bool = False
    backward: bool = True
    output: bool = False

    def state(self, layer: int) -> State:
        """As the page store knows it."""
        return State(kind=self.kind, layer=layer, name=self.name, fields=self.fields, dtype=_name(self.dtype))

    def gradient_state(self, layer: int, wide: bool) -> State:
        """The state of its gradient pages; in float32 if `wide` and the state is narrower."""
        dtype = torch.float32 if wide and self.dtype.itemsize < 4 else self.dtype
        return State(kind=self.kind, layer=layer, name=f"{self.name}_grad", fields=self.fields, dtype=_name(dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer's states, in the order in which its forward streams them.

    Attributes:
        index: the layer's number in the model, from 0; below 0 for a second mixer in a layer.
        states: what it keeps.
        kept_bytes: bytes a token that it keeps under checkpointing, beside its input.
        workspace_bytes: bytes a token that its attention needs for a moment.
        skips_unused_output: whether it reads no pages where nobody reads its output.
    """

    index: int
    states: tuple[StateSpec, ...]
    kept_bytes: int = 0
    workspace_bytes: int = 0
    skips_unused_output: bool = False

    def spec(self, name: str) -> StateSpec:
        """The state of that name."""
        return next(spec for spec in self.states if spec.name == name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
