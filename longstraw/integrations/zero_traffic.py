"""ZeRO-3's gathers, counted by hooks around its own."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import nn

from longstraw.collectives import GATHER, Tally
from longstraw.integrations.tensors import tensors_in


class _Handle(Protocol):
    def remove(self) -> None: ...


class ZeroTraffic:
    """Counts into `tally` the weights that ZeRO-3 gathers, from now until this object is gone.

    A weight that was let go of (seen where a pass begins, and behind each module's forward) and is used again was
    gathered in between. Each counts as one: DeepSpeed merges as many into one collective as its
    `stage3_prefetch_bucket_size` allows. What it keeps from one use to the next is not gathered again.

    Args:
        model: inside the engine.
        replicas: over how many ranks weights are sharded.
        offloaded: whether this rank's shards lie in host memory, or on disk, and the model computes on a device.
    """

    def __init__(self, model: nn.Module, tally: Tally, *, replicas: int, offloaded: bool) -> None:
        handles: list[_Handle] = []
        weakref.finalize(self, _remove_all, handles)
        gone: set[int] = set()
        weights = [p for p in model.parameters() if hasattr(p, "ds_status")]
        for module in model.modules():
            # Inside of a leaf module, which is gathered as one, DeepSpeed knows no modules.
            if hasattr(module, "ds_id"):
                count = _Count(module, tally, gone, replicas, offloaded)
                handles.append(module.register_forward_pre_hook(count.used))
                # Behind DeepSpeed's own, which lets go; and in the backward ahead of it, which gathers.
                handles.append(module.register_forward_hook(count.behind_forward))

        def begins(*_: Any) -> None:
            _look(weights, gone)

        handles.append(model.register_forward_pre_hook(begins, prepend=True))


class _Count:
    def __init__(self, module: nn.Module, tally: Tally, gone: set[int], replicas: int, offloaded: bool) -> None:
        from deepspeed.utils import z3_leaf_module

        self._module: Any = module
        self._own: list[Any] = list(module.parameters(recurse=z3_leaf_module(module)))
        self._tally, self._gone, self._replicas, self._offloaded = tally, gone, replicas, offloaded

    def _weights(self) -> list[Any]:
        # DeepSpeed adds what a module uses of one that is not called, as it meets it.
        return [*self._own, *(weight for _, weight in self._module.ds_external_parameters())]

    def used(self, *_: Any) -> None:
        for weight in self._weights():
            if weight.ds_id in self._gone:
                self._gone.discard(weight.ds_id)
                part = weight.ds_tensor.ds_numel * weight.ds_tensor.element_size()
                self._tally.add(GATHER, part * self._replicas)
                if self._offloaded:
                    self._tally.weights_to_device += part

    def behind_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        _look(self._weights(), self._gone)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self.used)


def _look(weights: list[Any], gone: set[int]) -> None:
    gone.update(weight.ds_id for weight in weights if weight.ds_status.name != "AVAILABLE")


def _remove_all(handles: list[_Handle]) -> None:
    while handles:
        handles.pop().remove()
