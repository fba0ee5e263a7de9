"""Replaying: lanes made as the user's loop asks for them, each with its backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longstraw.errors import TransactionStateError
from longstraw.runtime.adapter import ModelProfile
from longstraw.runtime.captured import CapturedPrompt, without_frames
from longstraw.runtime.lane import Lane, LaneState, reaches_parameter
from longstraw.runtime.ledger import GradientLedger
from longstraw.runtime.lockstep import Kind, Phase
from longstraw.runtime.memory import is_out_of_memory
from longstraw.runtime.passes import ForwardPass, Purpose
from longstraw.runtime.repetition import Repetition
from longstraw.runtime.report import DriftMeter, Report
from longstraw.runtime.router_loss import GroupLoss, RouterLoss
from longstraw.runtime.sizing import plan_lanes
from longstraw.runtime.transaction_state import Lifecycle, TransactionState

if TYPE_CHECKING:
    from longstraw.runtime.engine import Engine


class Replay:
    """The lanes of one capture, of one `replay` call or more. At most one of them is live.

    Args:
        ledger: where parameters' gradients go.
        routers: what the routers' auxiliary loss asks for, or None.
        life: of the transaction: an error that leaves part of the gradient breaks it.
        check_weights: raises, in the name of a call, if the weights are not those of the capture.

    Attributes:
        repetition: runs the lanes again after memory ran out.
        aux_value: the routers' auxiliary loss of the group that was replayed last, a scalar; None without one.
    """

    def __init__(
        self,
        engine: Engine,
        captured: CapturedPrompt,
        profile: ModelProfile,
        *,
        ledger: GradientLedger,
        routers: RouterLoss | None,
        life: Lifecycle,
        report: Report,
        drift: DriftMeter,
        check_weights: Callable[[str], None],
    ) -> None:
        self._engine, self._captured, self._profile = engine, captured, profile
        self._ledger, self._routers, self._life = ledger, routers, life
        self._report, self._drift, self._check_weights = report, drift, check_weights
        self.repetition = Repetition(captured, ledger, report)
        self.aux_value: Tensor | None = None
        self._lane: Lane | None = None
        self._phase: Phase | None = None
        self._unasked = 0
        self._dropped = False

    # For the transaction

    def lanes(self, branches: list[Tensor]) -> Iterator[Lane]:
        """Lanes of `branches`, int64 [R_i] each, made one by one."""
        self._report.left_out += len(branches)
        self._unasked += 1
        return self._lanes(branches)

    def settle(self) -> None:
        """No more lanes of the last loop; passes that other ranks still make of it are empty here.

        Raises TransactionStateError if its last lane was left without a gradient.
        """
        self._settle_lane()
        self._end_phase()

    def require_asked(self, call: str) -> None:
        """Raises TransactionStateError if a `replay` was called for nothing: its gradient would be missed."""
        if self._unasked:
            raise TransactionStateError(
                f"{call}: replay was called and none of its lanes was asked for; loop over what it returns"
            )

    def drop(self) -> None:
        """The transaction has failed: free the lane that is live, and make no more."""
        self._dropped = True
        self._phase = None
        if self._lane is not None:
            self._lane.close(LaneState.CLOSED)
            self._lane = None

    # Forward

    def _lanes(self, branches: list[Tensor]) -> Iterator[Lane]:
        self._require("replay", TransactionState.CAPTURED, TransactionState.REPLAYING)
        self._life.move(TransactionState.REPLAYING)
        self._unasked -= 1
        # An error in here ends the loop, and the branches that it had not come to are missing then.
        with self._life.whole_or_broken("replay"):
            rows, widths = self._captured.rows(branches), self._captured.widths
            size = widths.lane(rows)
            pending = deque(plan_lanes(rows, size.tokens))
            group = None if self._routers is None else self._routers.group(branches)
            if len(pending) > 1:
                self._count(branches)
            self._report.lane_tokens = size.tokens
        while pending:
            self._require("replay", TransactionState.REPLAYING)
            with self._life.whole_or_broken("replay"):
                # Of another `replay`, whose lanes are asked for in turn with these.
                self._settle_lane()
                pending = widths.keep_to_width(pending, rows)
                failure = self._try_lane(pending[0], len(pending), branches, group, size.checkpoint)
                indices = pending.popleft()
                if failure is not None:
                    checkpoint = self._report.checkpoint_replay
                    pending = widths.narrow(indices, pending, rows, failure, checkpoint=checkpoint)
                    self._count(branches)
                    continue
            assert self._lane is not None
            yield self._lane
            with self._life.whole_or_broken("replay"):
                self._settle_lane()
        self._end_phase()

    def _try_lane(
        self, indices: tuple[int, ...], left: int, branches: list[Tensor], group: GroupLoss | None, checkpoint: bool
    ) -> Exception | None:
        """Make the lane of these branches, one of `left` to come. Returns an out-of-memory error instead of raising
        it."""
        try:
            with self._report.phase("replay", self._engine.device):
                if self._phase is None:
                    # The first lane; or another call made its passes in between, which ended the phase.
                    self._phase = self._engine.lockstep.phase(Kind.REPLAY, left, checkpoint=checkpoint)
                checkpoint = self._phase.checkpoint or self._captured.widths.kept.checkpoint
                self._report.checkpoint_replay = checkpoint
                with self._phase.forward():
                    self._lane = self._open_lane(indices, branches, group, checkpoint)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return without_frames(error)
        return None

    def _count(self, branches: list[Tensor]) -> None:
        """The auxiliary loss asks how all lanes' tokens are routed before the first backward. Scoring has told it; else
        a pass without a graph, or log-probs, does."""
        if self._routers is None:
            return
        self._check_weights("replay")
        if unknown := self._routers.uncounted(branches):
            with self._report.phase("count", self._engine.device):
                self._captured.count(unknown)

    def _open_lane(
        self, indices: tuple[int, ...], branches: list[Tensor], group: GroupLoss | None, checkpoint: bool
    ) -> Lane:
        self._check_weights("replay")
        chosen = [branches[i] for i in indices]
        lengths = [len(branch) for branch in chosen]

        def backward(lane: Lane, loss: Tensor) -> None:
            self._backward(lane, loss, chosen, group, checkpoint)

        packed, forward = self._captured.forward_lane(Purpose.REPLAY, chosen, checkpoint)
        try:
            share: Tensor | str = self._profile.no_aux_loss or ""
            if group is not None and self._routers is not None and forward.routers is not None:
                self._routers.counted(chosen, forward.routers)
                share = group.share(chosen, forward.routers)
            lane = Lane(
                indices,
                lengths,
                packed,
                forward,
                backward,
                on_skip=self._skip,
                entropy=self._engine.config.replay.entropy,
                aux_loss=share,
            )
            for branch, logprobs in zip(chosen, packed.detach()[:, 0].split(lengths), strict=True):
                self._drift.replayed(branch, logprobs)
        except BaseException as error:
            forward.__exit__(type(error), error, error.__traceback__)
            raise
        self._report.lanes += 1
        self._report.branches += len(indices)
        self._report.left_out -= len(indices)
        self._report.response_tokens += sum(lengths)
        return lane

    # Backward

    def _backward(
        self, lane: Lane, loss: Tensor, branches: list[Tensor], group: GroupLoss | None, checkpoint: bool
    ) -> None:
        self._require("lane.backward", TransactionState.REPLAYING)
        self._check_weights("lane.backward")
        lane.check(loss)
        sharding = self._engine.sharding
        self._engine.begin_ledger(self._ledger)
        if sharding.lockstep and reaches_parameter(loss, {p for _, p in sharding.parameters()}):
            raise TransactionStateError(
                f"lane.backward: the loss reaches parameters directly, beside lane.logprobs; under {sharding.name} "
                "only a shard of them is there. Add such a term to the optimizer, as weight decay is"
            )
        with self._report.phase("backward", self._engine.device):
            upstream = self._upstream(lane, sharding.scale_loss(loss))
            with self._life.whole_or_broken("lane.backward"):
                self._send(lane, upstream, branches, group, checkpoint)

    def _upstream(self, lane: Lane, loss: Tensor) -> Tensor:
        """The user's part of the graph, which may reach parameters beside the lane's log-probs."""
        before = self._ledger.arrived
        try:
            upstream = lane.upstream(loss)
        except BaseException as error:
            if self._ledger.arrived != before:
                self._life.break_off("lane.backward", error)
            raise
        if self._ledger.arrived != before:
            self.repetition.possible = False
        return upstream

    def _send(
        self, lane: Lane, upstream: Tensor, branches: list[Tensor], group: GroupLoss | None, checkpoint: bool
    ) -> None:
        """The gradient at a lane's log-probs, through the model."""
        worth_N = None
        if group is not None and lane.forward.routers is not None:
            worth_N = group.backward(lane.aux_scale, lane.indices, lane.forward.routers, exact=self._captured.exact)
            lane.forward.routers.send([worth_N] * len(branches))
            self._report.aux_loss_scale, self._report.aux_loss_prompt_weight = group.scale, group.branches
            self.aux_value = group.value
        self.repetition.record(
            branches, upstream.split([len(branch) for branch in branches]), worth_N, checkpoint=checkpoint
        )
        assert self._phase is not None
        try:
            with self._phase.backward():
                failure = self._captured.backward_lane(lane.forward, lane.take_packed(), upstream)
        except BaseException:
            lane.close(LaneState.FAILED)
            raise
        # Its graph makes room for the lanes that are run again.
        lane.close(LaneState.DONE if failure is None else LaneState.FAILED)
        self._report.add_traffic("backward", lane.forward.traffic)
        self._lane = None
        if failure is not None:
            self.repetition.run_after_lane(failure)
            lane.state = LaneState.DONE

    def _skip(self, packed: Tensor, forward: ForwardPass) -> None:
        """A lane is left out. In lockstep its backward still runs, with a gradient of zero."""
        if self._engine.lockstep.collective and self._phase is not None:
            with self._phase.backward(), self._engine.empty_ledger(), self._engine.adapter.active(forward):
                self._engine.sharding.backward(packed, torch.zeros_like(packed))
            # Zeros on gradient pages are no gradient: the next lane overwrites them, and without one nothing is swept.

    # Shared

    def _require(self, call: str, *states: TransactionState) -> None:
        if self._dropped:
            raise TransactionStateError(
                f"{call}: this lane is of an attempt at the transaction that failed; call replay again"
            )
        self._life.require(call, *states)

    def _settle_lane(self) -> None:
        if self._lane is not None:
            self._lane.settle()
            self._lane = None

    def _end_phase(self) -> None:
        if self._phase is not None:
            phase, self._phase = self._phase, None
            phase.finish()
