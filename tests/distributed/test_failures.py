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
from longstraw.errors import CapacityError, RankFailedError, TransactionStateError
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
    assert "rank 1 failed within a pass or a reduction, and rank 0 waits for it" in text
    assert "Mistake: within a pass" in text


def fail_in_the_reduction(rank: int, world: int, wrap: str, log: str) -> str:
    """Rank 1 fails after the step's end was agreed; rank 0 is left in the reduction, and logs why."""
    logging.getLogger("longstraw").addHandler(logging.FileHandler(f"{log}.{rank}"))
    function, config = WRAPS[wrap]
    runtime = Runtime(function(build_kind("qwen3")).model, SMALL | config)
    if rank == 1:

        def broken(sums: Any) -> None:
            raise Mistake("in a reduction")

        runtime._engine.sharding.finalize = broken  # type: ignore[method-assign]
    paged_groups(runtime, groups_of(UNEQUAL, 0)[rank])
    return "not reached"


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "zero-2"])
def test_a_rank_that_fails_in_the_reduction_shows_its_error_everywhere(wrap: str, tmp_path: Path) -> None:
    pool = Pool(2)
    with pytest.raises(AssertionError, match=r"no answer from ranks \[0\](?s:.*)Mistake: in a reduction"):
        pool.run(fail_in_the_reduction, wrap, str(tmp_path / "log"), timeout=60)
    text = (tmp_path / "log.0").read_text()
    assert "rank 1 failed within a pass or a reduction, and rank 0 waits for it" in text
    assert "Mistake: in a reduction" in text


def fail_behind_the_reduction(rank: int, world: int, wrap: str) -> tuple[str, str]:
    """Rank 1 fails when rank 0 has its gradient already. What each says to that, and to the next step."""
    function, config = WRAPS[wrap]
    runtime = Runtime(function(build_kind("qwen3")).model, SMALL | config)
    groups = groups_of(UNEQUAL, 0)[rank]
    if rank == 1:
        finalize = runtime._engine.sharding.finalize

        def broken(sums: Any) -> None:
            finalize(sums)
            raise Mistake("behind a reduction")

        runtime._engine.sharding.finalize = broken  # type: ignore[method-assign]
    told = ["", ""]
    for step in range(2):
        try:
            paged_groups(runtime, groups)
        except (Mistake, TransactionStateError) as error:
            told[step] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return told[0], told[1]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "zero-2"])
def test_no_step_follows_a_reduction_that_a_rank_failed_in(wrap: str) -> None:
    # What breaks ranks stays on their board: not for the ranks that other tests share.
    (well, refused), (failed, refused_too) = Pool(2).run(fail_behind_the_reduction, wrap)
    assert (well, failed) == ("", "Mistake: behind a reduction")
    for told in (refused, refused_too):
        assert told.startswith("TransactionStateError: a rank failed within a pass or a reduction")
        assert "Mistake: behind a reduction" in told
        assert "start the processes again" in told


def begin_badly(rank: int, world: int, wrap: str, what: str) -> tuple[str, float]:
    """Rank 1 cannot begin its only transaction, outside `accumulate()`; then both make a step. What was raised, and
    the error of that step."""
    function, config = WRAPS[wrap]
    held, reference = function(build_kind("qwen3")), build_kind("qwen3")
    runtime = Runtime(held.model, SMALL | config)
    mine = groups_of(UNEQUAL, 0)[rank]
    group, raised = mine[0], ""
    engine = runtime._engine
    reserve = engine.reserve
    if rank == 1 and what == "no room":

        def out_of_memory(owner: str, *args: Any, **kwargs: Any) -> Any:
            if owner.startswith("transaction"):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return reserve(owner, *args, **kwargs)

        engine.reserve = out_of_memory  # type: ignore[method-assign]
    prompt = group.prompt - 10**6 if rank == 1 and what == "prompt" else group.prompt
    try:
        with runtime.transaction(prompt) as txn:
            replay_group(txn, group)
    except (ValueError, CapacityError, RankFailedError) as error:
        raised = f"{type(error).__name__}: {error}"
    engine.reserve = reserve  # type: ignore[method-assign]
    paged_groups(runtime, mine)
    want, _ = plain_training(reference, UNEQUAL, 1)
    return raised, max(relative(held.gradients(), want).values())


BAD_PROMPT, NO_ROOM = ("prompt", "ValueError: prompt_ids"), ("no room", "CapacityError: out of memory")


# Without collectives (ddp) the prompt is looked at before any rank is in a step.
@pytest.mark.parametrize(
    ("wrap", "what", "text"),
    [
        ("ddp", *NO_ROOM),
        ("fsdp2", *BAD_PROMPT),
        ("fsdp2", *NO_ROOM),
        ("zero-3", *BAD_PROMPT),
        ("zero-3", *NO_ROOM),
    ],
)
def test_a_transaction_that_a_rank_cannot_begin(two: Pool, wrap: str, what: str, text: str) -> None:
    (first, error), (second, other) = two.run(begin_badly, wrap, what)
    assert second.startswith(text)
    assert first.startswith("RankFailedError: rank 1 failed")
    assert text in first
    assert max(error, other) <= 1e-5
