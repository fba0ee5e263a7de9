"""Which framework holds a model: found from how it is wrapped, not from what the user says."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from longstraw.config import GradientConfig
from longstraw.errors import ConfigError
from longstraw.integrations.ddp import DdpSharding
from longstraw.integrations.fsdp2 import Fsdp2Sharding, is_fsdp2
from longstraw.integrations.plain import PlainSharding
from longstraw.runtime.sharding import Sharding


def sharding_of(model: nn.Module, gradient: GradientConfig, scaler: Any | None = None) -> Sharding:
    """The shim of the framework that wraps `model`.

    Args:
        model: as the user has wrapped it.
        gradient: the settings of that section.
        scaler: the GradScaler that the optimizer's gradients are scaled by, or None.

    Raises:
        ConfigError: `gradient.reduce: each_pass` where whole gradients are there anyway.
        UnsupportedModelError: the framework is used in a way, or in a version, that is not supported.
    """
    wide = gradient.accumulate == "float32"
    if is_fsdp2(model):
        return Fsdp2Sharding(model, reduce=gradient.reduce, wide=wide, scaler=scaler)
    if gradient.reduce == "each_pass":
        raise ConfigError(
            "gradient.reduce: each_pass would be ignored: it saves memory where a framework shards gradients in every "
            f"backward pass (FSDP2), and this model is {type(model).__name__}; use deferred"
        )
    if isinstance(model, DistributedDataParallel):
        return DdpSharding(model, wide=wide, scaler=scaler)
    return PlainSharding(model, wide=wide, scaler=scaler)
