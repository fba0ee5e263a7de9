"""The attention function that transformers calls in a pass, and which pass a module is in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from longstraw.errors import TransactionStateError, UnsupportedModelError
from longstraw.integrations.transformers.families.layers import covers_context
from longstraw.runtime.kv import attend
from longstraw.runtime.passes import ForwardPass
from longstraw.runtime.window import attend_window

NAME = "longstraw"
"""The attention implementation's name in transformers."""

# What attention can ignore: they describe the layout of rows, which the pass knows, or ask for nothing.
_HARMLESS = frozenset({"is_causal", "position_ids", "use_cache", "output_attentions", "output_hidden_states"})

_passes: WeakKeyDictionary[nn.Module, ForwardPass] = WeakKeyDictionary()


@contextmanager
def attending(modules: Iterable[nn.Module], forward: ForwardPass) -> Iterator[None]:
    """Within it the attention modules work for `forward`. A model is in one pass at a time."""
    modules = list(modules)
    if any(module in _passes for module in modules):
        raise TransactionStateError("the model is already inside a Longstraw pass; passes cannot be nested")
    for module in modules:
        _passes[module] = forward
    try:
        yield
    finally:
        for module in modules:
            del _passes[module]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q [1, num_heads, S, head_dim] in, [1, S, num_heads, head_dim] out.

    `sliding_window` tokens are seen, the own one included; `softcap` bounds the scores; `s_aux` [num_heads] are sinks.
    """
    forward = _passes.get(module)
    if forward is None:
        raise TransactionStateError(
            f"attention implementation {NAME!r} was called outside a transaction; it is set by the runtime alone"
        )
    _refuse(module, attention_mask, dropout, kwargs)
    if torch.is_autocast_enabled(query.device.type):
        # As scaled_dot_product_attention does under autocast.
        narrow = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    index: int = module.layer_idx  # type: ignore[assignment]
    if sliding_window is None or _never_slides(module, forward, sliding_window):
        out = attend(forward, index, query, key, value, scale, softcap=softcap, sinks_H=s_aux)
    else:
        out = attend_window(
            forward, index, query, key, value, scale, window=sliding_window, softcap=softcap, sinks_H=s_aux
        )
    return out.transpose(1, 2), None


def _never_slides(module: nn.Module, forward: ForwardPass, window: int) -> bool:
    """Whether plain attention does: it keeps a row a token, and such a window one for each of its tokens and chunk."""
    if not covers_context(window, module.config):
        return False
    longest = forward.prefix_rows + max(forward.lengths)
    if longest > window:
        raise UnsupportedModelError(
            f"{type(module).__name__} has a sliding window of {window} tokens, its whole context, and is given a row "
            f"of {longest}; shorten the prompt or the responses"
        )
    return True


def _refuse(module: nn.Module, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if mask is not None:
        raise UnsupportedModelError(f"{name} brings an attention mask of its own, which would be ignored")
    if dropout:
        raise UnsupportedModelError(f"{name} has attention dropout {dropout}; set config.attention_dropout to 0")
    asked = {key: value for key, value in kwargs.items() if value is not None and key not in _HARMLESS}
    unknown = {key for key, value in asked.items() if isinstance(value, Tensor) or value is not False}
    if unknown:
        raise UnsupportedModelError(
            f"{name} asks its attention for {', '.join(sorted(unknown))}, which is not supported yet"
        )


# Without a mask function of that name transformers makes no mask, and does not look into the positions for packed rows,
# for which the host would wait in every pass: causality and branch borders are the pass's own.
AttentionInterface.register(NAME, _attention)
