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
from longstraw.runtime.sizing import plan_lanes


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
        self._checkpointed = False

    def record(
        self, branches: Sequence[Tensor], upstream: Sequence[Tensor], worth_N: Tensor | None, *, checkpoint: bool
    ) -> None:
        """Note a lane's branches, int64 [R_i], the gradients [R_i, 2] at their log-probs and entropies, what their
        routers' probabilities are worth, [N] or nothing, and whether it was checkpointed."""
        self._last = len(branches)
        self._checkpointed = checkpoint
        self._replayed += ((*pair, worth_N) for pair in zip(branches, upstream, strict=True))

    def run_after_lane(self, failure: Exception) -> None:
        """Run every branch again, after the backward of the lane that was noted last ran out of memory.

        Raises:
            CapacityError: it cannot be narrowed, or as `require_possible`, or as `run`.
        """
        rows = self._rows
        last = tuple(range(len(rows) - self._last, len(rows)))
        self._captured.widths.narrow(last, (), rows, failure, checkpoint=self._checkpointed)
        self.require_possible("the backward pass of a lane", "replay.lane_tokens", failure)
        self.run()

    def require_possible(self, what: str, setting: str, failure: Exception) -> None:
        """Raises CapacityError if branches cannot be run again, after `what` ran out of memory, and widths were cut."""
        if self.possible:
            return
        # Whoever tries again is to try what this one would have.
        self._captured.widths.hand_on()
        raise CapacityError(
            f"out of memory in {what}, and the lanes cannot be run again because a loss reached parameters directly, "
            f"beside lane.logprobs; enter the transaction again, or set {setting} lower. {failure}"
        ) from failure

    def run(self) -> None:
        """Run every branch again, narrower until it fits.

        Raises:
            CapacityError: a lane of a single branch does not fit.
        """
        rows, widths = self._rows, self._captured.widths
        while True:
            size = widths.lane(rows)
            # There are fewer branches now than the size was first chosen for, and it may not come out wider for that.
            checkpoint = size.checkpoint or self._checkpointed
            self._ledger.discard()
            self._captured.state.discard_gradients()
            failed = self._run_lanes(plan_lanes(rows, size.tokens), checkpoint)
            if failed is None:
                return
            indices, again = failed
            widths.narrow(indices, (), rows, again, checkpoint=checkpoint)

    @property
    def _rows(self) -> list[int]:
        return self._captured.rows([branch for branch, _, _ in self._replayed])

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
