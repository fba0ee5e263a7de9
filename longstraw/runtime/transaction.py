"""The transaction: one prompt captured once, its responses replayed, its exact gradient swept back, all or nothing."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from longstraw.errors import StaleWeightsError, TransactionStateError
from longstraw.runtime.branches import check_prompt
from longstraw.runtime.captured import CapturedPrompt, without_frames
from longstraw.runtime.lane import Lane, LaneState, reaches_parameter
from longstraw.runtime.lockstep import Kind, Phase
from longstraw.runtime.memory import is_out_of_memory
from longstraw.runtime.modes import refuse_inference_mode
from longstraw.runtime.narrowing import Narrowing
from longstraw.runtime.passes import ForwardPass, Purpose
from longstraw.runtime.repetition import Repetition
from longstraw.runtime.report import DriftMeter, Report
from longstraw.runtime.router_loss import GroupLoss, RouterLoss
from longstraw.runtime.transaction_state import Lifecycle, TransactionState

if TYPE_CHECKING:
    from longstraw.runtime.engine import Engine

_NUMBERS = itertools.count()
_LEFT_FROM = (TransactionState.CAPTURED, TransactionState.REPLAYING, TransactionState.SWEPT)


class Transaction:
    """Made by `Runtime.transaction`; use it as a context manager. Entering captures, leaving sweeps and finalizes.

    Every error inside, the user's own included, frees every page and leaves `.grad` as it was on entry; the same
    object can then be entered again.
    """

    def __init__(
        self,
        engine: Engine,
        prompt_ids: Tensor,
        row_tokens: int | None,
        *,
        exact: bool,
        score_only: bool = False,
        reference: bool = False,
    ) -> None:
        self._engine = engine
        self._exact, self._score_only = exact, score_only
        self._forward_kind = Kind.REFERENCE if reference else Kind.FORWARD
        self._profile = engine.check_profile(reference=reference)
        self._prompt = check_prompt(prompt_ids, self._profile.vocab_size)
        if row_tokens is not None and row_tokens < len(self._prompt):
            raise ValueError(f"row_tokens={row_tokens} is shorter than the prompt's {len(self._prompt)} tokens")
        self._row_tokens = row_tokens
        self._owner = f"transaction-{next(_NUMBERS)}"
        self._life = Lifecycle()
        self.report = Report()
        self._reset()

    def _reset(self) -> None:
        self._ledger = self._engine.open_ledger()
        self._drift = DriftMeter()
        self._aux_value: Tensor | None = None
        self._proven = Narrowing()
        self._lane: Lane | None = None
        self._unasked = 0
        self._phase: Phase | None = None

    @property
    def state(self) -> TransactionState:
        return self._life.state

    # The user's calls

    def __enter__(self) -> Self:
        if self.state is TransactionState.FAILED:
            self._life.move(TransactionState.OPEN)
            self._reset()
        self._life.require("entering the transaction", TransactionState.OPEN)
        self.report = Report(gradient="exact" if self._exact else "detached", prompt_tokens=len(self._prompt))
        self._engine.begin_report(self.report)
        self._engine.enter()
        try:
            with self.report.phase("capture", self._engine.device):
                self._capture()
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
            return
        try:
            self._settle_lane()
            self._require_asked("leaving the transaction")
            self._life.require("leaving the transaction", *_LEFT_FROM)
            self._end_phase()
            if self.state is TransactionState.REPLAYING:
                self.sweep()
            elif self.state is TransactionState.SWEPT:
                # `.grad` is still as it was on entry: a step since the sweep was one without this gradient.
                self._check_weights("leaving the transaction")
            with self.report.phase("finalize", self._engine.device):
                self._finish()
        except BaseException as failure:
            self._fail(failure)
            raise
        self._engine.end_report(self.report)
        self._engine.leave(None)

    def score(self, responses: Sequence[Tensor]) -> list[Tensor]:
        """Log-probs of the responses under the captured prompt, without a graph.

        Args:
            responses: int64 [R_i] each, unpadded, on any device.

        Returns:
            For each response float32 [R_i] (float64 for a float64 model), nats, after temperature; on the model's
            device. Bitwise what `replay` of the same list gives under the same weights, as long as no lane has to
            be narrowed.

        Raises:
            TransactionStateError: outside CAPTURED and REPLAYING.
            StaleWeightsError: the weights are not those of the capture.
        """
        self._life.require("score", TransactionState.CAPTURED, TransactionState.REPLAYING)
        self._settle_lane()
        self._end_phase()
        self._check_weights("score")
        branches = self._captured.check_branches(responses)
        with self.report.phase("score", self._engine.device):
            logprobs = self._captured.score(branches)
        for branch, scored in zip(branches, logprobs, strict=True):
            self._drift.scored(branch, scored)
        return logprobs

    def replay(self, responses: Sequence[Tensor]) -> Iterator[Lane]:
        """Replay the responses with autograd, lane by lane; call `lane.backward(loss)` (or `skip()`) on each.

        A lane that runs out of memory is run again in two halves. Lanes are made as the loop asks for them; a loop
        that ends early, after a `backward`, leaves the other branches out, and the report counts them.

        Raises:
            TransactionStateError: outside CAPTURED and REPLAYING, or the last lane was left without a gradient.
            StaleWeightsError: the weights are not those of the capture.
            CapacityError: a lane of a single branch runs out of memory.
        """
        self._life.require("replay", TransactionState.CAPTURED, TransactionState.REPLAYING)
        self._settle_lane()
        self._end_phase()
        self._check_weights("replay")
        branches = self._captured.check_branches(responses)
        self.report.left_out += len(branches)
        self._unasked += 1
        return self._lanes(branches)

    def sweep(self) -> None:
        """Send the gradient that reached the prompt's state back through the prompt; leaving the transaction does it.

        In detached mode, and where no trained parameter is behind the prompt's state, there is nothing to send.
        """
        self._life.require("sweep", TransactionState.REPLAYING)
        self._settle_lane()
        self._require_asked("sweep")
        self._end_phase()
        self._check_weights("sweep")
        with self.report.phase("sweep", self._engine.device), self._life.whole_or_broken("sweep"):
            while self._captured.needs_sweep:
                failure = self._captured.sweep()
                if failure is None:
                    break
                self._captured.capture_shorter(failure)
                self._repetition.run(failure)
        self._life.move(TransactionState.SWEPT)

    # Capture

    def _capture(self) -> None:
        engine = self._engine
        self._weights = engine.watch.now()
        follows = self._profile.no_aux_loss is None and not self._score_only
        self._routers = RouterLoss() if follows else None
        self._steps_counted = 0
        self._captured = CapturedPrompt(
            engine,
            self._owner,
            self._prompt,
            self._profile,
            row_tokens=self._row_tokens,
            exact=self._exact,
            kind=self._forward_kind,
            routers=self._routers,
            report=self.report,
        )
        self._proven = self._captured.proven
        self._repetition = Repetition(self._captured, self._ledger, self.report)
        self._captured.capture()
        self._life.move(TransactionState.CAPTURED)

    # Replay

    def _lanes(self, branches: list[Tensor]) -> Iterator[Lane]:
        size = self._captured.lane_size(branches)
        pending = deque(self._captured.plan_lanes(branches, size))
        self._life.move(TransactionState.REPLAYING)
        self._unasked -= 1
        group = None if self._routers is None else self._routers.group(branches)
        if len(pending) > 1:
            self._count(branches)
        self.report.lane_tokens = size.tokens
        while pending:
            # Of another `replay`, whose lanes are asked for in turn with these.
            self._settle_lane()
            indices = pending.popleft()
            try:
                with self.report.phase("replay", self._engine.device):
                    if self._phase is None:
                        # The first lane; or another call made its passes in between, which ended the phase.
                        self._phase = self._engine.lockstep.phase(
                            Kind.REPLAY, len(pending) + 1, checkpoint=size.checkpoint
                        )
                        self.report.checkpoint_replay = self._phase.checkpoint
                    with self._phase.forward():
                        lane = self._open_lane(indices, branches, group, self._phase.checkpoint)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = without_frames(error)
            else:
                self._lane = lane
                yield lane
                self._settle_lane()
                continue
            pending = self._captured.narrow(
                indices, pending, branches, failure, checkpoint=self.report.checkpoint_replay
            )
            self._count(branches)
        self._end_phase()

    def _count(self, branches: list[Tensor]) -> None:
        """The auxiliary loss asks how all lanes' tokens are routed before the first backward. Scoring has told it; else
        a pass without a graph, or log-probs, does."""
        if self._routers is None:
            return
        self._check_weights("replay")
        if unknown := self._routers.uncounted(branches):
            with self.report.phase("count", self._engine.device):
                self._captured.count(unknown)

    def _open_lane(
        self, indices: tuple[int, ...], branches: list[Tensor], group: GroupLoss | None, checkpoint: bool
    ) -> Lane:
        self._life.require("replay", TransactionState.REPLAYING)
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
        self.report.lanes += 1
        self.report.branches += len(indices)
        self.report.left_out -= len(indices)
        self.report.response_tokens += sum(lengths)
        return lane

    def _backward(
        self, lane: Lane, loss: Tensor, branches: list[Tensor], group: GroupLoss | None, checkpoint: bool
    ) -> None:
        self._life.require("lane.backward", TransactionState.REPLAYING)
        self._check_weights("lane.backward")
        sharding = self._engine.sharding
        self._engine.begin_ledger(self._ledger)
        if reaches_parameter(loss, {p for _, p in sharding.parameters()}):
            if sharding.lockstep:
                raise TransactionStateError(
                    f"lane.backward: the loss reaches parameters directly, beside lane.logprobs; under {sharding.name} "
                    "only a shard of them is there. Add such a term to the optimizer, as weight decay is"
                )
            self._repetition.possible = False
        with self.report.phase("backward", self._engine.device):
            upstream = lane.upstream(sharding.scale_loss(loss))
            with self._life.whole_or_broken("lane.backward"):
                self._send(lane, upstream, branches, group, checkpoint)

    def _send(
        self, lane: Lane, upstream: Tensor, branches: list[Tensor], group: GroupLoss | None, checkpoint: bool
    ) -> None:
        """The gradient at a lane's log-probs, through the model."""
        worth_N = None
        if group is not None and lane.forward.routers is not None:
            worth_N = group.backward(lane.aux_scale, lane.indices, lane.forward.routers, exact=self._exact)
            lane.forward.routers.send([worth_N] * len(branches))
            self._report_aux_loss(group)
        self._repetition.record(branches, upstream.split([len(branch) for branch in branches]), worth_N)
        assert self._phase is not None
        try:
            with self._phase.backward():
                failure = self._captured.backward_lane(lane.forward, lane.take_packed(), upstream)
        except BaseException:
            lane.close(LaneState.FAILED)
            raise
        lane.close(LaneState.DONE)
        self.report.add_traffic("backward", lane.forward.traffic)
        self._lane = None
        if failure is not None:
            self._repetition.run(failure, checkpoint=checkpoint)

    def _report_aux_loss(self, group: GroupLoss) -> None:
        self.report.aux_loss_scale, self.report.aux_loss_prompt_weight = group.scale, group.branches
        self._aux_value = group.value

    # End

    def _finish(self) -> None:
        # In lockstep the ledger is the step's, and stays open until all ranks have ended it.
        own = self._ledger.begun and not self._engine.lockstep.collective
        self._engine.deliver(self._ledger.take() if own else {})
        self._captured.state.release()
        self._engine.narrowing.ended(self._proven, ran_out=self.report.retries > 0)
        drift = self._drift.result()
        if drift is not None:
            self.report.drift_mean, self.report.drift_max = drift
        if self._aux_value is not None:
            self.report.aux_loss = float(self._aux_value)
        self._life.move(TransactionState.CLOSED)

    def _fail(self, error: BaseException) -> None:
        if self._lane is not None:
            self._lane.close(LaneState.CLOSED)
            self._lane = None
        self._ledger.rollback()
        self._engine.release(self._owner)
        self._engine.narrowing.ended(self._proven, ran_out=True)
        self._phase = None
        self._life.move(TransactionState.FAILED)
        self._engine.leave(error)

    # Shared

    def _check_weights(self, call: str) -> None:
        refuse_inference_mode(call)
        staleness = self._engine.config.staleness
        steps = self._engine.watch.check(self._weights, staleness=staleness, call=call)
        if self._routers is not None and steps != self._steps_counted:
            self._routers.forget_branches()
            self._steps_counted = steps
        self.report.stale_steps = max(self.report.stale_steps, steps)
        if not self._engine.adapter.is_profiled() or self._engine.adapter.profile() is not self._profile:
            raise StaleWeightsError(
                f"{call}: what is trained, the model's mode (train or eval), autocast, its dtype or device, or "
                "config.output_router_logits changed since the prompt was captured; capture again after that"
            )

    def _settle_lane(self) -> None:
        if self._lane is not None:
            self._lane.settle()
            self._lane = None

    def _require_asked(self, call: str) -> None:
        """Raises TransactionStateError if a `replay` was called for nothing: its gradient would be missed."""
        if self._unasked:
            raise TransactionStateError(
                f"{call}: replay was called and none of its lanes was asked for; loop over what it returns"
            )

    def _end_phase(self) -> None:
        """No more lanes of the last `replay`: the passes that other ranks still make of it are empty here."""
        if self._phase is not None:
            phase, self._phase = self._phase, None
            phase.finish()

    def _skip(self, packed: Tensor, forward: ForwardPass) -> None:
        """A lane is left out. In lockstep its backward still runs, with a gradient of zero."""
        if self._engine.lockstep.collective and self._phase is not None:
            with self._phase.backward(), self._engine.empty_ledger(), self._engine.adapter.active(forward):
                self._engine.sharding.backward(packed, torch.zeros_like(packed))
            # Zeros on gradient pages are no gradient: the next lane overwrites them, and without one nothing is swept.
