"""What every family of keys and values asks of an attention module before it is carried, and what its layers keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from longstraw.runtime.kv import kv_spec
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.window import window_spec


def refuse_layer(attention: nn.Module, config: Any) -> str | None:
    """Why a layer of plain or windowed causal attention cannot be carried, or None.

    transformers' models build the mask from the config's layer type, and hand the window to the attention module on
    its own: both must say the same.
    """
    if not getattr(attention, "is_causal", True):
        return "its attention is not causal"
    index = attention.layer_idx
    kinds = getattr(config, "layer_types", None)
    window = _window(attention, config)
    kind = kinds[index] if kinds else ("full_attention" if window is None else "sliding_attention")  # type: ignore[index]
    if kind not in ("full_attention", "sliding_attention"):
        return f"layer {index} is of type {kind!r}; supported are 'full_attention' and 'sliding_attention'"
    if (kind == "sliding_attention") != (window is not None):
        return f"layer {index} is of type {kind!r} but its sliding window is {window}; make config.layer_types agree"
    if window is not None and window < 2:  # type: ignore[operator]
        return f"layer {index} has a sliding window of {window}; a window must be of 2 tokens or more"
    return None


def attention_spec(attention: nn.Module, config: Any, dtype: torch.dtype) -> LayerSpec:
    """`Family.spec` of layers that keep keys and values, all of them or those of a window."""
    index: int = attention.layer_idx  # type: ignore[assignment]
    head_dim: int = attention.head_dim  # type: ignore[assignment]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    q, k = (torch.empty(1, count, 1, head_dim, dtype=dtype, device="meta") for count in (heads, kv_heads))
    window = _window(attention, config)
    if window is None or covers_context(window, config):
        return kv_spec(index, q, k, k)
    return window_spec(index, q, k, k, window)


def covers_context(window: int, config: Any) -> bool:
    """Whether a window is as wide as the model's whole context, so that plain attention is the same."""
    return bool(window >= config.max_position_embeddings)


def _window(attention: nn.Module, config: Any) -> int | None:
    own = hasattr(attention, "sliding_window")
    return attention.sliding_window if own else getattr(config, "sliding_window", None)  # type: ignore[return-value]
