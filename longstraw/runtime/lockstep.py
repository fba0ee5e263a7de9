"""Lockstep: ranks with unequal work make the same passes in the same order, and fail together.

A step has *phases*: runs of passes of one kind. Before a phase every rank says which kind it wants to run next and
how many passes of it. The kind that comes first in `Kind` has its turn, with as many passes as the rank that wants
most of it; a rank that wants fewer, or another kind, makes empty passes. The step ends when every rank says END.

A rank that fails between passes tells the others at their next agreement, and all leave the step together: the next
step works. One that fails within a pass leaves the others in a collective that it will never join. It says so on a
board, its error is logged on every rank, and the processes have to be started again (a launcher like torchrun ends
the others as soon as one has gone). So does one that fails in the reductions after the step has ended on all ranks.

Where passes run no collectives (DDP, ZeRO with a deferred reduction), there are no phases: ranks meet at the end of
the step only, and look at a board of failures before each pass.
"""

from __future__ import annotations

import enum
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from longstraw.collectives import BROKEN_NOTICE, FailureWatcher, Ranks
from longstraw.errors import RankFailedError, TransactionStateError


class Kind(enum.IntEnum):
    """What a rank wants next, in the order of turns. GO and FAILED are said within phases."""

    PROBE = 0
    REFERENCE = 1
    FORWARD = 2
    REPLAY = 3
    SWEEP = 4
    END = 5
    GO = 6
    FAILED = 7


class StepState(enum.Enum):
    """IDLE: outside a step. OPEN: within one. FAILED: within one that has failed on some rank.

    ENDED: all ranks have made their passes, and reduce what these gave. BROKEN: a rank failed within a pass or a
    reduction, and the ranks' collectives no longer match.
    """

    IDLE = "IDLE"
    OPEN = "OPEN"
    ENDED = "ENDED"
    FAILED = "FAILED"
    BROKEN = "BROKEN"


MOVES: dict[StepState, frozenset[StepState]] = {
    StepState.IDLE: frozenset({StepState.OPEN, StepState.BROKEN}),
    StepState.OPEN: frozenset({StepState.ENDED, StepState.FAILED, StepState.IDLE, StepState.BROKEN}),
    StepState.ENDED: frozenset({StepState.IDLE, StepState.BROKEN}),
    StepState.FAILED: frozenset({StepState.IDLE}),
    StepState.BROKEN: frozenset(),
}

EmptyPass = Callable[[Kind, bool], None]
"""Makes one empty pass of a kind, checkpointed or not. It calls `Lockstep.go` before each half."""


class Phase:
    """A run of agreed passes, of which this rank makes the first ones real.

    Attributes:
        checkpoint: whether passes are checkpointed: as soon as one rank wants it, because it decides which
            collectives a backward pass runs.
    """

    def __init__(self, lockstep: Lockstep, kind: Kind, passes: int, checkpoint: bool) -> None:
        self.checkpoint = checkpoint
        self._lockstep, self._kind, self._left = lockstep, kind, passes

    def forward(self) -> AbstractContextManager[None]:
        """Hold it around the next pass's forward. Raises RankFailedError if another rank has failed."""
        self._left -= 1
        return self._lockstep.half()

    def backward(self) -> AbstractContextManager[None]:
        """Hold it around the pass's backward."""
        return self._lockstep.half()

    def finish(self) -> None:
        """This rank has no more real passes in this phase."""
        if self._lockstep.collective:
            assert self._left >= 0, "more passes than were agreed"
            while self._left > 0:
                self._left -= 1
                self._lockstep.empty_passes += 1
                self._lockstep.empty_pass(self._kind, self.checkpoint)

    @property
    def over(self) -> bool:
        return self._lockstep.collective and self._left <= 0


class Lockstep:
    """Keeps the ranks of one model together over a step.

    Args:
        ranks: the replicas, or None for a single process: then nothing is agreed and every call is free.
        collective: whether passes run collectives.
        empty_pass: makes an empty pass.

    Attributes:
        waited_seconds: spent in agreements, most of it waiting for the slowest rank.
        empty_passes: made so far.
    """

    def __init__(self, ranks: Ranks | None, *, collective: bool, empty_pass: EmptyPass) -> None:
        self.collective = collective and ranks is not None
        self.empty_pass = empty_pass
        self.state = StepState.IDLE
        self._ranks = ranks
        self._depth = 0
        self._step = 0
        self._failure: RankFailedError | None = None
        self._running = False
        self._watcher: FailureWatcher | None = None
        self.waited_seconds = 0.0
        self.empty_passes = 0

    @property
    def depth(self) -> int:
        """0 outside a step, 1 in `accumulate()` or in a transaction of its own, 2 in a transaction within."""
        return self._depth

    # Steps

    def enter(self) -> bool:
        """A step, or a part of it, begins. Returns whether it is the step itself.

        Raises TransactionStateError in a step that has already failed.
        """
        if self.state is StepState.IDLE:
            self._look_for_break()
        if self.state is StepState.BROKEN:
            raise TransactionStateError(
                f"a rank failed within a pass or a reduction ({self._failure}), and the ranks' collectives no longer "
                "match; start the processes again"
            )
        if self.state is StepState.FAILED:
            raise TransactionStateError(
                f"this step has failed on some rank ({self._failure}); leave accumulate() on every rank and run the "
                "step again"
            )
        if self.state is StepState.IDLE:
            self._move(StepState.OPEN)
            self._step += 1
            if self.collective:
                self._watch()
        self._depth += 1
        return self._depth == 1

    def leave(self) -> bool:
        """What `enter` began is over. Returns whether it was the step itself."""
        self._depth -= 1
        if self._depth > 0:
            return False
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None
        if self.state is not StepState.BROKEN:
            self._failure = None
            self._move(StepState.IDLE)
        return True

    def close(self) -> None:
        """No step will follow: another may have the group that messages went over, unless a pass broke off."""
        if self._ranks is not None and self.state is StepState.IDLE:
            self._ranks.close()

    def end(self, *, has_gradient: bool) -> bool:
        """This rank has no more work in the step; returns when that is true of all ranks.

        Returns whether some rank has a gradient. Raises RankFailedError if a rank has failed.
        """
        if self._failure is not None:
            raise self._failure
        if self._ranks is None:
            return has_gradient
        if self.collective:
            told = self._turn(Kind.END, int(has_gradient), False)[1]
        else:
            self._look()
            told = self._exchange(Kind.END, int(has_gradient))
            self._watch()
        self._move(StepState.ENDED)
        return any(one[1] for one in told)

    def fail(self, error: BaseException) -> None:
        """This rank's part of the step has failed: tell the others, which raise with this rank's error."""
        if self._ranks is None or self.state not in (StepState.OPEN, StepState.ENDED):
            return
        text = "".join(traceback.format_exception_only(error)).strip()
        self._failure = RankFailedError(f"rank {self._ranks.rank} failed: {text}")
        # After the end no rank asks for another's word any more.
        if self.state is StepState.ENDED or (self.collective and self._running):
            self._move(StepState.BROKEN)
            self._ranks.post(BROKEN_NOTICE, text)
            return
        self._move(StepState.FAILED)
        if not self.collective:
            self._ranks.post(f"failed-{self._step}", text)
        self._ranks.exchange(Kind.FAILED)
        self._ranks.exchange_text(text)

    # Phases

    def phase(self, kind: Kind, passes: int, *, checkpoint: bool = False) -> Phase:
        """Agree on a run of passes; returns when it is their turn, after empty passes for other ranks' phases."""
        if self.collective:
            passes, checkpoint = self._turn(kind, passes, checkpoint)[0]
        return Phase(self, kind, passes, checkpoint)

    @contextmanager
    def half(self) -> Iterator[None]:
        """Held around a forward, or a backward. An error that leaves it was raised within a pass."""
        self.go()
        self._running = True
        yield
        self._running = False

    def break_off(self) -> None:
        """A pass has failed, and its error is about to be raised."""
        self._running = True

    def go(self) -> None:
        """Called before each half of a pass. Raises RankFailedError if another rank has failed."""
        if self.collective:
            self._exchange(Kind.GO)
        elif self._ranks is not None:
            self._look()

    def _turn(self, kind: Kind, passes: int, checkpoint: bool) -> tuple[tuple[int, bool], list[tuple[int, ...]]]:
        while True:
            told = self._exchange(kind, passes, int(checkpoint))
            turn = Kind(min(one[0] for one in told))
            wanted = [one for one in told if one[0] == turn]
            agreed = max(one[1] for one in wanted), any(one[2] for one in wanted)
            if turn is kind:
                return agreed, told
            for _ in range(agreed[0]):
                self.empty_passes += 1
                self.empty_pass(turn, agreed[1])

    def _exchange(self, *message: int) -> list[tuple[int, ...]]:
        assert self._ranks is not None
        began = time.perf_counter()
        told = self._ranks.exchange(*message)
        self.waited_seconds += time.perf_counter() - began
        failed = [rank for rank, one in enumerate(told) if one[0] == Kind.FAILED]
        if failed:
            texts = self._ranks.exchange_text("")
            self._failed_elsewhere(failed[0], texts[failed[0]])
        kinds = {one[0] for one in told}
        assert kinds == {Kind.GO} or Kind.GO not in kinds, f"ranks are in different places: {told}"
        return told

    def _look_for_break(self) -> None:
        """A rank may have failed in a reduction after this one was through with it."""
        posted = None if self._ranks is None else self._ranks.posted(BROKEN_NOTICE)
        if posted is not None:
            self._move(StepState.BROKEN)
            self._failure = RankFailedError(f"rank {posted[0]} failed: {posted[1]}")

    def _look(self) -> None:
        assert self._ranks is not None
        if self.state is not StepState.OPEN:
            return
        self._look_for_break()
        if self._failure is not None:
            raise self._failure
        posted = self._ranks.posted(f"failed-{self._step}")
        if posted is not None:
            # The failing rank waits for all others to take notice.
            self._ranks.exchange(Kind.FAILED)
            self._ranks.exchange_text("")
            self._failed_elsewhere(*posted)

    def _failed_elsewhere(self, rank: int, text: str) -> None:
        self._move(StepState.FAILED)
        self._failure = RankFailedError(
            f"rank {rank} failed, and with it this step on every rank; nothing was added to .grad. Its error: {text}"
        )
        raise self._failure

    def _watch(self) -> None:
        """Tell of a rank that breaks off while this one waits for it in a collective."""
        if self._ranks is not None:
            self._watcher = FailureWatcher(self._ranks)

    def _move(self, to: StepState) -> None:
        assert to in MOVES[self.state], (self.state, to)
        self.state = to
