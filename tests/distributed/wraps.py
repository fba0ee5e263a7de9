"""How a user of each framework wraps a tiny model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.steps import Held, hold


def ddp(model: nn.Module) -> Held:
    return hold(model, DistributedDataParallel(model))


def fsdp2(model: Any, *, reshard: bool = True, head: bool = False, precision: bool = False, mesh: Any = None) -> Held:
    """Each decoder layer a unit, and the rest in the root; or the head a unit too."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if precision:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
        )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    units = list(base.model.layers) + ([base.lm_head] if head else [])
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return hold(model, model)
