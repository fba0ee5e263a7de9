"""The ordinary step with the routers' auxiliary loss, by transformers' own function on one batch of unpadded rows."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tests.parity.models import Group, lane_loss

COEFFICIENT = 3.0
"""So large that the auxiliary loss is a good part of the gradient."""


def asked_for(model: Any) -> Any:
    """The model with transformers' switch set."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.config.get_text_config().output_router_logits = True
    return model


def balance_loss(model: Any, rows: tuple[Tensor, ...]) -> Tensor:
    """transformers' own function on each router's logits [rows, N]."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    loss: Tensor = sys.modules[type(base).__module__].load_balancing_loss_func(  # type: ignore[attr-defined]
        rows, experts, config.num_experts_per_tok
    )
    return loss


def plain_aux_step(model: Any, group: Group, coefficient: float = COEFFICIENT) -> float:
    """Add the step's gradient to `.grad`; all rows share one graph. Returns the auxiliary loss."""
    logits: list[tuple[Tensor, ...]] = []
    losses = []
    for i, response in enumerate(group.responses):
        row = torch.cat([group.prompt, response])
        out = model(input_ids=row[None], use_cache=False, output_router_logits=True)
        logits.append(out.router_logits)
        scores = out.logits[0, len(group.prompt) - 1 : -1]
        log_p = scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(-1)
        losses.append(group.loss(i, log_p.gather(-1, response[:, None])[:, 0], None))
    aux = balance_loss(model, tuple(torch.cat(of_router) for of_router in zip(*logits, strict=True)))
    (torch.stack(losses).sum() + coefficient * aux).backward()  # type: ignore[no-untyped-call]
    return float(aux.detach())


def replay_aux(txn: Any, group: Group, coefficient: float = COEFFICIENT) -> float:
    """Replay a group with the auxiliary loss in each lane's loss. Returns the sum of the lanes' shares."""
    total = 0.0
    for lane in txn.replay(group.responses):
        lane.backward(lane_loss(group, lane) + coefficient * lane.aux_loss)
        total += float(lane.aux_loss.detach())
    return total
