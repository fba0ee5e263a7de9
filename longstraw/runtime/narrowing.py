"""How narrow passes became because memory ran out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from longstraw.runtime.sizing import GraphSize

_CALM = 8
"""Transactions without memory running out, after which twice the width is tried again."""


@dataclass(slots=True)
class Narrowing:
    """The widths, in tokens, that passes must keep to; None where memory has not run out.

    A transaction has two of its own: one for what it tries, and one for what it has seen to fit, which it hands on as
    it ends. A width that did not fit either has taught nothing, and would slow down everything after it.

    Attributes:
        calm: transactions that have ended since memory last ran out, or wider passes were last tried.
    """

    lane_tokens: int | None = None
    chunk_tokens: int | None = None
    calm: int = 0

    def lane(self, size: GraphSize) -> GraphSize:
        """A lane's size within the width."""
        return _within(size, self.lane_tokens)

    def chunk(self, size: GraphSize, shortest: int) -> GraphSize:
        """A chunk's size within the width, which a shorter prompt may have taught; but no less than `shortest`."""
        return size if self.chunk_tokens is None else _within(size, max(self.chunk_tokens, shortest))

    def learn(self, other: Narrowing) -> None:
        """Keep to what the other keeps to as well."""
        self.lane_tokens = _least(self.lane_tokens, other.lane_tokens)
        self.chunk_tokens = _least(self.chunk_tokens, other.chunk_tokens)

    def ended(self, proven: Narrowing, *, ran_out: bool) -> None:
        """A transaction has ended, and saw these widths to fit. What took the memory may be gone after some of them."""
        self.learn(proven)
        self.calm = 0 if ran_out else self.calm + 1
        if self.calm == _CALM:
            self.calm = 0
            self.lane_tokens = None if self.lane_tokens is None else 2 * self.lane_tokens
            self.chunk_tokens = None if self.chunk_tokens is None else 2 * self.chunk_tokens

    def copy(self) -> Narrowing:
        return replace(self)


def _within(size: GraphSize, most: int | None) -> GraphSize:
    if most is None or size.tokens <= most:
        return size
    return GraphSize(tokens=most, checkpoint=size.checkpoint)


def _least(*widths: int | None) -> int | None:
    return min((width for width in widths if width is not None), default=None)
