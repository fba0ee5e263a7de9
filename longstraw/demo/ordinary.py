"""The step that people take today: the prompt repeated for each response, one batch, checkpointing on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def ordinary_logprobs(
    model: Any, prompt_ids: Tensor, responses: Sequence[Tensor], *, temperature: float
) -> list[Tensor]:
    """Log-probs of each response's tokens, float32 [R_i] with graph, from one right-padded batch [G, P + R].

    Logits are computed for response positions only, as trainers do; the whole prompt's would not fit.
    """
    longest = max(len(response) for response in responses)
    rows_GT = torch.stack([torch.nn.functional.pad(r, (0, longest - len(r))) for r in responses])
    ids_GT = torch.cat([prompt_ids.expand(len(responses), -1), rows_GT], dim=1)
    lengths_G1 = torch.tensor([[len(prompt_ids) + len(r)] for r in responses], device=ids_GT.device)
    mask_GT = (torch.arange(ids_GT.shape[1], device=ids_GT.device) < lengths_G1).long()
    # Position P - 1 predicts the first response token; the last token predicts nothing.
    output = model(ids_GT, attention_mask=mask_GT, use_cache=False, logits_to_keep=longest + 1)
    logits_GRV = output.logits[:, :-1].float() / temperature
    logprobs_GR = torch.log_softmax(logits_GRV, dim=-1).gather(-1, rows_GT[..., None])[..., 0]
    return [row[: len(response)] for row, response in zip(logprobs_GR, responses, strict=True)]


def ordinary_step(
    model: Any,
    prompt_ids: Tensor,
    responses: Sequence[Tensor],
    loss: Callable[[list[Tensor]], Tensor],
    *,
    temperature: float,
) -> None:
    """Add the gradient of `loss(log-probs)` to `.grad` the ordinary way, with gradient checkpointing on."""
    was_training = model.training
    # transformers checkpoints in training mode only.
    model.train()
    # One name within transformers 5, another in 6.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    kwargs = {f"{kind}_checkpointing_kwargs": {"use_reentrant": False}}
    getattr(model, f"{kind}_checkpointing_enable")(**kwargs)
    try:
        loss(ordinary_logprobs(model, prompt_ids, responses, temperature=temperature)).backward()
    finally:
        getattr(model, f"{kind}_checkpointing_disable")()
        model.train(was_training)
