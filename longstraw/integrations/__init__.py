"""Frameworks: which one a user's model comes from, and how it presents itself to the runtime."""

from __future__ import annotations

from typing import Any

from torch import nn

from longstraw.config import Config
from longstraw.errors import UnsupportedModelError
from longstraw.integrations.accelerate import check_accelerator, loss_scaling
from longstraw.integrations.sharding import sharding_of
from longstraw.integrations.transformers.adapter import TransformersAdapter
from longstraw.runtime.adapter import ModelAdapter


def adapt(model: nn.Module, accelerator: Any | None, config: Config | None = None) -> ModelAdapter:
    """The adapter of a user's model, wrapped or not, under the settings of `config` (None: the defaults).

    Raises:
        UnsupportedModelError: the model, or the way it is wrapped, cannot be carried exactly.
        ConfigError: the accelerator, or `config`, has a setting that the runtime would ignore.
    """
    config = config or Config()
    scale = None
    if accelerator is not None:
        check_accelerator(accelerator)
        scale = loss_scaling(accelerator)
    sharding = sharding_of(model, config.gradient, scale, accelerate=accelerator is not None)
    if accelerator is not None and accelerator.num_processes > 1 and sharding.ranks is None:
        raise UnsupportedModelError(
            f"model: one of {accelerator.num_processes} processes has a model that no framework wraps, so that its "
            "gradients would not be averaged; pass what accelerator.prepare(model, optimizer) returned"
        )
    return TransformersAdapter(sharding, config.kernels.model_dump())
