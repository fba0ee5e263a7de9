"""How a user of each framework wraps a tiny model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.steps import Held, hold


def ddp(model: nn.Module) -> Held:
    return hold(model, DistributedDataParallel(model))


def fsdp2(
    model: Any,
    *,
    reshard: bool = True,
    head: bool = False,
    nested: bool = False,
    policy: MixedPrecisionPolicy | None = None,
    offload: OffloadPolicy | None = None,
    mesh: Any = None,
) -> Held:
    """Each decoder layer a unit (`nested`: its MLP another one), and the rest in the root; or the head a unit too."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    units = [layer.mlp for layer in base.model.layers] if nested else []
    units += [*base.model.layers, *([base.lm_head] if head else [])]
    for unit in [*units, model]:
        fully_shard(
            unit,
            mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)),
            reshard_after_forward=reshard,
            mp_policy=policy or MixedPrecisionPolicy(),
            offload_policy=offload or OffloadPolicy(),
        )
    return hold(model, model)


def fsdp2_hybrid(model: Any) -> Held:
    """Replicas of two shards each."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp2(model, mesh=mesh)


def fsdp2_offloaded(model: Any) -> Held:
    """Parameters and gradients on the CPU between passes (where this machine computes as well)."""
    return fsdp2(model, offload=CPUOffloadPolicy(pin_memory=False))
