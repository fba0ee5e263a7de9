"""How wide a transaction's passes are, and what memory running out makes of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from longstraw.config import AUTO
from longstraw.errors import CapacityError
from longstraw.runtime.adapter import ModelProfile
from longstraw.runtime.memory import release_cached
from longstraw.runtime.narrowing import Widths
from longstraw.runtime.report import Report
from longstraw.runtime.sizing import GraphSize, plan_lanes, shortest_chunk, wider_half

if TYPE_CHECKING:
    from longstraw.runtime.engine import Engine

Lanes = deque[tuple[int, ...]]
"""Lanes to come, each the positions of its branches."""


class PassWidths:
    """Chunks and lanes of one captured prompt, each as wide as memory allows.

    Args:
        rows: of the prompt, to be captured.
        report: counts what is run again.

    Attributes:
        kept: what memory running out has left.
        chunk: the size of the prompt's chunks, and whether the sweep is checkpointed.
    """

    def __init__(self, engine: Engine, profile: ModelProfile, rows: int, report: Report, *, exact: bool) -> None:
        self._engine, self._profile, self._report = engine, profile, report
        self.kept, trial = engine.narrowing.begin()
        self._proven = Widths()
        # The kind of pass in which lanes, and chunks, were last cut: it proves the width when it fits.
        self._cut_lanes_in: Literal["graph", "no graph"] | None = None
        self._cut_chunks_in: Literal["capture", "sweep"] | None = None
        if trial.lane_tokens is not None or trial.checkpoint:
            self._cut_lanes_in = "graph"
        if trial.chunk_tokens is not None:
            self._cut_chunks_in = "sweep"
        self._replayed = self._swept = False
        self._shortest = shortest_chunk(rows)

        def within(size: GraphSize) -> GraphSize:
            return self.kept.chunk(size, self._shortest)

        # Read once, before the first graph: lanes must be cut alike in scoring and in replay, or they would round
        # differently. Out-of-memory retries correct it downwards.
        self.chunk, self._free = engine.size_prompt(profile, rows, exact=exact, within=within)

    def ended(self, *, failed: bool) -> None:
        """The transaction is over: remember what fitted."""
        ran_out = failed or self._report.retries > 0
        self._engine.narrowing.ended(self._proven, ran_out=ran_out, replayed=self._replayed, swept=self._swept)

    def hand_on(self) -> None:
        """Let the next transaction try what this one cannot."""
        self._engine.narrowing.trial = self.kept.copy()

    # Chunks

    def shorten_chunks(self, phase: Literal["capture", "sweep"], failure: Exception) -> None:
        """A pass over a chunk ran out of memory: chunks of half the length.

        Raises CapacityError if there are no shorter ones.
        """
        tokens, checkpointed = self.chunk.tokens, self.chunk.checkpoint
        # A capture keeps no graph that checkpointing could shrink.
        checkpoint = "set replay.checkpoint: true, " if phase == "sweep" and not checkpointed else ""
        self._refuse_in_lockstep(f"{checkpoint}set capture.chunk_tokens lower", failure)
        if tokens <= self._shortest:
            what = "a single prompt token"
            if tokens > 1:
                what = (
                    f"{tokens} prompt tokens; shorter chunks would read this prompt's pages too often, and are made "
                    "only if capture.chunk_tokens asks for them"
                )
            raise CapacityError(
                f"out of memory in the {phase} of {what}. Free device memory, {checkpoint}or lower the budget of the "
                f"device tier. {failure}"
            ) from failure
        self._again()
        self.chunk = replace(self.chunk, tokens=max((tokens + 1) // 2, self._shortest))
        self.kept.learn(Widths(chunk_tokens=self.chunk.tokens))
        self._cut_chunks_in = phase

    def chunks_fitted(self, phase: Literal["capture", "sweep"]) -> None:
        """All chunks have gone through this phase."""
        self._swept |= phase == "sweep"
        if self._cut_chunks_in == phase:
            self._proven.learn(Widths(chunk_tokens=self.kept.chunk_tokens))

    # Lanes

    def lane(self, rows: Sequence[int]) -> GraphSize:
        """Lane width and checkpointing for branches of these rows."""
        return self.kept.lane(self._engine.lane_size(self._profile, rows, self._free))

    def keep_to_width(self, pending: Lanes, rows: Sequence[int]) -> Lanes:
        """Lanes to come, cut anew if memory ran out on narrower ones since they were made. `rows`: of all branches."""
        width = self.kept.lane_tokens
        if width is None or all(len(lane) == 1 or sum(rows[i] for i in lane) <= width for lane in pending):
            return pending
        return _cut([i for lane in pending for i in lane], rows, width)

    def narrow(
        self,
        indices: tuple[int, ...],
        pending: Iterable[tuple[int, ...]],
        rows: Sequence[int],
        failure: Exception,
        *,
        checkpoint: bool | None = None,
    ) -> Lanes:
        """A lane ran out of memory: it and those to come, cut anew to the width of its larger half.

        A lane of one branch is checkpointed, if it was not and `replay.checkpoint` is auto.

        Args:
            rows: of all branches.
            checkpoint: whether its graph was checkpointed; None for a pass without a graph.

        Raises:
            CapacityError: it had one branch, and nothing more can be done.
        """
        auto = self._engine.config.replay.checkpoint == AUTO
        advice = "set replay.checkpoint: true, " if checkpoint is False else ""
        self._refuse_in_lockstep(f"{advice}set replay.lane_tokens lower", failure)
        if len(indices) == 1 and not (checkpoint is False and auto):
            raise CapacityError(
                f"out of memory on a lane of one branch with {rows[indices[0]]} tokens, which cannot be narrowed. Free "
                f"device memory, {advice}lower replay.logit_block_tokens, or lower the budget of the device tier. "
                f"{failure}"
            ) from failure
        self._again()
        self._cut_lanes_in = "no graph" if checkpoint is None else "graph"
        if len(indices) == 1:
            self.kept.checkpoint = True
            return deque([indices, *pending])
        width = wider_half([rows[i] for i in indices])
        self.kept.learn(Widths(lane_tokens=width))
        return _cut([*indices, *(i for lane in pending for i in lane)], rows, width)

    def lane_fitted(self, *, graph: bool) -> None:
        """A lane has gone through a pass with a graph, backward included, or through one without."""
        self._replayed |= graph
        if self._cut_lanes_in == "no graph" or (graph and self._cut_lanes_in == "graph"):
            self._proven.learn(Widths(lane_tokens=self.kept.lane_tokens, checkpoint=self.kept.checkpoint))

    # Shared

    def _again(self) -> None:
        self._report.retries += 1
        release_cached(self._engine.device)

    def _refuse_in_lockstep(self, advice: str, failure: Exception) -> None:
        """Raises CapacityError on a rank in lockstep: a pass that is made again would be one too many."""
        if self._engine.lockstep.collective:
            self._engine.lockstep.break_off()
            raise CapacityError(f"out of memory while all ranks make the same passes; {advice}. {failure}")


def _cut(branches: Sequence[int], rows: Sequence[int], width: int) -> Lanes:
    """Lanes of at most `width` of these branches, positions among `rows`."""
    lanes = plan_lanes([rows[i] for i in branches], width)
    return deque(tuple(branches[i] for i in lane) for lane in lanes)
