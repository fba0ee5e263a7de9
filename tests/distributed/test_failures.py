"""A rank that fails makes all fail, promptly and with its error; nothing is left behind, and the next step works."""

from __future__ import annotations

import functools
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longstraw import Runtime
from longstraw.errors import RankFailedError, TransactionStateError
from tests.distributed.pool import Pool
from tests.distributed.steps import (
    UNEQUAL,
    build_kind,
    groups_of,
    paged_groups,
    plain_training,
    relative,
)
from tests.distributed.wraps import ddp, fsdp2, zero
from tests.parity.models import SMALL, replay_group

WRAPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": (ddp, {}),
    "fsdp2": (fsdp2, {}),
    "each_pass": (fsdp2, {"gradient": {"reduce": "each_pass"}}),
    "zero-1": (functools.partial(zero, stage=1), {}),
    "zero-2": (functools.partial(zero, stage=2), {}),
    "zero-3": (functools.partial(zero, stage=3), {}),
}
BY_WRAP = pytest.mark.parametrize("wrap", WRAPS)


MANY = 100
"""Prompts that take longer than a rank may go on after another has failed."""


class Mistake(Exception):
    """The user's own."""


def fail_then_step(rank: int, world: int, wrap: str, where: str) -> dict[str, Any]:
    """Rank 1 fails; then both make the step. Returns what was raised, how late, and the errors of the step."""
    function, config = WRAPS[wrap]
    held = function(build_kind("qwen3"))
    reference = build_kind("qwen3")
    runtime = Runtime(held.model, SMALL | config)
    mine = groups_of(UNEQUAL, 0)[rank]
    entry: dict[str, Any] = {}
    if not wrap.startswith("zero"):
        for parameter in held.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        entry = held.gradients()
    dist.barrier()
    start, raised = time.monotonic(), ""
    try:
        with runtime.accumulate():
            if where == "between transactions" and rank == 1:
                raise Mistake("of rank 1")
            for group in mine:
                with runtime.transaction(group.prompt) as txn:
                    txn.score(group.responses)
                    for lane in txn.replay(group.responses):
                        if where == "loss" and rank == 1 and 0 in lane.indices:
                            raise Mistake("of rank 1")
                        lane.backward(torch.stack([x.sum() for x in lane.logprobs]).sum())
                if where == "last line" and rank == 1:
                    raise Mistake("of rank 1")
    except (Mistake, RankFailedError) as error:
        raised = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    if entry:
        after = held.gradients()
        unchanged = all(torch.equal(after[name], entry[name]) for name in entry)  # type: ignore[arg-type]
    else:
        unchanged = all(p.grad is None for p in held.model.parameters())
    pages = runtime._engine.store.pages_in_use()
    for parameter in held.model.parameters():
        parameter.grad = None
    paged_groups(runtime, mine)
    found = held.gradients()
    want, _ = plain_training(reference, UNEQUAL, 1)
    return {
        "raised": raised,
        "seconds": seconds,
        "unchanged": unchanged,
        "pages": pages,
        "error": max(relative(found, want).values()),
    }


@pytest.mark.parametrize("where", ["loss", "between transactions", "last line"])
@BY_WRAP
def test_a_rank_fails(two: Pool, wrap: str, where: str) -> None:
    first, second = two.run(fail_then_step, wrap, where)
    assert second["raised"] == "Mistake: of rank 1"
    assert first["raised"].startswith("RankFailedError: rank 1 failed")
    assert "Mistake: of rank 1" in first["raised"]
    for one in (first, second):
        assert one["seconds"] < 5
        assert one["unchanged"], "a gradient was touched"
        assert one["pages"] == 0
        assert one["error"] <= 1e-5


def work_on(rank: int, world: int, wrap: str) -> tuple[int, str]:
    """Rank 1 fails at once, while rank 0 has prompts enough for half a minute. Returns how many it began."""
    function, config = WRAPS[wrap]
    held = function(build_kind("qwen3"))
    runtime = Runtime(held.model, SMALL | config)
    group = groups_of(UNEQUAL, 0)[rank][0]
    begun = 0
    dist.barrier()
    try:
        with runtime.accumulate():
            if rank == 1:
                raise Mistake("of rank 1")
            for _ in range(MANY):
                begun += 1
                with runtime.transaction(group.prompt) as txn:
                    replay_group(txn, group)
                time.sleep(0.3)
    except (Mistake, RankFailedError) as error:
        return begun, f"{type(error).__name__}: {error}"
    return begun, "nothing was raised"


@pytest.mark.parametrize("wrap", ["ddp", "zero-1", "zero-2"])
def test_ranks_without_collectives_hear_of_a_failure_before_their_work_is_done(two: Pool, wrap: str) -> None:
    (begun, raised), _ = two.run(work_on, wrap)
    assert raised.startswith("RankFailedError: rank 1 failed")
    assert begun < MANY


def swallow(rank: int, world: int, wrap: str) -> tuple[str, str]:
    """Rank 1 swallows its error within `accumulate()` and goes on."""
    function, config = WRAPS[wrap]
    held = function(build_kind("qwen3"))
    runtime = Runtime(held.model, SMALL | config)
    group = groups_of(UNEQUAL, 0)[rank][0]
    inner = outer = ""
    try:
        with runtime.accumulate():
            if rank == 1:
                try:
                    with runtime.transaction(group.prompt):
                        raise Mistake("swallowed")
                except Mistake:
                    pass
            try:
                with runtime.transaction(group.prompt) as txn:
                    replay_group(txn, group)
            except TransactionStateError as error:
                inner = str(error)
    except RankFailedError as error:
        outer = str(error)
    assert all(p.grad is None for p in held.model.parameters())
    return inner, outer


@BY_WRAP
def test_an_error_that_is_swallowed_still_fails_the_step(two: Pool, wrap: str) -> None:
    (_, first), (inner, second) = two.run(swallow, wrap)
    assert "swallowed" in first
    assert "swallowed" in second
    assert "leave accumulate()" in inner


def fail_within_a_pass(rank: int, world: int, log: str) -> str:
    """Rank 1's second layer fails; rank 0 is left in a collective, and logs why."""
    logging.getLogger("longstraw").addHandler(logging.FileHandler(f"{log}.{rank}"))
    model = build_kind("qwen3")
    runtime = Runtime(fsdp2(model).model, SMALL)
    group = groups_of(UNEQUAL, 0)[rank][0]
    with runtime.accumulate(), runtime.transaction(group.prompt) as txn:
        if rank == 1:

            def broken(*args: Any, **kwargs: Any) -> None:
                raise Mistake("within a pass")

            model.model.layers[1].mlp.forward = broken
        replay_group(txn, group)
    return "not reached"


def test_a_rank_that_fails_within_a_pass_shows_its_error_everywhere(tmp_path: Path) -> None:
    pool = Pool(2)
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"no answer from ranks \[0\](?s:.*)Mistake: within a pass"):
        pool.run(fail_within_a_pass, str(tmp_path / "log"), timeout=60)
    assert time.monotonic() - start < 60
    text = (tmp_path / "log.0").read_text()
    assert "rank 1 failed within a pass, and rank 0 waits for it" in text
    assert "Mistake: within a pass" in text
