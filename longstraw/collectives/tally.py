"""How many collectives carried tensors between ranks, and how many bytes: counted as they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GATHER, SCATTER, REDUCE = "all_gather", "reduce_scatter", "all_reduce"
"""Kinds of collectives. Bytes are of the whole tensor: what a gather puts out, and what a reduction takes in. Over a
ring of n ranks each sends and receives (n - 1) / n of it, and twice that in an all-reduce."""


@dataclass(kw_only=True)
class Tally:
    """Collectives of this rank since its model was wrapped.

    Attributes:
        counts: collectives by kind.
        bytes: their bytes by kind.
        weights_to_device, gradients_to_host: bytes over the host's link on behalf of offloaded parameters.
    """

    counts: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    weights_to_device: int = 0
    gradients_to_host: int = 0

    def add(self, kind: str, nbytes: int, count: int = 1) -> None:
        """Count `count` collectives of a kind, of `nbytes` bytes together."""
        self.counts[kind] = self.counts.get(kind, 0) + count
        self.bytes[kind] = self.bytes.get(kind, 0) + nbytes

    def copy(self) -> Tally:
        """As it is now."""
        return Tally(
            counts=dict(self.counts),
            bytes=dict(self.bytes),
            weights_to_device=self.weights_to_device,
            gradients_to_host=self.gradients_to_host,
        )

    def since(self, before: Tally) -> Tally:
        """What came after `before`."""
        return Tally(
            counts=_differences(self.counts, before.counts),
            bytes=_differences(self.bytes, before.bytes),
            weights_to_device=self.weights_to_device - before.weights_to_device,
            gradients_to_host=self.gradients_to_host - before.gradients_to_host,
        )


def _differences(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {kind: count - before.get(kind, 0) for kind, count in now.items() if count != before.get(kind, 0)}


class CollectiveMeter(TorchDispatchMode):
    """Counts the collectives that run within it, whoever calls them, into a `Tally`.

    It sees every operator that is dispatched meanwhile, which costs the host microseconds each, and torch compiles
    nothing while it is active: it is held around the reductions of a step, not around passes.
    """

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = _OPERATORS.get(func._schema.name)
        if known is not None:
            kind, measured = known
            self._tally.add(kind, measured(args, result))
        return result


def _nbytes(found: Any) -> int:
    if isinstance(found, Tensor):
        return found.nbytes
    if isinstance(found, list | tuple):
        return sum(_nbytes(one) for one in found)
    return 0


def _argument(position: int) -> Callable[[tuple[Any, ...], Any], int]:
    return lambda args, result: _nbytes(args[position])


def _outcome(args: tuple[Any, ...], result: Any) -> int:
    return _nbytes(result)


# Where the whole tensor stands in each operator's call. DTensor and DeepSpeed call different ones.
_OPERATORS: dict[str, tuple[str, Callable[[tuple[Any, ...], Any], int]]] = {
    "c10d::_allgather_base_": (GATHER, _argument(0)),
    "c10d::allgather_": (GATHER, _argument(0)),
    "c10d::allgather_into_tensor_coalesced_": (GATHER, _argument(0)),
    "c10d::allgather_coalesced_": (GATHER, _argument(0)),
    "c10d::_reduce_scatter_base_": (SCATTER, _argument(1)),
    "c10d::reduce_scatter_": (SCATTER, _argument(1)),
    "c10d::reduce_scatter_tensor_coalesced_": (SCATTER, _argument(1)),
    "c10d::allreduce_": (REDUCE, _argument(0)),
    "c10d::allreduce_coalesced_": (REDUCE, _argument(0)),
    "c10d::reduce_": ("reduce", _argument(0)),
    "c10d::broadcast_": ("broadcast", _argument(0)),
    "c10d::alltoall_base_": ("all_to_all", _argument(1)),
    "c10d::alltoall_": ("all_to_all", _argument(1)),
    "_c10d_functional::all_gather_into_tensor": (GATHER, _outcome),
    "_c10d_functional::all_gather_into_tensor_coalesced": (GATHER, _outcome),
    "_c10d_functional::reduce_scatter_tensor": (SCATTER, _argument(0)),
    "_c10d_functional::reduce_scatter_tensor_coalesced": (SCATTER, _argument(0)),
    "_c10d_functional::all_reduce": (REDUCE, _argument(0)),
    "_c10d_functional::all_reduce_": (REDUCE, _argument(0)),
    "_c10d_functional::all_reduce_coalesced": (REDUCE, _argument(0)),
    "_c10d_functional::broadcast": ("broadcast", _argument(0)),
    "_c10d_functional::all_to_all_single": ("all_to_all", _argument(0)),
}
