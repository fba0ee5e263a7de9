"""The ordinary step with the routers' auxiliary loss, by transformers' own function on one batch of unpadded rows."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tests.parity.models import Group, lane_loss

COEFFICIENT = 0.7
"""So large that the auxiliary loss is a good part of the gradient."""


def plain_aux_step(model: Any, group: Group, coefficient: float = COEFFICIENT) -> float:
    """Add the step's gradient to `.grad`; all rows share one graph. Returns the auxiliary loss."""
    balance = sys.modules[_causal_lm(model).__module__].load_balancing_loss_func
    config = model.config.get_text_config()
    logits: list[tuple[Tensor, ...]] = []
    losses = []
    for i, response in enumerate(group.responses):
        row = torch.cat([group.prompt, response])
        out = model(input_ids=row[None], use_cache=False, output_router_logits=True)
        logits.append(out.router_logits)
        scores = out.logits[0, len(group.prompt) - 1 : -1]
        log_p = scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(-1)
        losses.append(group.loss(i, log_p.gather(-1, response[:, None])[:, 0], None))
    rows = tuple(torch.cat(of_layer) for of_layer in zip(*logits, strict=True))
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    aux = balance(rows, experts, config.num_experts_per_tok)
    (torch.stack(losses).sum() + coefficient * aux).backward()
    return float(aux.detach())


def _causal_lm(model: Any) -> type:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base)


def replay_aux(txn: Any, group: Group, coefficient: float = COEFFICIENT) -> float:
    """Replay a group with the auxiliary loss in each lane's loss. Returns the sum of the lanes' shares."""
    total = 0.0
    for lane in txn.replay(group.responses):
        lane.backward(lane_loss(group, lane) + coefficient * lane.aux_loss)
        total += float(lane.aux_loss.detach())
    return total
