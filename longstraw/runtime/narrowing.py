"""How narrow passes became because memory ran out, and what is remembered of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from longstraw.runtime.sizing import GraphSize

_CALM = 8
"""Transactions without memory running out, after which twice the width is tried again."""


@dataclass(slots=True)
class Widths:
    """What passes must keep to; None and False where memory has not run out.

    Attributes:
        lane_tokens, chunk_tokens: the most of a lane, and of a chunk.
        checkpoint: whether lanes' graphs have to be checkpointed.
    """

    lane_tokens: int | None = None
    chunk_tokens: int | None = None
    checkpoint: bool = False

    def lane(self, size: GraphSize) -> GraphSize:
        """A lane's size within these."""
        return _within(replace(size, checkpoint=size.checkpoint or self.checkpoint), self.lane_tokens)

    def chunk(self, size: GraphSize, shortest: int) -> GraphSize:
        """A chunk's size within these, which a shorter prompt may have taught; but no less than `shortest`."""
        return size if self.chunk_tokens is None else _within(size, max(self.chunk_tokens, shortest))

    def learn(self, other: Widths) -> None:
        """Keep to what the other keeps to as well."""
        self.lane_tokens = _least(self.lane_tokens, other.lane_tokens)
        self.chunk_tokens = _least(self.chunk_tokens, other.chunk_tokens)
        self.checkpoint = self.checkpoint or other.checkpoint

    def copy(self) -> Widths:
        return replace(self)


@dataclass(slots=True)
class Narrowing:
    """What a model's transactions have taught. A width that did not fit either has taught nothing, and would slow down
    everything after it: only what has been seen to fit is remembered.

    Attributes:
        widths: seen to fit.
        trial: for the next transaction alone: what the last one would have tried, had it been able to.
        calm_lanes, calm_chunks: transactions that have ended since memory last ran out, or since wider passes were last
            tried. Passes without a graph say nothing of those with one, so a model that is trained does not count the
            transactions that only score.
    """

    widths: Widths = field(default_factory=Widths)
    trial: Widths = field(default_factory=Widths)
    calm_lanes: int = 0
    calm_chunks: int = 0
    _replays: bool = False
    _sweeps: bool = False

    def begin(self) -> tuple[Widths, Widths]:
        """What a transaction keeps to, and what of it is a trial."""
        trial, self.trial = self.trial, Widths()
        widths = self.widths.copy()
        widths.learn(trial)
        return widths, trial

    def ended(self, proven: Widths, *, ran_out: bool, replayed: bool, swept: bool) -> None:
        """A transaction has ended, and saw these widths to fit. What took the memory may be gone after some of them."""
        self.widths.learn(proven)
        self._replays |= replayed
        self._sweeps |= swept
        if ran_out:
            self.calm_lanes = self.calm_chunks = 0
            return
        self.calm_lanes += replayed or not self._replays
        self.calm_chunks += swept or not self._sweeps
        if self.calm_lanes == _CALM:
            self.calm_lanes, self.widths.checkpoint = 0, False
            self.widths.lane_tokens = _twice(self.widths.lane_tokens)
        if self.calm_chunks == _CALM:
            self.calm_chunks = 0
            self.widths.chunk_tokens = _twice(self.widths.chunk_tokens)


def _within(size: GraphSize, most: int | None) -> GraphSize:
    return size if most is None or size.tokens <= most else replace(size, tokens=most)


def _least(*widths: int | None) -> int | None:
    return min((width for width in widths if width is not None), default=None)


def _twice(width: int | None) -> int | None:
    return None if width is None else 2 * width
