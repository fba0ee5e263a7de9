"""The ordinary step with the routers' auxiliary loss, by transformers' own function on one batch of unpadded rows."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw import Report, Runtime
from tests.parity.models import Group, assert_idle, assert_parity, lane_loss, make_group, settings

GROUP = make_group()
ONE_LANE = settings(replay={"lane_tokens": 100})
FLOAT32_SHARES = 1e-7
"""Where all else is float64: transformers divides its counts in float32."""

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


def check(
    model: Any,
    config: Mapping[str, Any] | None = None,
    *,
    group: Group = GROUP,
    score: bool = False,
    tolerance: float = 1e-6,
) -> Report:
    """One step with the auxiliary loss against plain autograd."""
    reference = copy.deepcopy(model)
    expected = plain_aux_step(reference, group)
    with Runtime(model, settings() if config is None else config) as runtime:
        with runtime.transaction(group.prompt) as txn:
            old = txn.score(group.responses) if score else None
            found = replay_aux(txn, group)
        assert_idle(runtime)
    report: Report = txn.report
    assert ("count" in report.seconds) == (old is None and report.lanes > 1)
    assert found == pytest.approx(expected, rel=tolerance)
    assert report.aux_loss == pytest.approx(expected, rel=tolerance)
    assert (report.aux_loss_scale, report.aux_loss_prompt_weight) == (COEFFICIENT, len(group.responses))
    assert_parity(model, reference, tolerance)
    assert model.config.get_text_config().output_router_logits
    return report
