"""Model families, one file each, found by the class of their attention modules."""

from __future__ import annotations

from torch import nn

from longstraw.integrations.transformers.families import (
    dense,
    falcon_h1,
    gated_delta,
    gemma,
    gpt_oss,
    granite_hybrid,
    kimi_linear,
    latent,
    mamba2,
    mixtures,
    nemotron_h,
    sparse,
)
from longstraw.integrations.transformers.families.family import Family

FAMILIES: tuple[Family, ...] = (
    dense.FAMILY,
    gemma.FAMILY,
    gpt_oss.FAMILY,
    mixtures.FAMILY,
    gated_delta.MIXER,
    gated_delta.ATTENTION,
    kimi_linear.MIXER,
    kimi_linear.ATTENTION,
    latent.FAMILY,
    sparse.FAMILY,
    mamba2.MIXER,
    mamba2.ATTENTION,
    granite_hybrid.MIXER,
    granite_hybrid.ATTENTION,
    nemotron_h.MIXER,
    nemotron_h.ATTENTION,
    falcon_h1.MIXER,
    falcon_h1.ATTENTION,
)


def family_of(module: nn.Module) -> Family | None:
    """The family whose attention class `module` has, or None."""
    name = type(module).__name__
    return next((family for family in FAMILIES if name in family.attention_classes), None)


def known_classes() -> list[str]:
    """Every attention class that is supported."""
    return sorted(name for family in FAMILIES for name in family.attention_classes)
