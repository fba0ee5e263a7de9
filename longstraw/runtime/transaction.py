"""The transaction: one prompt captured once, its responses replayed, its exact gradient swept back, all or nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch import Tensor

from longstraw.errors import StaleWeightsError
from longstraw.runtime.branches import check_prompt
from longstraw.runtime.captured import CapturedPrompt
from longstraw.runtime.lane import Lane
from longstraw.runtime.lockstep import Kind
from longstraw.runtime.modes import refuse_inference_mode
from longstraw.runtime.replay import Replay
from longstraw.runtime.report import DriftMeter, Report
from longstraw.runtime.router_loss import RouterLoss
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

    _captured: CapturedPrompt
    _replay: Replay

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
        self._exact, self._score_only, self._reference = exact, score_only, reference
        self._row_tokens = row_tokens
        self._owner = f"transaction-{next(_NUMBERS)}"
        self._life = Lifecycle()
        self.report = Report()
        # A copy: it is read again when the transaction is entered, and entered again.
        self._given = prompt_ids.detach().to("cpu", copy=True) if isinstance(prompt_ids, Tensor) else prompt_ids
        # In lockstep looking at the model is a pass, and the other ranks hear of an error only once all have entered.
        if not engine.lockstep.collective:
            self._check_given()

    @property
    def state(self) -> TransactionState:
        return self._life.state

    # The user's calls

    def __enter__(self) -> Self:
        if self.state is TransactionState.FAILED:
            self._life.move(TransactionState.OPEN)
        self._life.require("entering the transaction", TransactionState.OPEN)
        self._ledger, self._drift = self._engine.open_ledger(), DriftMeter()
        self.report = Report(gradient="exact" if self._exact else "detached")
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
            self._life.require("leaving the transaction", *_LEFT_FROM)
            self._replay.settle()
            self._replay.require_asked("leaving the transaction")
            if self.state is TransactionState.REPLAYING:
                self.sweep()
            elif self.state is TransactionState.SWEPT:
                # `.grad` is still as it was on entry: a step since the sweep was one without this gradient.
                self._check_weights("leaving the transaction")
            with self.report.phase("finalize", self._engine.device):
                self._finish()
        except BaseException as failure:
            if self.state is TransactionState.CLOSED:
                # The gradient was delivered before this, and is the step's.
                self._engine.leave(None)
            else:
                self._fail(failure)
            raise
        try:
            self._engine.end_report(self.report)
        finally:
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
        self._replay.settle()
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
        that you end early, after a `backward`, leaves the other branches out, and the report counts them. One that an
        error of its own ends leaves the transaction to fail, also if you catch it.

        Raises:
            TransactionStateError: outside CAPTURED and REPLAYING, or the last lane was left without a gradient.
            StaleWeightsError: the weights are not those of the capture.
            CapacityError: a lane of a single branch runs out of memory.
        """
        self._life.require("replay", TransactionState.CAPTURED, TransactionState.REPLAYING)
        self._replay.settle()
        self._check_weights("replay")
        return self._replay.lanes(self._captured.check_branches(responses))

    def sweep(self) -> None:
        """Send the gradient that reached the prompt's state back through the prompt; leaving the transaction does it.

        In detached mode, and where no trained parameter is behind the prompt's state, there is nothing to send.
        """
        self._life.require("sweep", TransactionState.REPLAYING)
        self._replay.settle()
        self._replay.require_asked("sweep")
        self._check_weights("sweep")
        with self.report.phase("sweep", self._engine.device), self._life.whole_or_broken("sweep"):
            while self._captured.needs_sweep:
                failure = self._captured.sweep()
                if failure is None:
                    break
                repetition = self._replay.repetition
                self._captured.widths.shorten_chunks("sweep", failure)
                repetition.require_possible("the sweep", "capture.chunk_tokens", failure)
                self._captured.capture_again()
                repetition.run()
        self._life.move(TransactionState.SWEPT)

    # Capture

    def _capture(self) -> None:
        engine = self._engine
        # The model's mode, or what is trained, may have changed since this was made, or since the last attempt.
        self._check_given()
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
            kind=Kind.REFERENCE if self._reference else Kind.FORWARD,
            routers=self._routers,
            report=self.report,
        )
        self._replay = Replay(
            engine,
            self._captured,
            self._profile,
            ledger=self._ledger,
            routers=self._routers,
            life=self._life,
            report=self.report,
            drift=self._drift,
            check_weights=self._check_weights,
        )
        self._captured.capture()
        self._life.move(TransactionState.CAPTURED)

    def _check_given(self) -> None:
        self._profile = self._engine.check_profile(reference=self._reference)
        self._prompt = check_prompt(self._given, self._profile.vocab_size)
        self.report.prompt_tokens = len(self._prompt)
        if self._row_tokens is not None and self._row_tokens < len(self._prompt):
            raise ValueError(f"row_tokens={self._row_tokens} is shorter than the prompt's {len(self._prompt)} tokens")

    # End

    def _finish(self) -> None:
        # What can fail comes first: once gradients are delivered there is no way back.
        if (drift := self._drift.result()) is not None:
            self.report.drift_mean, self.report.drift_max = drift
        if self._replay.aux_value is not None:
            self.report.aux_loss = float(self._replay.aux_value)
        self._captured.state.release()
        self._captured.widths.ended(failed=False)
        # In lockstep the ledger is the step's, and stays open until all ranks have ended it.
        own = self._ledger.begun and not self._engine.lockstep.collective
        self._engine.deliver(self._ledger.take() if own else {})
        self._life.move(TransactionState.CLOSED)

    def _fail(self, error: BaseException) -> None:
        try:
            if self.state is not TransactionState.OPEN:
                self._replay.drop()
                self._captured.widths.ended(failed=True)
            self._ledger.rollback()
            self._engine.release(self._owner)
        finally:
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
