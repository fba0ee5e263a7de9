"""Rotary scalings whose frequencies depend on the row's length: which they are, and how a pass pins them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""transformers' rope types that look at the longest position of a forward pass; all others are fixed."""


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """The model's rotary embeddings whose frequencies depend on the row's length."""
    return [m for m in model.modules() if LENGTH_DEPENDENT & {kind for kind, _ in _rotations(m)}]


def _rotations(module: nn.Module) -> list[tuple[str, Any]]:
    """Type and parameters of each of a rotary embedding's rotations: one, or one a layer type (Gemma 3)."""
    kinds: Any = getattr(module, "rope_type", None)
    if kinds is None:
        return []
    parameters: Any = getattr(module.config, "rope_parameters", None)
    if isinstance(kinds, dict):
        return [(kind, parameters[layer_type]) for layer_type, kind in sorted(kinds.items())]
    return [(kinds, parameters)]


def frequencies_key(rotaries: list[nn.Module], row_tokens: int) -> Hashable:
    """Equal for two row lengths exactly if all frequencies are.

    Dynamic NTK scales the base with the length beyond the original maximum; LongRoPE switches once, past the original
    maximum (transformers' `modeling_rope_utils`).
    """
    keys: list[Hashable] = []
    for module in rotaries:
        config: Any = module.config
        for kind, parameters in _rotations(module):
            if kind == "dynamic":
                keys.append(max(row_tokens, int(config.max_position_embeddings)))
            elif kind == "longrope":
                keys.append(row_tokens > int(parameters["original_max_position_embeddings"]))
    return tuple(keys)


@contextmanager
def pinned(rotaries: list[nn.Module], row_tokens: int | None) -> Iterator[None]:
    """Within it the rotary embeddings compute as in a row of `row_tokens` tokens, whatever positions a pass has.

    A pass sees a part of the row only. One more position, the row's last, rides along and is cut off again.
    """
    with ExitStack() as hooks:
        if row_tokens is not None:
            for module in rotaries:
                hooks.callback(module.register_forward_pre_hook(_longest_first(row_tokens), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(_cut_last).remove)
        yield


def _longest_first(row_tokens: int) -> Any:
    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        by_name = "position_ids" in kwargs
        positions: Tensor = kwargs["position_ids"] if by_name else args[1]
        hidden: Tensor = args[0] if args else kwargs["x"]
        kinds: Any = module.rope_type
        layer_type = (kwargs["layer_type"] if "layer_type" in kwargs else args[2],) if isinstance(kinds, dict) else ()
        if (kinds[layer_type[0]] if layer_type else kinds) == "dynamic":
            # Dynamic NTK keeps the frequencies of the longest row it ever saw, until a short row resets it.
            type(module).forward(module, hidden[:, :1], torch.zeros_like(positions[..., :1]), *layer_type)
        positions = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), row_tokens - 1)], dim=-1)
        if by_name:
            return args, {**kwargs, "position_ids": positions}
        return (args[0], positions, *args[2:]), kwargs

    return hook


def _cut_last(module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(part[:, :-1] for part in output)
