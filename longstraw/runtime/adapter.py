"""What the runtime asks of a model, and what it learns of it: the seam that integrations fill."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from longstraw.runtime.layer_spec import LayerSpec

if TYPE_CHECKING:
    from longstraw.runtime.passes import ForwardPass
    from longstraw.runtime.sharding import Sharding


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """What a short run of the model showed: its layers' state, and what its graph costs.

    Attributes:
        layers: those that mix tokens, in the order in which the model runs them.
        blocks: how many layers there are in all, each of which can be checkpointed.
        graph_bytes: bytes that autograd keeps for a token, all layers, without checkpointing.
        largest_layer_bytes: those of them that are kept in the layer that keeps the most.
        hidden_size, vocab_size: of the hidden states and the LM head.
        hidden_dtype: of the hidden states.
        linear_head: whether the LM head is a linear layer and no more; adapters on it make it a module like any other.
        softcap: whether the model caps its logits.
        no_aux_loss: why the routers' auxiliary loss is not computed, or None if it is.
    """

    layers: tuple[LayerSpec, ...]
    blocks: int
    graph_bytes: int
    largest_layer_bytes: int
    hidden_size: int
    vocab_size: int
    hidden_dtype: torch.dtype
    linear_head: bool
    softcap: bool
    no_aux_loss: str | None


class ModelAdapter(Protocol):
    """A user's model, presented to the runtime. Implementations live in `longstraw.integrations`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def sharding(self) -> Sharding:
        """The framework that holds the model's parameters."""
        ...

    @property
    def modules(self) -> nn.Module:
        """The module whose parameters are trained."""
        ...

    def state_key(self) -> Hashable:
        """What besides the parameters decides the model's function: active adapters, merged or disabled."""
        ...

    def frequencies_key(self, row_tokens: int) -> Hashable:
        """Equal for two row lengths exactly if the model's position encoding is the same function for both."""
        ...

    def profile(self) -> ModelProfile:
        """Run the model on a few tokens and report what it needs; cached until what decides it changes."""
        ...

    def is_profiled(self) -> bool:
        """Whether `profile` would answer without running the model."""
        ...

    def run(self, forward: ForwardPass, input_ids_S: Tensor, positions_S: Tensor) -> Tensor:
        """One forward pass over packed rows; call it within `active(forward)`.

        Returns [S, 2] log-probs and entropies where the pass has a head request, else [S, 1]: a part of the last
        hidden states through which a backward pass can enter.
        """
        ...

    def active(self, forward: ForwardPass) -> AbstractContextManager[None]:
        """Within it the model's layers work for `forward`. Held around every forward and every backward pass.

        Where `forward.routers` is there, every router of experts goes by its `route`.
        """
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Within it the model computes as its reference policy: a PEFT model without its adapters."""
        ...


def iter_trainable(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that require a gradient, tied ones once."""
    return ((name, p) for name, p in module.named_parameters() if p.requires_grad)
