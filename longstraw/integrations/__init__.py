"""Frameworks: which one a user's model comes from, and how it presents itself to the runtime."""

from __future__ import annotations

from typing import Any

from torch import nn

from longstraw.config import Config
from longstraw.integrations.accelerate import check_accelerator
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
    scaler = None
    if accelerator is not None:
        check_accelerator(accelerator)
        scaler = getattr(accelerator, "scaler", None)
    return TransformersAdapter(sharding_of(model, config.gradient, scaler), config.kernels.model_dump())
