"""Plain autograd, the oracle of parity: one unpadded prompt+response row at a time, its graph kept whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache


def plain_logprobs(
    model: Any,
    prompt_ids: Tensor,
    response_ids: Tensor,
    *,
    temperature: float = 1.0,
    prompt: Literal["exact", "detached"] = "exact",
) -> Tensor:
    """Log-probs [R] with graph of `response_ids` (int64 [R]) after `prompt_ids` (int64 [P]), in nats.

    float32, or float64 for a float64 model. `exact` is one forward over the row; `detached` runs all but the
    prompt's last token without graph first, as the runtime's mode of that name does.
    """
    if prompt == "exact":
        row_T = torch.cat([prompt_ids, response_ids[:-1]])
        logits_TV = model(row_T[None], use_cache=False).logits[0]
    else:
        cache, name = DynamicCache(config=model.config), cache_argument(model)
        with torch.no_grad():
            model(prompt_ids[None, :-1], **{name: cache})
        row_T = torch.cat([prompt_ids[-1:], response_ids[:-1]])
        logits_TV = model(row_T[None], **{name: cache}).logits[0]
    logits_RV = logits_TV[-len(response_ids) :]
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    return torch.log_softmax(logits_RV.to(wide) / temperature, dim=-1).gather(-1, response_ids[:, None])[:, 0]


def cache_argument(model: nn.Module) -> str:
    """What `model.forward` calls its cache: the name changed within transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def plain_gradients(
    model: Any,
    prompt_ids: Tensor,
    responses: Sequence[Tensor],
    loss: Callable[[int, Tensor], Tensor],
    *,
    temperature: float = 1.0,
    prompt: Literal["exact", "detached"] = "exact",
) -> list[Tensor]:
    """Add to `.grad` the gradient of the sum over rows of `loss(index, log-probs [R_i])`, row by row.

    Returns the log-probs, without graph. `.grad` accumulates in the parameters' own dtype.
    """
    found = []
    for index, response in enumerate(responses):
        logprobs_R = plain_logprobs(model, prompt_ids, response, temperature=temperature, prompt=prompt)
        loss(index, logprobs_R).backward()
        found.append(logprobs_R.detach())
    return found
