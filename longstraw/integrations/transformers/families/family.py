"""What a family file says of its models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.passes import ForwardPass


def index_beside(mixer: nn.Module) -> int:
    """The number of a mixer beside its layer's attention: below 0, where no layer has one."""
    return -1 - int(mixer.layer_idx)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A kind of attention whose state and gradient the runtime carries exactly.

    Attributes:
        name: for messages.
        attention_classes: names of the transformers classes of its attention modules.
        refuse: given an attention module and the model's text config, why it cannot be carried, or None.
        spec: given an attention module (its weights are not looked at), the model's text config and the activations'
            dtype, what the layer keeps.
        head_softcap_key: the text config's key of c, where the model puts c * tanh(logit / c) behind its LM head.
        head_divisor_key: the text config's key of d, where the model divides its head's logits by d.
        head_multiplier: the attribute, of the model below the head, that the head's logits are multiplied with.
        casts_logits: whether the model casts its head's logits to float32.
        beside: whether its modules run beside an attention in the same layer, and before it. What they keep goes by
            `index_beside` instead of the layer's number.
        rowwise_classes: names of the transformers classes that stand in a mixer's place in some of the models' layers
            and look at one token alone: an MLP, experts.
        router_classes: names of the transformers classes of its models' routers of experts, where transformers has an
            auxiliary loss of theirs. They return logits [S, N], the chosen experts' weights [S, k], their numbers
            [S, k].
        exchange: given an attention module and a pass, the forward that the module runs in that pass; None for modules
            that call transformers' attention interface with what the runtime carries.
    """

    name: str
    attention_classes: frozenset[str]
    refuse: Callable[[nn.Module, Any], str | None]
    spec: Callable[[nn.Module, Any, torch.dtype], LayerSpec]
    head_softcap_key: str | None = None
    head_divisor_key: str | None = None
    head_multiplier: str | None = None
    casts_logits: bool = False
    beside: bool = False
    rowwise_classes: frozenset[str] = frozenset()
    router_classes: frozenset[str] = frozenset()
    exchange: Callable[[nn.Module, ForwardPass], Callable[..., Any]] | None = None
