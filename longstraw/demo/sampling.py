"""Samples a group of responses: the prompt is prefilled once and its cache repeated for each response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from longstraw.verify.plain import cache_argument


@torch.no_grad()
def sample_group(
    model: Any,
    prompt_ids: Tensor,
    *,
    group: int,
    max_tokens: int,
    temperature: float,
    eos_token_id: int,
    generator: torch.Generator,
    on_token: Callable[[], None] | None = None,
) -> list[Tensor]:
    """`group` responses to `prompt_ids` (int64 [P]), each int64 [R_i] with 1 <= R_i <= `max_tokens`.

    A response ends with `eos_token_id`, or at `max_tokens` without it. `generator` is on the model's device.
    """
    cache = DynamicCache(config=model.config)
    with_cache = {cache_argument(model): cache, "logits_to_keep": 1}
    logits_1V = model(prompt_ids[None], **with_cache).logits[:, -1]
    cache.batch_repeat_interleave(group)
    logits_GV = logits_1V.expand(group, -1)
    tokens: list[Tensor] = []
    ended_G = torch.zeros(group, dtype=torch.bool, device=prompt_ids.device)
    while True:
        probabilities_GV = torch.softmax(logits_GV.float() / temperature, dim=-1)
        next_G1 = torch.multinomial(probabilities_GV, 1, generator=generator)
        tokens.append(next_G1)
        ended_G |= next_G1[:, 0] == eos_token_id
        if on_token is not None:
            on_token()
        if len(tokens) == max_tokens or bool(ended_G.all()):
            break
        logits_GV = model(next_G1, **with_cache).logits[:, -1]
    return [_until(row_R, eos_token_id) for row_R in torch.cat(tokens, dim=1)]


def _until(row_R: Tensor, eos_token_id: int) -> Tensor:
    ends = (row_R == eos_token_id).nonzero()
    return row_R[: int(ends[0]) + 1].clone() if len(ends) else row_R.clone()
