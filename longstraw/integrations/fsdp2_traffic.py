"""FSDP2's gathers and reductions, counted by hooks around its own: it tells nobody when it runs one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from longstraw.collectives import GATHER, REDUCE, SCATTER, Tally
from longstraw.integrations.tensors import tensors_in


class _Handle(Protocol):
    def remove(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Modules whose parameters FSDP2 gathers together (one, or those of `fully_shard([a, b])`), and these by name."""

    modules: tuple[FSDPModule, ...]
    names: tuple[str, ...]


class UnitTraffic:
    """Counts into `tally` what FSDP2 sends for its units, from now until this object is gone.

    A unit whose parameters are still sharded as its forward begins, or as a gradient reaches its output, is about to
    be gathered, or is being gathered already (prefetched): FSDP2's own hooks, which come right behind these, wait for
    it. A unit of which some parameter was handed a gradient is reduced when its backward is over.

    Args:
        model: the root.
        units: all units that have parameters.
        sharded, gathered: parameters by name, as the optimizer sees them and as a pass does.
        device: where the model computes.
        reduces: whether FSDP2 reduces gradients in each backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        sharded: Mapping[str, nn.Parameter],
        gathered: Mapping[str, nn.Parameter],
        device: torch.device,
        tally: Tally,
        *,
        reduces: bool,
    ) -> None:
        handles: list[_Handle] = []
        weakref.finalize(self, _remove_all, handles)
        reduced: set[int] = set()
        handles.append(model.register_forward_pre_hook(lambda *_: reduced.clear(), prepend=True))
        for number, unit in enumerate(units):
            parts = {name: sharded[name] for name in unit.names}
            gather = _Gather(model, unit, parts, gathered, device, tally)
            for module in unit.modules:
                assert isinstance(module, nn.Module)
                # Ahead of FSDP2's own hooks, which gather before the forward and reshard behind it.
                handles.append(module.register_forward_pre_hook(gather.before_forward, prepend=True))
                handles.append(module.register_forward_hook(gather.behind_forward, prepend=True))
            if reduces:
                for name, part in parts.items():
                    if gathered[name].requires_grad:
                        hook = _reduction(part, _reduce_dtype(unit, gathered[name]), device, tally, reduced, number)
                        handles.append(gathered[name].register_post_accumulate_grad_hook(hook))


class _Gather:
    def __init__(
        self,
        model: nn.Module,
        unit: Unit,
        parts: Mapping[str, nn.Parameter],
        gathered: Mapping[str, nn.Parameter],
        device: torch.device,
        tally: Tally,
    ) -> None:
        owner, _, self._key = unit.names[0].rpartition(".")
        self._owner, self._tally = model.get_submodule(owner), tally
        self._alone = all(shards(part) == 1 for part in parts.values())
        self._bytes = sum(padded_numel(part) * gathered[name].dtype.itemsize for name, part in parts.items())
        self._copied = sum(link_bytes(part, device) for part in parts.values())

    def before_forward(self, *_: Any) -> None:
        if not isinstance(getattr(self._owner, self._key), DTensor):
            return
        if not self._alone:
            self._tally.add(GATHER, self._bytes)
        self._tally.weights_to_device += self._copied

    def behind_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self.before_forward)


def _reduction(
    part: nn.Parameter, dtype: torch.dtype, device: torch.device, tally: Tally, reduced: set[int], number: int
) -> Callable[[Tensor], None]:
    """The hook of a gathered parameter whose gradient FSDP2 will find and reduce."""
    whole, over = padded_numel(part) * dtype.itemsize, shards(part)
    replicas = prod(part.device_mesh.shape) // over if isinstance(part, DTensor) else 1
    copied = link_bytes(part, device)

    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        first = number not in reduced
        reduced.add(number)
        if over > 1:
            tally.add(SCATTER, whole, count=first)
        if replicas > 1:
            tally.add(REDUCE, whole // over, count=first)
        tally.gradients_to_host += copied

    return hook


def _reduce_dtype(unit: Unit, gathered: nn.Parameter) -> torch.dtype:
    """The type in which FSDP2 reduces: of the policy that `fully_shard` was given, for which it has no public word."""
    dtype: torch.dtype | None = unit.modules[0]._get_fsdp_state()._mp_policy.reduce_dtype
    return gathered.dtype if dtype is None else dtype


def shards(parameter: nn.Parameter) -> int:
    """Over how many ranks a parameter is sharded; replicas of the whole do not count."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return prod(mesh.size(dim) for dim, placement in enumerate(parameter.placements) if placement.is_shard())


def padded_numel(parameter: nn.Parameter) -> int:
    """Values of the whole parameter as it travels: every shard as long as the longest."""
    dims = [p.dim for p in getattr(parameter, "placements", ()) if p.is_shard()]
    if not dims or not parameter.numel():
        return parameter.numel()
    rows, over = parameter.shape[dims[0]], shards(parameter)
    return parameter.numel() // rows * (-(-rows // over) * over)


def link_bytes(parameter: nn.Parameter, device: torch.device) -> int:
    """Bytes of this rank's shard that cross the host's link to `device`; 0 where it lies there already."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.nbytes if local.device.type != device.type else 0


def _remove_all(handles: list[_Handle]) -> None:
    while handles:
        handles.pop().remove()
