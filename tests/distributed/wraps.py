"""How a user of each framework wraps a tiny model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.steps import CLIP, Held, here, hold, make_optimizer


def ddp(model: nn.Module) -> Held:
    return hold(model, DistributedDataParallel(model.to(here())))


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
    model.to(here())
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    units = [layer.mlp for layer in base.model.layers] if nested else []
    units += [*base.model.layers, *([base.lm_head] if head else [])]
    for unit in [*units, model]:
        fully_shard(
            unit,
            mesh=mesh or init_device_mesh(here().type, (dist.get_world_size(),)),
            reshard_after_forward=reshard,
            mp_policy=policy or MixedPrecisionPolicy(),
            offload_policy=offload or OffloadPolicy(),
        )
    return hold(model, model)


def fsdp2_whole(model: nn.Module) -> Held:
    """The model as one unit."""
    model.to(here())
    fully_shard(model, mesh=init_device_mesh(here().type, (dist.get_world_size(),)))
    return hold(model, model)


def fsdp2_hybrid(model: Any) -> Held:
    """Replicas of two shards each."""
    mesh = init_device_mesh(here().type, (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp2(model, mesh=mesh)


def fsdp2_offloaded(model: Any) -> Held:
    """Parameters and gradients on the CPU between passes (where this machine computes as well)."""
    return fsdp2(model, offload=CPUOffloadPolicy(pin_memory=False))


def zero(
    model: nn.Module,
    *,
    stage: int,
    bf16: bool = False,
    loss_scale: int = 0,
    offload: tuple[str, ...] = (),
    disk: str | None = None,
    accumulated: int = 1,
    whole_layers: bool = False,
    **settings: Any,
) -> Held:
    """A DeepSpeed engine with torch's own optimizer. What is in `offload` lies on the host, or on `disk`.

    A `loss_scale` makes it one of float16.
    `whole_layers`: ZeRO-3 gathers each decoder layer as one. `settings` are more of `zero_optimization`.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    if here().type == "cpu":
        # A collective of DeepSpeed's own, compiled at first use: gloo serves as well, and needs no compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model.to(here())
    if whole_layers:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        deepspeed.utils.set_z3_leaf_modules(model, [type(base.model.layers[0])])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulated,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            **{f"offload_{what}": _offloaded(what, disk) for what in offload},
            **settings,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
        "fp16": {"enabled": loss_scale > 0, "loss_scale": loss_scale},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config)
    names = [name for name, _ in engine.module.named_parameters()]
    parameters = dict(engine.module.named_parameters())
    return Held(
        engine,
        optimizer,
        engine.step,
        lambda: {n: safe_get_full_grad(parameters[n]) if parameters[n].requires_grad else None for n in names},
        lambda: {n: _weight(parameters[n], safe_get_full_fp32_param) for n in names},
    )


def _offloaded(what: str, disk: str | None) -> dict[str, Any]:
    if disk is None:
        return {"device": "cpu", "pin_memory": False}
    place: dict[str, Any] = {"device": "nvme", "nvme_path": disk, "pin_memory": False}
    # By default the buffers that weights pass through take gigabytes.
    return place | ({"buffer_count": 8, "buffer_size": 1_000_000} if what == "param" else {"buffer_count": 4})


def _weight(parameter: Any, get: Any) -> Any:
    if parameter.requires_grad:
        return get(parameter).clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_numel")):
        return parameter.detach().clone()
