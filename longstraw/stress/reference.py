"""The model that a stress run compares with: a copy of its own, in plain autograd, that takes long prompts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

_NAME = "longstraw_stress_reference"


def make_reference(model: nn.Module) -> Any:
    """A copy without gradients, in float32 at least.

    Its attention is torch's, on keys and values repeated for every query head: asked for grouped heads in float32,
    torch holds all scores of a row at once, 4 heads x 16,384^2 x 4 bytes a matrix.
    """
    reference: Any = copy.deepcopy(model)
    reference.zero_grad(set_to_none=True)
    if reference.dtype.itemsize < 4:
        reference.float()
    reference.set_attn_implementation(_NAME)
    return reference


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Whole rows without padding: [B, num_heads, S, head_dim] in, [B, S, num_heads, head_dim] out."""
    assert attention_mask is None
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)
