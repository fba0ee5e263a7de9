"""How narrow passes became because memory ran out."""

from __future__ import annotations

from dataclasses import dataclass

from longstraw.runtime.sizing import GraphSize

NARROWEST = 64
"""A chunk is cut to a 64th of its first length at most. What does not fit then is not a matter of length, and a long
prompt in chunks of a few tokens would read all its pages so often that it seemed to hang."""


@dataclass(slots=True)
class Narrowing:
    """The widths, in tokens, that passes must keep to; None where memory has not run out.

    A transaction has one of its own, and hands it on once it ended well: widths at which it failed all the same have
    taught nothing, and would slow down everything after it.
    """

    lane_tokens: int | None = None
    chunk_tokens: int | None = None

    def lane(self, size: GraphSize) -> GraphSize:
        """A lane's size within the width."""
        return _within(size, self.lane_tokens)

    def chunk(self, size: GraphSize) -> GraphSize:
        """A chunk's size within the width."""
        return _within(size, self.chunk_tokens)

    def learn(self, other: Narrowing) -> None:
        """Keep to what the other keeps to as well."""
        self.lane_tokens = _least(self.lane_tokens, other.lane_tokens)
        self.chunk_tokens = _least(self.chunk_tokens, other.chunk_tokens)

    def copy(self) -> Narrowing:
        return Narrowing(self.lane_tokens, self.chunk_tokens)


def _within(size: GraphSize, most: int | None) -> GraphSize:
    if most is None or size.tokens <= most:
        return size
    return GraphSize(tokens=most, checkpoint=size.checkpoint)


def _least(*widths: int | None) -> int | None:
    return min((width for width in widths if width is not None), default=None)
