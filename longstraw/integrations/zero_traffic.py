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
        counts = []
        for module in model.modules():
            weights = [p for p in module._parameters.values() if p is not None and hasattr(p, "ds_status")]
            if weights:
                count = _Count(weights, tally, gone, replicas, offloaded)
                counts.append(count)
                handles.append(module.register_forward_pre_hook(count.used))
                # Behind DeepSpeed's own, which lets go; and in the backward ahead of it, which gathers.
                handles.append(module.register_forward_hook(count.behind_forward))

        def begins(*_: Any) -> None:
            for count in counts:
                count.look()

        handles.append(model.register_forward_pre_hook(begins, prepend=True))


class _Count:
    def __init__(
        self, weights: list[nn.Parameter], tally: Tally, gone: set[int], replicas: int, offloaded: bool
    ) -> None:
        self._weights: list[Any] = list(weights)
        self._tally, self._gone, self._replicas, self._offloaded = tally, gone, replicas, offloaded

    def look(self) -> None:
        self._gone.update(weight.ds_id for weight in self._weights if weight.ds_status.name != "AVAILABLE")

    def used(self, *_: Any) -> None:
        for weight in self._weights:
            if weight.ds_id in self._gone:
                self._gone.discard(weight.ds_id)
                part = weight.ds_tensor.ds_numel * weight.ds_tensor.element_size()
                self._tally.add(GATHER, part * self._replicas)
                if self._offloaded:
                    self._tally.weights_to_device += part

    def behind_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self.look()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self.used)


def _remove_all(handles: list[_Handle]) -> None:
    while handles:
        handles.pop().remove()
