"""Frameworks: which one a user's model comes from, and how it presents itself to the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from longstraw.integrations.accelerate import check_accelerator
from longstraw.integrations.transformers.adapter import TransformersAdapter
from longstraw.runtime.adapter import ModelAdapter


def adapt(model: nn.Module, accelerator: Any | None, kernels: Mapping[str, str] | None = None) -> ModelAdapter:
    """The adapter of a user's model. `kernels` is the user's choice of kernels, by what they compute.

    Raises:
        UnsupportedModelError: the model, or the way it is wrapped, cannot be carried exactly.
        ConfigError: the accelerator has a setting that the runtime would ignore.
    """
    if accelerator is not None:
        check_accelerator(accelerator)
    return TransformersAdapter(model, kernels)
