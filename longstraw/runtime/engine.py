"""What the transactions of one model share: adapter, pages, weights watch, sizes that memory has taught."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch import Tensor, nn

from longstraw.collectives import Tally
from longstraw.config import Config
from longstraw.errors import CapacityError, StaleWeightsError, TransactionStateError
from longstraw.pagers.staging import StagingPool
from longstraw.resident.store import PageStore
from longstraw.runtime.adapter import ModelAdapter, ModelProfile
from longstraw.runtime.beside_pages import device_page_bytes, size_beside_pages
from longstraw.runtime.empty import run_empty_pass
from longstraw.runtime.ledger import GradientLedger, GradientSums
from longstraw.runtime.lockstep import Kind, Lockstep
from longstraw.runtime.memory import free_device_bytes, is_out_of_memory
from longstraw.runtime.modes import refuse_inference_mode
from longstraw.runtime.narrowing import Narrowing
from longstraw.runtime.peak import DevicePeak
from longstraw.runtime.prompt_state import PromptState
from longstraw.runtime.report import Report
from longstraw.runtime.sizing import (
    GraphSize,
    block_rows,
    hiding_tokens,
    keep_outputs,
    logits_bytes,
    size_chunk,
    size_lane,
)
from longstraw.runtime.tiers import build_store
from longstraw.runtime.trace import build_tracer
from longstraw.runtime.transaction import Transaction
from longstraw.runtime.weights import WeightsWatch

Progress = Callable[[str, Iterable[tuple[int, int]]], Iterable[tuple[int, int]]]
"""Wraps the chunks of a phase ("capture", "sweep"), to show how far it is."""


class Engine:
    """Runs transactions on one model. `Runtime` is its public face.

    Args:
        adapter: the model.
        config: the settings.
        store: pages to share with another engine, or None for tiers of its own, made from `config.tiers`.
        progress: told of the chunks of long phases.
    """

    def __init__(
        self, adapter: ModelAdapter, config: Config, store: PageStore | None = None, progress: Progress | None = None
    ) -> None:
        self.adapter = adapter
        self.sharding = adapter.sharding
        self.config = config
        self.device = adapter.device
        self.watch = WeightsWatch(adapter)
        self._own_store = store is None
        self.store = store if store is not None else build_store(config, self.device)
        self.staging = StagingPool(self.device)
        # With another engine's pages the trace is that one's.
        self.tracer = build_tracer(config, self.store, self.device, self.sharding.ranks) if store is None else None
        self._peak = DevicePeak(self.device)
        self.progress: Progress = progress if progress is not None else lambda phase, chunks: chunks
        self.narrowing = Narrowing()
        self._sums = GradientSums()
        self._accumulating = self._closed = False
        self._counting: list[tuple[Report, Tally]] = []
        self._steps_before_sums: int | None = None
        self.lockstep = Lockstep(
            self.sharding.ranks, collective=self.sharding.lockstep, empty_pass=functools.partial(run_empty_pass, self)
        )
        # In lockstep a pass may add to gradients on behalf of other ranks' groups, within a transaction or outside
        # of all: the step has one ledger then, and else every transaction has its own.
        self._step_ledger = self._new_ledger()

    # For the user's face

    def transaction(
        self, prompt_ids: Tensor, row_tokens: int | None, *, score_only: bool = False, reference: bool = False
    ) -> Transaction:
        """A transaction on one prompt.

        `score_only` holds no gradient pages, whatever the config says. `reference`: the caller holds the adapter's
        `reference()`, and other ranks have to as well in passes that they make for this one.
        """
        self.require_open("transaction")
        exact = not score_only and self.config.gradient.prompt == "exact"
        return Transaction(self, prompt_ids, row_tokens, exact=exact, score_only=score_only, reference=reference)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Hold the gradients of the transactions within, and add them to `.grad` together at the end."""
        if self._accumulating:
            raise TransactionStateError("accumulate: already inside accumulate(); one block is one optimizer step")
        self.enter()
        self._accumulating = True
        try:
            yield
            self._refuse_step_within()
            self._finalize()
        except BaseException as error:
            self._accumulating = False
            self.leave(error)
            raise
        self._accumulating = False
        self.leave(None)

    def require_open(self, call: str) -> None:
        """Raises TransactionStateError if nothing can run: the runtime is closed, or inference mode is on."""
        refuse_inference_mode(call)
        if self._closed:
            raise TransactionStateError(f"{call}: the runtime is closed; make another")

    def close(self) -> None:
        """Give back every tier of its own, and write what the trace still holds of a failed transaction.

        What cannot be closed does not keep the rest open; the last error is raised.
        """
        if self.lockstep.depth:
            raise TransactionStateError("close: inside a transaction, or accumulate(); leave it first")
        self._closed = True
        with ExitStack() as stack:
            # Whoever still refers to a closed runtime holds no memory of the device by it.
            stack.callback(self.staging.trim)
            if self._own_store:
                for pager in reversed(self.store.pagers):
                    stack.callback(pager.close)
            if self.tracer is not None:
                stack.callback(self.tracer.finish)
            stack.callback(self.lockstep.close)

    # For transactions

    def reserve(
        self, owner: str, profile: ModelProfile, chunks: Sequence[tuple[int, int]], *, exact: bool
    ) -> PromptState:
        """Pages for a prompt that will be captured in these chunks."""
        config = self.config
        rows = chunks[-1][1] if chunks else 0
        return PromptState(
            self.store,
            owner,
            profile.layers,
            chunks=chunks,
            exact=exact,
            accumulate_wide=config.gradient.accumulate == "float32",
            keep_outputs=keep_outputs(config.capture.keep_attention, rows, self.device),
            block_tokens=block_rows(config.pages, self.device),
            lookahead=config.pages.lookahead,
            staging=self.staging,
        )

    def release(self, owner: str) -> None:
        """Free every page of `owner`, whatever state it is in."""
        self.store.release(owner, force=True)

    def enter(self) -> None:
        """A step begins, or a transaction within one."""
        self.require_open("entering a step")
        self._refuse_step_within()
        if not self.lockstep.enter():
            return
        try:
            self.sharding.begin_step()
            if self.lockstep.collective:
                # The model's short run is a pass too; here every rank makes it.
                with self.lockstep.half():
                    self._profile()
        except BaseException as error:
            self.leave(error)
            raise

    def leave(self, error: BaseException | None) -> None:
        """What `enter` began is over, with or without an error; all ranks of a failed step fail together."""
        if error is not None:
            self._step_ledger.rollback()
            self.lockstep.fail(error)
        if self.lockstep.leave():
            # What the step reduced is its last transaction's.
            for report, _ in self._counting[-1:]:
                self._count_collectives(report)
            self._counting.clear()
            self._sums = GradientSums()
            self._steps_before_sums = None
            self.sharding.end_step(failed=error is not None)

    def open_ledger(self) -> GradientLedger:
        """Where a transaction's backward passes add their gradients; begun at the first of them."""
        return self._step_ledger if self.lockstep.collective else self._new_ledger()

    def begin_ledger(self, ledger: GradientLedger) -> None:
        """Set `.grad` aside, if that has not been done."""
        if not ledger.begun:
            self.sharding.begin_gradients()
            ledger.begin(self.sharding.leaves())

    def _new_ledger(self) -> GradientLedger:
        return GradientLedger(
            wide=self.config.gradient.accumulate == "float32",
            hooked=self.sharding.takes_gradients,
        )

    def deliver(self, sums: dict[nn.Parameter, Tensor]) -> None:
        """A finished transaction's gradients: into `.grad`, or to the surrounding `accumulate()` until that ends."""
        self._sums.add(sums)
        if self._accumulating and self._steps_before_sums is None:
            self._steps_before_sums = self.watch.steps
        # Ranks reduce together, when the last of a step's transactions ends; one process has nothing to wait for.
        last = self.lockstep.depth == 1 or self.sharding.ranks is None
        if last and not self._accumulating:
            self._finalize()

    def _refuse_step_within(self) -> None:
        if self._steps_before_sums is not None and self.watch.steps != self._steps_before_sums:
            raise TransactionStateError(
                "accumulate: an optimizer stepped inside the block, without the gradients of the transactions before "
                "it: they reach .grad when the block ends; step, clip and zero_grad after it"
            )

    def _finalize(self) -> None:
        if self.lockstep.end(has_gradient=self._sums.any or self._step_ledger.begun):
            if self._step_ledger.begun:
                self._sums.add(self._step_ledger.take())
            self.sharding.finalize(self._sums.take())

    def empty_ledger(self) -> AbstractContextManager[None]:
        """Within it a backward pass with a gradient of zero may run, and leaves this rank's sums as they are."""
        self.begin_ledger(self._step_ledger)
        # Where the framework reduces in each pass, what arrives here in an empty pass is the other ranks' gradient.
        return self._step_ledger.discarding() if self.sharding.reduce == "deferred" else nullcontext()

    def check_profile(self, *, reference: bool) -> ModelProfile:
        """The model's profile. In a step in lockstep a run that it needs is a phase of its own."""
        if self.lockstep.collective and self.lockstep.depth and not self.adapter.is_profiled():
            if not reference:
                raise StaleWeightsError(
                    "what is trained, the model's mode, or its dtype changed within accumulate(), and the ranks would "
                    "fall out of step; change it between steps"
                )
            phase = self.lockstep.phase(Kind.PROBE, 1)
            with phase.forward():
                profile = self._profile()
            phase.finish()
            return profile
        return self._profile()

    def _profile(self) -> ModelProfile:
        try:
            return self.adapter.profile()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                "out of memory in the short first run that shows what the model's layers keep. Free device memory, or "
                f"lower the budget of the device tier. {error}"
            ) from error

    def lane_size(self, profile: ModelProfile, lengths: Sequence[int], free: int) -> GraphSize:
        """Lane width and checkpointing for branches of these lengths."""
        replay = self.config.replay
        return size_lane(
            profile,
            lengths,
            free=free,
            device=self.device,
            lane_tokens=replay.lane_tokens,
            checkpoint=replay.checkpoint,
            logits=logits_bytes(profile, replay.logit_block_tokens, replay.entropy),
            hidden_from=hiding_tokens(self.sharding.link_bytes_a_parameter()),
        )

    def chunk_size(self, profile: ModelProfile, rows: int, free: int) -> GraphSize:
        """Prompt tokens a chunk, and checkpointing in the sweep."""
        return size_chunk(
            profile,
            rows,
            free=free,
            device=self.device,
            chunk_tokens=self.config.capture.chunk_tokens,
            checkpoint=self.config.replay.checkpoint,
            hidden_from=hiding_tokens(self.sharding.link_bytes_a_parameter()),
        )

    def size_prompt(
        self, profile: ModelProfile, rows: int, *, exact: bool, within: Callable[[GraphSize], GraphSize]
    ) -> tuple[GraphSize, int]:
        """The size of a prompt's chunks, and the bytes that graphs can plan with beside its pages.

        Read before the pages are reserved. `within`: what the size has to keep to.
        """

        def chunk_size(free: int) -> GraphSize:
            return within(self.chunk_size(profile, rows, free))

        def held(chunks: Sequence[tuple[int, int]]) -> int:
            return device_page_bytes(
                self.store.pagers,
                profile.layers,
                chunks,
                exact=exact,
                wide=self.config.gradient.accumulate == "float32",
                keep_outputs=keep_outputs(self.config.capture.keep_attention, rows, self.device),
            )

        return size_beside_pages(chunk_size, self.free_bytes(), held, rows)

    def free_bytes(self) -> int:
        """Bytes that pages and live graphs of a transaction can plan with, as it begins."""
        # The sums of parameters' gradients are not there yet, and will stay beside every graph.
        return max(free_device_bytes(self.device) - self.sharding.gradient_bytes(), 0)

    def begin_report(self, report: Report) -> None:
        """A transaction begins: start measuring the peak of device memory, and tracing."""
        self._peak.begin()
        if self.tracer is not None:
            self.tracer.start()
        report.watch(self.tracer, self._peak.lap)
        report.sharding, report.reduce = self.sharding.name, self.sharding.reduce
        report.gradient_bytes = self.sharding.gradient_bytes()
        self._counting.append((report, self.sharding.tally.copy()))
        self._counted = self.lockstep.empty_passes, self.lockstep.waited_seconds

    def _count_collectives(self, report: Report) -> None:
        for known, began in self._counting:
            if known is report:
                report.count_collectives(self.sharding.tally.since(began))

    def end_report(self, report: Report) -> None:
        """A transaction is over, well or not."""
        report.peak_device_bytes = self._peak.highest()
        self._count_collectives(report)
        report.empty_passes = self.lockstep.empty_passes - self._counted[0]
        report.rank_wait_seconds = self.lockstep.waited_seconds - self._counted[1]
        if self.tracer is not None:
            self.tracer.finish()
