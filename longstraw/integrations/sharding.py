"""Which framework holds a model: found from how it is wrapped, not from what the user says."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from longstraw.config import GradientConfig
from longstraw.errors import ConfigError
from longstraw.integrations.ddp import DdpSharding
from longstraw.integrations.deepspeed import DeepSpeedSharding, is_deepspeed
from longstraw.integrations.fsdp2 import Fsdp2Sharding, is_fsdp2
from longstraw.integrations.plain import LossScale, PlainSharding
from longstraw.runtime.sharding import Sharding


def sharding_of(
    model: nn.Module, gradient: GradientConfig, scale: LossScale | None = None, *, accelerate: bool = False
) -> Sharding:
    """The shim of the framework that wraps `model`.

    Args:
        model: as the user has wrapped it.
        gradient: the settings of that section.
        scale: what the optimizer expects to have been done to the loss, or None for nothing.
        accelerate: whether an `Accelerator` prepared the model, and with it the optimizer.

    Raises:
        ConfigError: `gradient.reduce: each_pass` where whole gradients are there anyway.
        UnsupportedModelError: the framework is used in a way, or in a version, that is not supported.
    """
    wide = gradient.accumulate == "float32"
    if is_fsdp2(model):
        return Fsdp2Sharding(model, reduce=gradient.reduce, wide=wide, scale=scale)
    if gradient.reduce == "each_pass":
        raise ConfigError(
            "gradient.reduce: each_pass would be ignored: it saves memory where a framework shards gradients in every "
            f"backward pass (FSDP2), and this model is {type(model).__name__}; use deferred"
        )
    if is_deepspeed(model):
        return DeepSpeedSharding(model, wide=wide, steps=accelerate)
    if isinstance(model, DistributedDataParallel):
        return DdpSharding(model, wide=wide, scale=scale)
    return PlainSharding(model, wide=wide, scale=scale)
