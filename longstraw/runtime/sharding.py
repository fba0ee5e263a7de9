"""What the runtime asks of the framework that shards or replicates the user's model: one shim a framework."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from longstraw.collectives import Ranks, Tally

WeightPrint = tuple[str, int, int, torch.dtype]
"""A parameter's name, storage, in-place version and dtype."""


class Sharding(Protocol):
    """A framework's hold on a model. Implementations live in `longstraw.integrations`.

    Two sets of tensors are told apart. *parameters* are the optimizer's: what `.grad` is delivered to. *leaves* are
    where autograd adds gradients in a backward pass: the parameters themselves, or the gathered copies that a
    framework puts in their place.

    Attributes:
        name: of the framework, for messages and reports.
        reduce: "deferred" (gradients are summed whole and reduced once a step) or "each_pass" (the framework reduces
            in every backward pass, and its shards are summed).
        ranks: the data-parallel replicas, or None for a single process.
        lockstep: whether forward and backward passes run collectives, so that all ranks must make the same passes.
        takes_gradients: whether the framework's hooks take, or reduce, whole gradients that they find in `.grad`.
        casts_outputs: whether the framework casts floating outputs of the model to another dtype.
        rehearses: whether the framework learns from the first pass that it sees, so that this should be `rehearse`'s.
        tally: what the framework's collectives, and this shim's, have carried so far.
        called: the module to call.
        inner: the model inside the framework's wrappers.
        steps: optimizer steps that torch's own optimizer hooks do not see; 0 where they see all.
    """

    name: str
    reduce: str
    ranks: Ranks | None
    lockstep: bool
    takes_gradients: bool
    casts_outputs: bool

    @property
    def rehearses(self) -> bool: ...

    tally: Tally

    @property
    def called(self) -> nn.Module: ...

    @property
    def inner(self) -> nn.Module: ...

    @property
    def steps(self) -> int: ...

    def device(self) -> torch.device | None:
        """Where the model computes, or None where its parameters are there all the time."""
        ...

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """The optimizer's parameters by name, tied ones once, whatever the framework has in their place just now."""
        ...

    def leaves(self) -> Sequence[nn.Parameter]:
        """The leaves that require a gradient."""
        ...

    def storages(self) -> Container[int]:
        """Addresses of the storages that hold parameters when asked: to save these costs autograd nothing more."""
        ...

    def weights(self) -> tuple[WeightPrint, ...]:
        """A fingerprint of the weights: it changes with every change of them."""
        ...

    def layout(self) -> Hashable:
        """Changes with what is trained, and with the parameters' dtypes and devices."""
        ...

    def begin_step(self) -> None:
        """An optimizer step's first pass is about to run, on every rank."""
        ...

    def begin_pass(self) -> None:
        """A forward pass is about to run."""
        ...

    def rehearse(self, out: Tensor) -> None:
        """Go back through a pass of a few tokens that gave `out`, and leave no gradient. `active` is held around it."""
        ...

    def begin_gradients(self) -> None:
        """This rank's first backward pass of the step is about to run."""
        ...

    def backward(self, out: Tensor, gradient: Tensor) -> None:
        """Run a backward pass of the model from its output."""
        ...

    def finalize(self, sums: Mapping[nn.Parameter, Tensor]) -> None:
        """Average the leaves' summed gradients over the replicas and add them to the parameters' gradients.

        Called on every rank as soon as one of them has a sum; a rank without gives an empty mapping.
        """
        ...

    def end_step(self, *, failed: bool) -> None:
        """The step is over: parameters are as the user's optimizer expects them. Called on every rank."""
        ...

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss whose gradient the optimizer expects, where it was told to scale losses (float16)."""
        ...

    def gradient_bytes(self) -> int:
        """Bytes of gradient that this rank holds until the step's reduction."""
        ...

    def link_bytes_a_parameter(self) -> float:
        """Bytes of weights that a forward pass brings to the device over the host's link, a parameter of the model; 0
        where they lie on the device."""
        ...

    def describe(self) -> str:
        """One line: ranks, and what the reduction costs."""
        ...
