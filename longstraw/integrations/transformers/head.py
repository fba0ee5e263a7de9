"""The LM head inside the model's forward: token log-probs instead of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from longstraw.kernels.logprobs import head_logprobs, module_logprobs
from longstraw.runtime.passes import ForwardPass


@dataclass(frozen=True, kw_only=True, slots=True)
class BehindHead:
    """What a model does to its logits: c * tanh(logit / c), or a division."""

    softcap: float | None = None
    divisor: float = 1.0


def is_linear(head: nn.Module, original: Any) -> TypeGuard[nn.Linear]:
    """Whether `original`, the head's forward, is that of a linear layer: one put on the module itself is not."""
    return isinstance(head, nn.Linear) and getattr(original, "__func__", None) is nn.Linear.forward


def head_output(head: nn.Module, original: Any, hidden_1SE: Tensor, forward: ForwardPass, behind: BehindHead) -> Tensor:
    """What the head returns in a pass, in the place of logits.

    Args:
        head: the LM head.
        original: its forward.
        hidden_1SE: [1, S, hidden_size].
        forward: the pass.
        behind: what the model does to its logits, and leaves to this function in a pass.

    Returns:
        [1, S, 2] log-probs and entropies, or [1, S, 1] of the hidden states where only state is wanted.
    """
    request = forward.head
    if request is None:
        return hidden_1SE[..., :1]
    hidden = hidden_1SE[0]
    options: dict[str, Any] = {
        "temperature": request.temperature * behind.divisor,
        "block_tokens": request.block_tokens,
        "entropy": request.entropy,
        "softcap": behind.softcap,
    }
    if is_linear(head, original):
        weight: Tensor = head.weight
        bias: Tensor | None = head.bias
        if torch.is_autocast_enabled(hidden.device.type):
            narrow = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(narrow), weight.to(narrow)
            bias = None if bias is None else bias.to(narrow)
        return head_logprobs(hidden, weight, bias, request.targets_S, **options)[None]
    return module_logprobs(original, hidden, request.targets_S, **options)[None]
