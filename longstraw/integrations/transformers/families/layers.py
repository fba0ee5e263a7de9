"""What every family of keys and values asks of an attention module before it is carried."""

from __future__ import annotations

from typing import Any

from torch import nn


def refuse_layer(attention: nn.Module, config: Any) -> str | None:
    """Why a layer of plain or windowed causal attention cannot be carried, or None.

    transformers' models build the mask from the config's layer type, and hand the window to the attention module on
    its own: both must say the same.
    """
    if not getattr(attention, "is_causal", True):
        return "its attention is not causal"
    index = attention.layer_idx
    kinds = getattr(config, "layer_types", None)
    window = (
        attention.sliding_window if hasattr(attention, "sliding_window") else getattr(config, "sliding_window", None)
    )
    kind = kinds[index] if kinds else ("full_attention" if window is None else "sliding_attention")  # type: ignore[index]
    if kind not in ("full_attention", "sliding_attention"):
        return f"layer {index} is of type {kind!r}; supported are 'full_attention' and 'sliding_attention'"
    if (kind == "sliding_attention") != (window is not None):
        return f"layer {index} is of type {kind!r} but its sliding window is {window}; make config.layer_types agree"
    if window is not None and window < 2:  # type: ignore[operator]
        return f"layer {index} has a sliding window of {window}; a window must be of 2 tokens or more"
    return None
