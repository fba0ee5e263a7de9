"""The bytes of a model's resident state from its config alone: no weights, no forward pass."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from longstraw.integrations.transformers.checks import find_attentions
from longstraw.integrations.transformers.families import family_of
from longstraw.resident import Footprint, footprint_of


def state_bytes(config: Any, dtype: torch.dtype | str | None = None) -> Footprint:
    """What each prompt token, and each snapshot of carried state, will take on pages.

    Attention outputs that a capture may keep beside the state, and gradient pages, are not counted.

    Args:
        config: a transformers config, a multimodal one too.
        dtype: of the model's activations; None takes the config's own.

    Raises:
        ValueError: neither `dtype` nor the config names one.
        UnsupportedModelError: some layer is of no supported family.
    """
    text = config.get_text_config()
    named = dtype or getattr(text, "dtype", None) or getattr(config, "dtype", None)
    if named is None:
        raise ValueError(f"{type(config).__name__} names no dtype; give dtype='bfloat16', or that of your model")
    activations: torch.dtype = getattr(torch, named) if isinstance(named, str) else named
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    states = []
    for index, (_, attention) in find_attentions(model).items():
        family = family_of(attention)
        assert family is not None, "find_attentions refuses what is of no family"
        states += [spec.state(index) for spec in family.spec(attention, text, activations).states if not spec.output]
    return footprint_of(states)
