"""One try at a step: its groups through real transactions, in the loop that a user would write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longstraw.api import Runtime
from longstraw.errors import CapacityError, PageLostError, RankFailedError
from longstraw.stress.faults import Armed, UserError
from longstraw.stress.result import StressResult
from longstraw.stress.workload import Group

CLEAR = (CapacityError, PageLostError, RankFailedError, UserError)
"""What a fault may end a step with; which fault with which is judged later. Anything else is a finding."""


def attempt(
    runtime: Runtime, groups: Sequence[Group], armed: Armed | None, result: StressResult
) -> BaseException | None:
    """Run a step; the clear error that ended it, or None. Other errors are findings, and raised.

    `result` counts the transactions of a step that ended well.
    """
    reports = []
    try:
        with runtime.accumulate():
            for group in groups:
                with runtime.transaction(group.prompt) as txn:
                    txn.score(group.responses)
                    replay(txn, group, armed)
                reports.append(txn.report)
    except CLEAR as error:
        # Its frames would keep the step's tensors alive.
        return error.with_traceback(None)
    budgets = {pager.name: pager.budget for pager in runtime._engine.store.pagers}
    for report in reports:
        result.add(report, budgets)
    return None


def replay(txn: Any, group: Group, armed: Armed | None = None) -> None:
    """The loop over a transaction's lanes."""
    for lane in txn.replay(group.responses):
        losses: list[Tensor] = []
        for index, logprobs_R in zip(lane.indices, lane.logprobs, strict=True):
            seen_R = logprobs_R if armed is None else armed.in_loss(logprobs_R)
            losses.append(group.loss(index, seen_R))
        lane.backward(torch.stack(losses).sum())
    if armed is not None:
        armed.after_lanes()
