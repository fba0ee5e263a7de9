"""No framework at all: one process whose parameters are where it computes. Also what the other shims begin with."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence

import torch
from torch import Tensor, nn

from longstraw.collectives import Ranks, Tally
from longstraw.runtime.ledger import add_to_gradients, sum_dtype
from longstraw.runtime.sharding import WeightPrint

LossScale = Callable[[Tensor], Tensor]


class PlainSharding:
    """`Sharding` of a model that nothing shards.

    Args:
        model: what the user passed.
        wide: whether gradients are summed in float32 at least (`gradient.accumulate`).
        scale: what the optimizer expects to have been done to the loss, or None for nothing.
    """

    name = "one process"
    reduce = "deferred"
    lockstep = False
    takes_gradients = False
    casts_outputs = False
    rehearses = False

    def __init__(self, model: nn.Module, *, wide: bool, scale: LossScale | None = None) -> None:
        self.ranks: Ranks | None = None
        self.tally = Tally()
        self._model, self._wide = model, wide
        self._scale = scale

    @property
    def called(self) -> nn.Module:
        return self._model

    @property
    def inner(self) -> nn.Module:
        return self._model

    @property
    def steps(self) -> int:
        return 0

    def device(self) -> torch.device | None:
        return None

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        return list(self.inner.named_parameters())

    def leaves(self) -> Sequence[nn.Parameter]:
        return [parameter for _, parameter in self.parameters() if parameter.requires_grad]

    def storages(self) -> Container[int]:
        return {p.untyped_storage().data_ptr() for _, p in self.parameters()}

    def weights(self) -> tuple[WeightPrint, ...]:
        held = [*self.parameters(), *saved_buffers(self.inner)]
        return tuple((name, p.data_ptr(), p._version, p.dtype) for name, p in held)

    def layout(self) -> Hashable:
        return tuple((p.requires_grad, p.dtype, p.device) for _, p in self.parameters())

    def begin_step(self) -> None:
        pass

    def begin_pass(self) -> None:
        pass

    def rehearse(self, out: Tensor) -> None:
        raise NotImplementedError

    def begin_gradients(self) -> None:
        pass

    def backward(self, out: Tensor, gradient: Tensor) -> None:
        out.backward(gradient)  # type: ignore[no-untyped-call]

    def finalize(self, sums: Mapping[nn.Parameter, Tensor]) -> None:
        add_to_gradients(sums)

    def end_step(self, *, failed: bool) -> None:
        pass

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss if self._scale is None else self._scale(loss)

    def gradient_bytes(self) -> int:
        return sum(leaf.numel() * sum_dtype(leaf, wide=self._wide).itemsize for leaf in self.leaves())

    def link_bytes_a_parameter(self) -> float:
        return 0.0

    def describe(self) -> str:
        return "gradients: one process, nothing is reduced"


def saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that a checkpoint holds, such as the bias that balances a router's experts: they are weights as well.
    The others are derived, and some modules write them in passing (rotary frequencies)."""
    return [
        (f"{name}.{key}", buffer)
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    ]
