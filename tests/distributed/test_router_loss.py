"""The routers' auxiliary loss over ranks: each replica's own group, averaged as gradients are."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from longstraw import Runtime
from tests.distributed.pool import Pool
from tests.distributed.steps import Held, build_kind, groups_of, relative
from tests.distributed.wraps import ddp, fsdp2, zero
from tests.families.router_loss import asked_for, plain_aux_step, replay_aux
from tests.parity.models import SMALL

UNEQUAL = (((61, (7, 1, 12, 5)), (30, (3, 9))), ((83, (20, 4, 2)),))
"""On rank 0 two groups of several lanes; on rank 1 one."""
ONE_LANE = (((61, (7, 1, 12, 5)), (30, (3, 9))), ((83, (5,)),))
"""Rank 1 has nothing to count."""
ONE_IDLE = ((), ((61, (7, 1, 12, 5)),))


def aux_step(
    rank: int, world: int, wrap: Any, shapes: Any, scored: bool, config: dict[str, Any], **options: Any
) -> dict[str, float]:
    """Relative errors of every gradient in one step, by name."""
    model = asked_for(build_kind("qwen3_moe"))
    reference = copy.deepcopy(model)
    held: Held = wrap(model, **options)
    with Runtime(held.model, SMALL | config) as runtime:
        with runtime.accumulate():
            for group in groups_of(shapes, 0)[rank]:
                with runtime.transaction(group.prompt) as txn:
                    # One rank scores, and the other counts.
                    if scored and rank == 0:
                        txn.score(group.responses)
                    replay_aux(txn, group)
        found = held.gradients()
    for mine in groups_of(shapes, 0):
        for group in mine:
            plain_aux_step(reference, group)
    for parameter in reference.parameters():
        if parameter.grad is not None:
            parameter.grad /= len(shapes)
    return relative(found, {n: p.grad for n, p in reference.named_parameters()})


def check(found: list[dict[str, float]]) -> None:
    for errors in found:
        assert max(errors.values()) <= 1e-5, sorted(errors.items(), key=lambda item: -item[1])[:5]


SHAPES = pytest.mark.parametrize("shapes", [UNEQUAL, ONE_LANE, ONE_IDLE], ids=["unequal", "one lane", "one idle"])
SCORED = pytest.mark.parametrize("scored", [False, True], ids=["counted", "one rank scored"])
CHECKPOINTED = {"replay": {"checkpoint": True, "lane_tokens": 14}}


@SHAPES
@SCORED
@pytest.mark.parametrize("reduce", ["deferred", "each_pass"])
def test_fsdp2(two: Pool, shapes: Any, scored: bool, reduce: str) -> None:
    check(two.run(aux_step, fsdp2, shapes, scored, {"gradient": {"reduce": reduce}}))


def test_fsdp2_with_checkpointing(two: Pool) -> None:
    check(two.run(aux_step, fsdp2, UNEQUAL, False, CHECKPOINTED, nested=True))


def test_ddp(two: Pool) -> None:
    check(two.run(aux_step, ddp, UNEQUAL, True, {}))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(two: Pool, stage: int) -> None:
    check(two.run(aux_step, zero, ONE_LANE, False, CHECKPOINTED, stage=stage))
