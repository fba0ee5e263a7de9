"""The transaction: one prompt captured once, its responses replayed, its exact gradient swept back, all or nothing."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from longstraw.errors import CapacityError, StaleWeightsError, TransactionStateError
from longstraw.runtime.branches import PackedBranches, check_prompt, check_responses
from longstraw.runtime.lane import Lane, LaneState, reaches_parameter
from longstraw.runtime.lockstep import Kind, Phase
from longstraw.runtime.memory import is_out_of_memory, release_cached
from longstraw.runtime.passes import ForwardPass, HeadRequest, Purpose
from longstraw.runtime.report import DriftMeter, Report
from longstraw.runtime.sizing import GraphSize, plan_chunks, plan_lanes

if TYPE_CHECKING:
    from longstraw.runtime.engine import Engine

_NUMBERS = itertools.count()


class TransactionState(enum.Enum):
    """What a transaction holds.

    OPEN holds nothing yet. CAPTURED holds the prompt's pages. REPLAYING also holds gradients: parameters' in the
    ledger, the prompt's in gradient pages. SWEPT has all gradient in the ledger. CLOSED and FAILED hold nothing.
    """

    OPEN = "OPEN"
    CAPTURED = "CAPTURED"
    REPLAYING = "REPLAYING"
    SWEPT = "SWEPT"
    CLOSED = "CLOSED"
    FAILED = "FAILED"


_S = TransactionState
MOVES: dict[TransactionState, frozenset[TransactionState]] = {
    _S.OPEN: frozenset({_S.CAPTURED, _S.FAILED}),
    _S.CAPTURED: frozenset({_S.REPLAYING, _S.CLOSED, _S.FAILED}),
    _S.REPLAYING: frozenset({_S.REPLAYING, _S.SWEPT, _S.FAILED}),
    _S.SWEPT: frozenset({_S.CLOSED, _S.FAILED}),
    _S.CLOSED: frozenset(),
    _S.FAILED: frozenset({_S.OPEN}),
}


class Transaction:
    """Made by `Runtime.transaction`; use it as a context manager. Entering captures, leaving sweeps and finalizes.

    Every error inside, the user's own included, frees every page and leaves `.grad` as it was on entry; the same
    object can then be entered again.
    """

    def __init__(
        self, engine: Engine, prompt_ids: Tensor, row_tokens: int | None, *, exact: bool, reference: bool = False
    ) -> None:
        self._engine = engine
        self._exact = exact
        self._forward_kind = Kind.REFERENCE if reference else Kind.FORWARD
        self._profile = engine.check_profile(reference=reference)
        self._prompt = check_prompt(prompt_ids, self._profile.vocab_size)
        if row_tokens is not None and row_tokens < len(self._prompt):
            raise ValueError(f"row_tokens={row_tokens} is shorter than the prompt's {len(self._prompt)} tokens")
        self._row_tokens = row_tokens
        self._owner = f"transaction-{next(_NUMBERS)}"
        self.state = TransactionState.OPEN
        self.report = Report()
        self._reset()

    def _reset(self) -> None:
        self._ledger = self._engine.open_ledger()
        self._drift = DriftMeter()
        self._lane: Lane | None = None
        # Each replayed branch with the gradient of the loss at its log-probs: enough to run it again.
        self._replayed: list[tuple[Tensor, Tensor]] = []
        self._repeatable = True
        self._phase: Phase | None = None

    # The user's calls

    def __enter__(self) -> Self:
        if self.state is TransactionState.FAILED:
            self._move(TransactionState.OPEN)
            self._reset()
        self._require("entering the transaction", TransactionState.OPEN)
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
            self._end_phase()
            if self.state is TransactionState.REPLAYING:
                self.sweep()
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
        self._require("score", TransactionState.CAPTURED, TransactionState.REPLAYING)
        self._settle_lane()
        self._end_phase()
        self._check_weights("score")
        branches = self._check_branches(responses)
        with self.report.phase("score", self._engine.device):
            logprobs = self._score(branches)
        for branch, scored in zip(branches, logprobs, strict=True):
            self._drift.scored(branch, scored)
        return logprobs

    def replay(self, responses: Sequence[Tensor]) -> Iterator[Lane]:
        """Replay the responses with autograd, lane by lane; call `lane.backward(loss)` (or `skip()`) on each.

        A lane that runs out of memory is run again in two halves. Lanes are made as the loop asks for them.

        Raises:
            TransactionStateError: outside CAPTURED and REPLAYING, or the last lane was left without a gradient.
            StaleWeightsError: the weights are not those of the capture.
            CapacityError: a lane of a single branch runs out of memory.
        """
        self._require("replay", TransactionState.CAPTURED, TransactionState.REPLAYING)
        self._settle_lane()
        self._end_phase()
        self._check_weights("replay")
        return self._lanes(self._check_branches(responses))

    def sweep(self) -> None:
        """Send the gradient that reached the prompt's state back through the prompt; leaving the transaction does it.

        In detached mode, and where no trained parameter is behind the prompt's state, there is nothing to send.
        """
        self._require("sweep", TransactionState.REPLAYING)
        self._settle_lane()
        self._end_phase()
        self._check_weights("sweep")
        with self.report.phase("sweep", self._engine.device):
            while self._state.needs_sweep:
                try:
                    self._sweep_once()
                    break
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    failure = _without_frames(error)
                self._narrow_chunks(failure)
                self._repeat_lanes(failure, narrower=False)
        self._move(TransactionState.SWEPT)

    # Capture and score

    def _capture(self) -> None:
        engine = self._engine
        self._weights = engine.watch.now()
        self._frequencies = engine.adapter.frequencies_key(self._row_tokens or len(self._prompt))
        size = engine.chunk_size(self._profile, len(self._prompt) - 1)
        self._chunk_tokens, self._checkpoint_sweep = size.tokens, size.checkpoint
        self.report.checkpoint_sweep = size.checkpoint and self._exact
        self._capture_chunks()
        self._move(TransactionState.CAPTURED)

    def _capture_chunks(self) -> None:
        engine = self._engine
        chunks = plan_chunks(len(self._prompt) - 1, self._chunk_tokens)
        self._state = engine.reserve(self._owner, self._profile, chunks, exact=self._exact)
        self.report.tier_bytes = self._state.tier_bytes()
        self.report.kept_output_layers = self._state.kept_output_layers
        self.report.chunks, self.report.chunk_tokens = len(chunks), self._chunk_tokens
        phase = engine.lockstep.phase(self._forward_kind, len(chunks))
        for start, stop in engine.progress("capture", chunks):
            forward = self._pass(Purpose.CAPTURE, [stop - start], prefix_rows=start)
            with phase.forward(), forward, torch.no_grad(), engine.adapter.active(forward):
                engine.adapter.run(forward, *self._chunk_inputs(start, stop))
            self.report.add_traffic("capture", forward.traffic)
        phase.finish()

    def _chunk_inputs(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        device = self._engine.device
        # A copy also on a CPU: the embedding saves its ids, and a view would keep the whole prompt's storage.
        return self._prompt[start:stop].to(device, copy=True), torch.arange(start, stop, device=device)

    def _score(self, branches: list[Tensor]) -> list[Tensor]:
        scored: dict[int, Tensor] = {}
        pending = deque(plan_lanes([len(b) for b in branches], self._lane_size(branches).tokens))
        phase = self._engine.lockstep.phase(self._forward_kind, len(pending))
        while pending:
            indices = pending.popleft()
            try:
                with phase.forward():
                    chosen = [branches[i] for i in indices]
                    packed, forward = self._forward_lane(Purpose.SCORE, chosen, checkpoint=False)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = _without_frames(error)
            else:
                forward.__exit__(None, None, None)
                self.report.add_traffic("score", forward.traffic)
                parts = packed[:, 0].clone().split([len(branches[i]) for i in indices])
                scored.update(zip(indices, parts, strict=True))
                continue
            pending.extendleft(reversed(self._halve(indices, branches, failure)))
        phase.finish()
        return [scored[i] for i in range(len(branches))]

    # Replay

    def _lanes(self, branches: list[Tensor]) -> Iterator[Lane]:
        size = self._lane_size(branches)
        pending = deque(plan_lanes([len(b) for b in branches], size.tokens))
        self._move(TransactionState.REPLAYING)
        self.report.lane_tokens, self.report.checkpoint_replay = size.tokens, size.checkpoint
        while pending:
            indices = pending.popleft()
            try:
                with self.report.phase("replay", self._engine.device):
                    if self._phase is None:
                        # The first lane; or another call made its passes in between, which ended the phase.
                        self._phase = self._engine.lockstep.phase(
                            Kind.REPLAY, len(pending) + 1, checkpoint=size.checkpoint
                        )
                    with self._phase.forward():
                        lane = self._open_lane(indices, branches, self._phase.checkpoint)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = _without_frames(error)
            else:
                self._lane = lane
                yield lane
                self._settle_lane()
                continue
            pending.extendleft(reversed(self._halve(indices, branches, failure)))
        self._end_phase()

    def _open_lane(self, indices: tuple[int, ...], branches: list[Tensor], checkpoint: bool) -> Lane:
        self._require("replay", TransactionState.REPLAYING)
        self._check_weights("replay")
        chosen = [branches[i] for i in indices]
        packed, forward = self._forward_lane(Purpose.REPLAY, chosen, checkpoint)
        self.report.lanes += 1
        self.report.branches += len(indices)
        self.report.response_tokens += sum(forward.lengths)
        for branch, logprobs in zip(chosen, packed.detach()[:, 0].split(forward.lengths), strict=True):
            self._drift.replayed(branch, logprobs)

        def backward(lane: Lane, loss: Tensor) -> None:
            self._backward(lane, loss, chosen)

        return Lane(
            indices,
            forward.lengths,
            packed,
            forward,
            backward,
            on_skip=self._skip,
            entropy=self._engine.config.replay.entropy,
        )

    def _forward_lane(self, purpose: Purpose, chosen: list[Tensor], checkpoint: bool) -> tuple[Tensor, ForwardPass]:
        """Run branches through the model. The pass stays open; who calls this closes it."""
        adapter, replay = self._engine.adapter, self._engine.config.replay
        rows = PackedBranches(self._prompt[-1], len(self._prompt), chosen, self._engine.device)
        head = HeadRequest(
            targets_S=rows.targets_S,
            temperature=replay.temperature,
            block_tokens=replay.logit_block_tokens,
            entropy=replay.entropy,
        )
        forward = self._pass(purpose, rows.lengths, prefix_rows=len(self._prompt) - 1, head=head, checkpoint=checkpoint)
        forward.__enter__()
        try:
            with torch.set_grad_enabled(purpose is Purpose.REPLAY), adapter.active(forward):
                return adapter.run(forward, rows.input_ids_S, rows.positions_S), forward
        except BaseException:
            forward.__exit__(None, None, None)
            raise

    def _backward(self, lane: Lane, loss: Tensor, branches: list[Tensor]) -> None:
        self._require("lane.backward", TransactionState.REPLAYING)
        self._check_weights("lane.backward")
        sharding = self._engine.sharding
        self._engine.begin_ledger(self._ledger)
        if reaches_parameter(loss, {p for _, p in sharding.parameters()}):
            if sharding.lockstep:
                raise TransactionStateError(
                    f"lane.backward: the loss reaches parameters directly, beside lane.logprobs; under {sharding.name} "
                    "only a shard of them is there. Add such a term to the optimizer, as weight decay is"
                )
            self._repeatable = False
        with self.report.phase("backward", self._engine.device):
            upstream = lane.upstream(sharding.scale_loss(loss))
            self._replayed += zip(branches, upstream.split(lane.forward.lengths), strict=True)
            assert self._phase is not None
            with self._phase.backward():
                failure = self._run_backward(lane.forward, lane.take_packed(), upstream)
            lane.close(LaneState.DONE)
            self.report.add_traffic("backward", lane.forward.traffic)
            self._lane = None
            if failure is not None:
                self._repeat_lanes(failure, narrower=True)

    def _run_backward(self, forward: ForwardPass, packed: Tensor, upstream: Tensor) -> Exception | None:
        """The model's part of a lane's backward. Returns an out-of-memory error instead of raising it."""
        try:
            with self._engine.adapter.active(forward):
                self._engine.sharding.backward(packed, upstream)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return _without_frames(error)
        self._state.gradients_started = True
        return None

    def _repeat_lanes(self, failure: Exception, *, narrower: bool) -> None:
        """Forget the gradient so far and run every replayed branch again from the gradients that its loss gave."""
        if self._engine.lockstep.collective:
            raise self._out_of_step(failure)
        if not self._repeatable:
            raise CapacityError(
                "out of memory in a backward pass, and the lanes cannot be run again because a loss reached parameters "
                f"directly, beside lane.logprobs; set replay.lane_tokens or capture.chunk_tokens lower. {failure}"
            ) from failure
        branches = [branch for branch, _ in self._replayed]
        size = self._lane_size(branches)
        todo: list[tuple[int, ...]] = []
        if narrower:
            self._halve(tuple(range(len(branches))), branches, failure)
            size = self._lane_size(branches)
        while True:
            self._ledger.discard()
            self._state.discard_gradients()
            todo = plan_lanes([len(b) for b in branches], size.tokens)
            again = self._repeat_all(todo, size.checkpoint)
            if again is None:
                return
            widest = max(todo, key=lambda lane: sum(len(branches[i]) for i in lane))
            self._halve(widest, branches, again)
            size = self._lane_size(branches)

    def _repeat_all(self, lanes: list[tuple[int, ...]], checkpoint: bool) -> Exception | None:
        for indices in lanes:
            branches = [self._replayed[i][0] for i in indices]
            upstream = torch.cat([self._replayed[i][1] for i in indices])
            try:
                packed, forward = self._forward_lane(Purpose.REPLAY, branches, checkpoint)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return _without_frames(error)
            failure = self._run_backward(forward, packed, upstream)
            forward.__exit__(None, None, None)
            self.report.add_traffic("backward", forward.traffic)
            if failure is not None:
                return failure
        return None

    # Sweep and end

    def _sweep_once(self) -> None:
        engine = self._engine
        chunks = plan_chunks(len(self._prompt) - 1, self._chunk_tokens)
        phase = engine.lockstep.phase(Kind.SWEEP, len(chunks), checkpoint=self._checkpoint_sweep)
        for start, stop in engine.progress("sweep", chunks[::-1]):
            forward = self._pass(Purpose.SWEEP, [stop - start], prefix_rows=start, checkpoint=phase.checkpoint)
            with forward, engine.adapter.active(forward), torch.enable_grad():
                with phase.forward():
                    out = engine.adapter.run(forward, *self._chunk_inputs(start, stop))
                # The chunk's gradient enters beside the outputs, at its keys and values. Entering through a zero
                # gradient on the output walks all layers in order, and lets wrappers hook the backward as usual.
                with phase.backward():
                    if out.requires_grad:
                        engine.sharding.backward(out, torch.zeros_like(out))
            self.report.add_traffic("sweep", forward.traffic)
        phase.finish()

    def _finish(self) -> None:
        # In lockstep the ledger is the step's, and stays open until all ranks have ended it.
        own = self._ledger.begun and not self._engine.lockstep.collective
        self._engine.deliver(self._ledger.take() if own else {})
        self._state.release()
        drift = self._drift.result()
        if drift is not None:
            self.report.drift_mean, self.report.drift_max = drift
        self._move(TransactionState.CLOSED)
        self._replayed.clear()

    def _fail(self, error: BaseException) -> None:
        if self._lane is not None:
            self._lane.close(LaneState.CLOSED)
            self._lane = None
        self._ledger.rollback()
        self._engine.release(self._owner)
        self._replayed.clear()
        self._phase = None
        self._move(TransactionState.FAILED)
        self._engine.leave(error)

    # Shared

    def _pass(
        self,
        purpose: Purpose,
        lengths: Sequence[int],
        *,
        prefix_rows: int,
        head: HeadRequest | None = None,
        checkpoint: bool = False,
    ) -> ForwardPass:
        return ForwardPass(
            purpose,
            lengths,
            state=self._state,
            prefix_rows=prefix_rows,
            head=head,
            checkpoint=checkpoint,
            row_tokens=self._row_tokens or len(self._prompt),
            tracer=self._engine.tracer,
        )

    def _lane_size(self, branches: list[Tensor]) -> GraphSize:
        return self._engine.lane_size(self._profile, [len(branch) for branch in branches])

    def _halve(self, indices: tuple[int, ...], branches: list[Tensor], failure: Exception) -> list[tuple[int, ...]]:
        """A lane that ran out of memory, in two; the narrower width is kept for lanes to come."""
        if self._engine.lockstep.collective:
            raise self._out_of_step(failure)
        lengths = [len(branches[i]) for i in indices]
        if len(indices) == 1:
            raise CapacityError(
                f"out of memory on a lane of one branch with {lengths[0]} tokens, which cannot be narrowed. Free "
                "device "
                "memory, set replay.checkpoint: true, lower replay.logit_block_tokens, or lower the budget of the "
                f"device tier. {failure}"
            ) from failure
        self.report.retries += 1
        release_cached(self._engine.device)
        self._engine.limit_lanes(max(max(lengths), sum(lengths) // 2))
        half = (len(indices) + 1) // 2
        return [indices[:half], indices[half:]]

    def _out_of_step(self, failure: Exception) -> CapacityError:
        """The error of a rank in lockstep that ran out of memory: a pass that is made again would be one too many."""
        self._engine.lockstep.break_off()
        return CapacityError(
            "out of memory while all ranks make the same passes; set replay.lane_tokens or capture.chunk_tokens lower, "
            f"or replay.checkpoint: true. {failure}"
        )

    def _narrow_chunks(self, failure: Exception) -> None:
        if self._engine.lockstep.collective:
            raise self._out_of_step(failure)
        if self._chunk_tokens == 1:
            raise CapacityError(f"out of memory in the sweep of a single prompt token. {failure}") from failure
        self.report.retries += 1
        release_cached(self._engine.device)
        self._chunk_tokens = (self._chunk_tokens + 1) // 2
        self._engine.limit_chunks(self._chunk_tokens)
        # Carried state exists at the old boundaries only. And chunks of another length round differently, which may
        # send a token to other experts, or select other keys, than when its state was captured.
        self._state.release()
        self._capture_chunks()

    def _check_branches(self, responses: Sequence[Tensor]) -> list[Tensor]:
        branches = check_responses(responses, self._profile.vocab_size)
        for i, branch in enumerate(branches):
            row = len(self._prompt) + len(branch)
            if self._row_tokens is not None and row > self._row_tokens:
                raise ValueError(
                    f"responses[{i}] makes a row of {row} tokens, longer than row_tokens={self._row_tokens}; "
                    "open the transaction with row_tokens of at least the longest prompt + response"
                )
            if self._row_tokens is None and self._engine.adapter.frequencies_key(row) != self._frequencies:
                raise ValueError(
                    f"responses[{i}] makes a row of {row} tokens, for which the model's rotary scaling has other "
                    f"frequencies than for the captured prompt of {len(self._prompt)}. Open the transaction with "
                    "row_tokens=<tokens of the longest prompt + response>: all rows are then computed as in a batch "
                    "padded to that length"
                )
        return branches

    def _check_weights(self, call: str) -> None:
        staleness = self._engine.config.staleness
        steps = self._engine.watch.check(self._weights, staleness=staleness, call=call)
        self.report.stale_steps = max(self.report.stale_steps, steps)
        if not self._engine.adapter.is_profiled() or self._engine.adapter.profile() is not self._profile:
            raise StaleWeightsError(
                f"{call}: what is trained, or the model's dtype or device, changed since the prompt was captured; "
                "capture again after that"
            )

    def _settle_lane(self) -> None:
        if self._lane is not None:
            self._lane.settle()
            self._lane = None

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
            self._state.gradients_started = True

    def _require(self, call: str, *states: TransactionState) -> None:
        if self.state not in states:
            allowed = " or ".join(state.value for state in states)
            raise TransactionStateError(f"{call}: the transaction is {self.state.value}; it must be {allowed}")

    def _move(self, to: TransactionState) -> None:
        if to not in MOVES[self.state]:
            raise TransactionStateError(f"a transaction cannot go from {self.state.value} to {to.value}")
        self.state = to


def _without_frames(error: Exception) -> Exception:
    """The error without its traceback, whose frames would keep the tensors alive that a retry needs freed."""
    return error.with_traceback(None)
