"""Running a transaction's lanes again, narrower, after a backward pass ran out of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw.errors import CapacityError
from longstraw.runtime.captured import CapturedPrompt, without_frames
from longstraw.runtime.ledger import GradientLedger
from longstraw.runtime.memory import is_out_of_memory
from longstraw.runtime.passes import Purpose
from longstraw.runtime.report import Report


class Repetition:
    """Each replayed branch with the gradient of the loss at its log-probs, and at its routers' probabilities: enough to
    run it again without the user.

    A backward pass that runs out of memory has added part of its gradient. So all gradient of the transaction is
    forgotten, and every branch is run again.

    Attributes:
        possible: False once a loss reached parameters beside the log-probs, whose gradient would be lost.
    """

    def __init__(self, captured: CapturedPrompt, ledger: GradientLedger, report: Report) -> None:
        self.possible = True
        self._captured, self._ledger, self._report = captured, ledger, report
        self._replayed: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._last = 0

    def record(self, branches: Sequence[Tensor], upstream: Sequence[Tensor], worth_N: Tensor | None) -> None:
        """Note a lane's branches, int64 [R_i], the gradients [R_i, 2] at their log-probs and entropies, and what their
        routers' probabilities are worth, [N] or nothing."""
        self._last = len(branches)
        self._replayed += ((*pair, worth_N) for pair in zip(branches, upstream, strict=True))

    def run(self, failure: Exception, *, checkpoint: bool | None = None) -> None:
        """Run every branch again, narrower until it fits.

        Args:
            failure: of memory; in the backward of the lane that was noted last, or in a sweep.
            checkpoint: whether that lane was checkpointed; None if it was no lane's.

        Raises:
            CapacityError: a lane of a single branch does not fit, or the lanes cannot be run again.
        """
        self._captured.refuse_in_lockstep(failure)
        branches = [branch for branch, _, _ in self._replayed]
        if checkpoint is not None:
            last = tuple(range(len(branches) - self._last, len(branches)))
            self._captured.narrow(last, (), branches, failure, checkpoint=checkpoint)
        if not self.possible:
            # Whoever tries again finds what this failure taught.
            self._captured.hand_on()
            raise CapacityError(
                "out of memory in a backward pass, and the lanes cannot be run again because a loss reached parameters "
                f"directly, beside lane.logprobs; set replay.lane_tokens or capture.chunk_tokens lower. {failure}"
            ) from failure
        while True:
            size = self._captured.lane_size(branches)
            self._ledger.discard()
            self._captured.state.discard_gradients()
            failed = self._run_lanes(self._captured.plan_lanes(branches, size), size.checkpoint)
            if failed is None:
                return
            indices, again = failed
            self._captured.narrow(indices, (), branches, again, checkpoint=size.checkpoint)

    def _run_lanes(self, lanes: list[tuple[int, ...]], checkpoint: bool) -> tuple[tuple[int, ...], Exception] | None:
        """The lane that ran out of memory, and the error."""
        for indices in lanes:
            branches = [self._replayed[i][0] for i in indices]
            upstream = torch.cat([self._replayed[i][1] for i in indices])
            try:
                packed, forward = self._captured.forward_lane(Purpose.REPLAY, branches, checkpoint)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return indices, without_frames(error)
            try:
                if forward.routers is not None:
                    forward.routers.send([self._replayed[i][2] for i in indices])
                failure = self._captured.backward_lane(forward, packed, upstream)
            finally:
                forward.__exit__(None, None, None)
            self._report.add_traffic("backward", forward.traffic)
            if failure is not None:
                return indices, failure
        return None
