"""The matrix that a linear module multiplies by, with its gradients, for modules whose matrix is absorbed elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def matrix_parts(linear: nn.Module, in_features: int) -> list[Tensor]:
    """Matrices [out, in] whose sum is what `linear` multiplies by.

    A LoRA update is a part of its own: added to a half-precision matrix, most of a small one would be rounded away.
    Anything else than a plain or LoRA layer (quantized, another adapter) shows its matrix by its own forward on the
    identity.

    Args:
        linear: a module that is linear in its input, without bias.
        in_features: of its input.
    """
    if type(linear) is nn.Linear and not _is_altered(linear):
        return [linear.weight]
    adapters = _plain_lora(linear)
    if adapters is None:
        weight = next(p for p in linear.parameters() if p.is_floating_point())
        identity = torch.eye(in_features, dtype=weight.dtype, device=weight.device)
        return [linear(identity).t()]
    lora: Any = linear
    parts = matrix_parts(lora.base_layer, in_features)
    for name in adapters:
        down, up = lora.lora_A[name], lora.lora_B[name]
        identity = torch.eye(in_features, dtype=down.weight.dtype, device=down.weight.device)
        parts.append((up(down(lora.lora_dropout[name](identity))) * lora.scaling[name]).t())
    return parts


def _is_altered(linear: nn.Module) -> bool:
    """Whether a call does more than the class: hooks (old-style weight norm is one), or a forward of its own."""
    return bool(linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__)


def _plain_lora(module: Any) -> list[str] | None:
    """Names of the adapters that act in a PEFT LoRA layer; None if it is none, or does more than add B A x."""
    if _is_altered(module):
        return None
    if not all(hasattr(module, name) for name in ("base_layer", "lora_A", "lora_B", "scaling", "active_adapters")):
        return None
    if module.disable_adapters:
        return None if module.merged else []
    if module.merged:
        return []
    names = [name for name in module.active_adapters if name in module.lora_A]
    return None if any(name in getattr(module, "lora_variant", {}) for name in names) else names
