"""One prompt on pages, and the passes that run on it: capture, score, a lane, the sweep."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longstraw.errors import CapacityError
from longstraw.runtime.adapter import ModelProfile
from longstraw.runtime.branches import PackedBranches, check_responses
from longstraw.runtime.lockstep import Kind
from longstraw.runtime.memory import is_out_of_memory
from longstraw.runtime.passes import ForwardPass, HeadRequest, Purpose
from longstraw.runtime.prompt_state import PromptState
from longstraw.runtime.report import Report
from longstraw.runtime.router_loss import RouterLoss
from longstraw.runtime.routers import RouterTally
from longstraw.runtime.sizing import plan_chunks, plan_lanes
from longstraw.runtime.upload import upload
from longstraw.runtime.widths import PassWidths

if TYPE_CHECKING:
    from longstraw.runtime.engine import Engine


class CapturedPrompt:
    """A prompt's pages and how it is cut. What runs out of memory here is run again narrower, where that is possible.

    Args:
        engine: what the model's transactions share.
        owner: the transaction's name in the page store.
        prompt_P: int64 [P] on the CPU.
        profile: the model's.
        row_tokens: the row length that positions are encoded for, or None for the prompt's.
        exact: whether the prompt's gradient is wanted.
        kind: what capture and scoring are to other ranks.
        routers: where routing is counted for the auxiliary loss, or None if that is not asked for.
        report: where figures go.

    Attributes:
        state: the pages, once `capture` has run.
        widths: how its chunks, and lanes of branches, are cut.
    """

    def __init__(
        self,
        engine: Engine,
        owner: str,
        prompt_P: Tensor,
        profile: ModelProfile,
        *,
        row_tokens: int | None,
        exact: bool,
        kind: Kind,
        routers: RouterLoss | None,
        report: Report,
    ) -> None:
        self.state: PromptState
        self.exact = exact
        self._engine, self._owner, self._prompt, self._profile = engine, owner, prompt_P, profile
        self._row_tokens, self._kind, self._report = row_tokens, kind, report
        self._routers = routers
        self._frequencies = engine.adapter.frequencies_key(row_tokens or len(prompt_P))
        self.widths = PassWidths(engine, profile, len(prompt_P) - 1, report, exact=exact)

    # Capture and sweep, chunk by chunk

    def capture(self) -> None:
        """Run the prompt without autograd and fill its pages; in shorter chunks if memory runs out."""
        failure: Exception | None = None
        while True:
            self._reserve(failure)
            try:
                self._capture_chunks()
                self.widths.chunks_fitted("capture")
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = without_frames(error)
            self._engine.release(self._owner)
            self.widths.shorten_chunks("capture", failure)

    def _reserve(self, failure: Exception | None) -> None:
        """Pages for the prompt as it is cut now. `failure`: of memory, that made the chunks shorter."""
        try:
            self.state = self._engine.reserve(self._owner, self._profile, self._chunks, exact=self.exact)
        except Exception as error:
            if is_out_of_memory(error):
                # Shorter chunks need as many pages, or more.
                raise CapacityError(
                    "out of memory as the device tier's pages for the prompt were reserved. Free device memory, or "
                    f"lower the budget of the device tier. {error}"
                ) from error
            if failure is None or not isinstance(error, CapacityError):
                raise
            raise CapacityError(
                f"out of memory in the capture ({failure}); and in chunks of {self.widths.chunk.tokens} tokens, which "
                f"it was to be run again in, the prompt needs more pages than there are. {error}"
            ) from failure

    @property
    def _chunks(self) -> list[tuple[int, int]]:
        return plan_chunks(len(self._prompt) - 1, self.widths.chunk.tokens)

    def _capture_chunks(self) -> None:
        engine, report = self._engine, self._report
        chunks = self._chunks
        report.tier_bytes = self.state.tier_bytes()
        report.kept_output_layers = self.state.kept_output_layers
        report.chunks, report.chunk_tokens = len(chunks), self.widths.chunk.tokens
        report.checkpoint_sweep = self.widths.chunk.checkpoint and self.exact
        if self._routers is not None:
            self._routers.begin_capture()
        phase = engine.lockstep.phase(self._kind, len(chunks))
        for start, stop in engine.progress("capture", chunks):
            forward = self._pass(Purpose.CAPTURE, [stop - start], prefix_rows=start)
            with phase.forward(), forward, torch.no_grad(), engine.adapter.active(forward):
                engine.adapter.run(forward, *self._chunk_inputs(start, stop))
            if self._routers is not None and forward.routers is not None:
                self._routers.captured(forward.routers)
            report.add_traffic("capture", forward.traffic)
        phase.finish()

    @property
    def needs_sweep(self) -> bool:
        """Whether gradient has reached the prompt: its state, or its tokens' routers."""
        routed = self._routers is not None and self._routers.prompt_coefficient_N is not None
        return self.state.needs_sweep or routed

    def sweep(self) -> Exception | None:
        """Send the state's gradient back through the prompt, last chunk first.

        Returns an out-of-memory error instead of raising it: the gradient is incomplete then.
        """
        try:
            self._sweep_chunks()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return without_frames(error)
        self.widths.chunks_fitted("sweep")
        return None

    def _sweep_chunks(self) -> None:
        engine = self._engine
        chunks = self._chunks
        phase = engine.lockstep.phase(Kind.SWEEP, len(chunks), checkpoint=self.widths.chunk.checkpoint)
        self._report.checkpoint_sweep = phase.checkpoint
        for start, stop in engine.progress("sweep", chunks[::-1]):
            forward = self._pass(Purpose.SWEEP, [stop - start], prefix_rows=start, checkpoint=phase.checkpoint)
            if self._routers is not None and forward.routers is not None:
                forward.routers.send([self._routers.prompt_coefficient_N])
            with forward, engine.adapter.active(forward), torch.enable_grad():
                with phase.forward():
                    out = engine.adapter.run(forward, *self._chunk_inputs(start, stop))
                # The chunk's gradient enters beside the outputs, at its keys and values. Entering through a zero
                # gradient on the output walks all layers in order, and lets wrappers hook the backward as usual.
                with phase.backward():
                    if out.requires_grad:
                        engine.sharding.backward(out, torch.zeros_like(out))
            self._report.add_traffic("sweep", forward.traffic)
        phase.finish()

    def capture_again(self) -> None:
        """Capture anew: the sweep ran out of memory, and chunks have become shorter.

        Carried state exists at the old boundaries only. And chunks of another length round differently, which may send
        a token to other experts, or select other keys, than when its state was captured.
        """
        self.state.release()
        self.capture()

    def _chunk_inputs(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        device = self._engine.device
        # A copy also on a CPU: the embedding saves its ids, and a view would keep the whole prompt's storage.
        return upload(self._prompt[start:stop], device), torch.arange(start, stop, device=device)

    # Branches, lane by lane

    def score(self, branches: list[Tensor]) -> list[Tensor]:
        """Log-probs [R_i] of each branch, without a graph."""
        return [packed[:, 0].clone() for packed in self._run_lanes(branches, Purpose.SCORE, "score")]

    def count(self, branches: list[Tensor]) -> None:
        """Run branches for their routing alone: no log-probs, no graph."""
        self._run_lanes(branches, Purpose.COUNT, "count")

    def _run_lanes(self, branches: list[Tensor], purpose: Purpose, phase_name: str) -> list[Tensor]:
        """What the model puts out for the tokens of each branch, [R_i, ...]."""
        found: dict[int, Tensor] = {}
        rows = self.rows(branches)
        pending = deque(plan_lanes(rows, self.widths.lane(rows).tokens))
        phase = self._engine.lockstep.phase(self._kind, len(pending))
        while pending:
            indices = pending.popleft()
            try:
                with phase.forward():
                    chosen = [branches[i] for i in indices]
                    packed, forward = self.forward_lane(purpose, chosen, checkpoint=False)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = without_frames(error)
            else:
                forward.__exit__(None, None, None)
                self._report.add_traffic(phase_name, forward.traffic)
                if self._routers is not None and forward.routers is not None:
                    self._routers.counted(chosen, forward.routers)
                parts = packed.split([len(branch) for branch in chosen])
                found.update(zip(indices, parts, strict=True))
                self.widths.lane_fitted(graph=False)
                continue
            pending = self.widths.narrow(indices, pending, rows, failure)
        phase.finish()
        return [found[i] for i in range(len(branches))]

    def forward_lane(self, purpose: Purpose, chosen: list[Tensor], checkpoint: bool) -> tuple[Tensor, ForwardPass]:
        """Run branches through the model: [S, 2] log-probs and entropies. The pass stays open; the caller closes it."""
        adapter, replay = self._engine.adapter, self._engine.config.replay
        whole = self._routers is not None
        rows = PackedBranches(self._prompt[-1], len(self._prompt), chosen, self._engine.device, whole=whole)
        head = HeadRequest(
            targets_S=rows.targets_S,
            temperature=replay.temperature,
            block_tokens=replay.logit_block_tokens,
            entropy=replay.entropy,
        )
        wanted = None if purpose is Purpose.COUNT else head
        forward = self._pass(
            purpose, rows.lengths, prefix_rows=len(self._prompt) - 1, head=wanted, checkpoint=checkpoint
        )
        forward.__enter__()
        try:
            with torch.set_grad_enabled(purpose is Purpose.REPLAY), adapter.active(forward):
                return rows.answers(adapter.run(forward, rows.input_ids_S, rows.positions_S)), forward
        except BaseException as error:
            forward.__exit__(type(error), error, error.__traceback__)
            raise

    def backward_lane(self, forward: ForwardPass, packed_S2: Tensor, upstream_S2: Tensor) -> Exception | None:
        """The model's part of a lane's backward. Returns an out-of-memory error instead of raising it."""
        try:
            with self._engine.adapter.active(forward):
                self._engine.sharding.backward(packed_S2, upstream_S2)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return without_frames(error)
        self.state.gradients_started = True
        self.widths.lane_fitted(graph=True)
        return None

    def rows(self, branches: Sequence[Tensor]) -> list[int]:
        """Tokens of each branch that run: the auxiliary loss wants the last one too."""
        return [len(branch) + (self._routers is not None) for branch in branches]

    def check_branches(self, responses: Sequence[Tensor]) -> list[Tensor]:
        """The responses, checked, int64 [R_i] on the CPU.

        Raises:
            TypeError, ValueError: as `check_responses`; or a row's length asks for other rotary frequencies than the
                captured prompt has.
        """
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
            state=self.state,
            prefix_rows=prefix_rows,
            head=head,
            checkpoint=checkpoint,
            row_tokens=self._row_tokens or len(self._prompt),
            routers=self._tally(purpose, lengths),
            tracer=self._engine.tracer,
        )

    def _tally(self, purpose: Purpose, lengths: Sequence[int]) -> RouterTally | None:
        if self._routers is None:
            return None
        return RouterTally(lengths, counting=purpose is not Purpose.SWEEP)


def without_frames(error: Exception) -> Exception:
    """The error without its traceback, whose frames would keep the tensors alive that a retry needs freed."""
    return error.with_traceback(None)
