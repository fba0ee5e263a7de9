"""The page: its states, the one table of legal moves between them, and what keeps it in a state."""

from __future__ import annotations

from enum import Enum

from longstraw.errors import PageStateError


class PageState(Enum):
    """What a page is doing, and which memory holds its rows.

    FREE: owned by nobody, or its content is void. Reserved bytes in the home tier, if any, hold nothing.
    FILLING: a lease writes new rows, in the home tier itself or in a staging slot; rows below `filled` are at
    home. RESIDENT: rows below `filled` are in the home tier, and nothing else has them. MOVING: a copy is in
    flight: home tier to staging slot (look-ahead) or slot to home tier (write-back). LEASED: a consumer holds
    a tensor on rows of it: the home tier's own memory, or a staging slot beside it. LOST: the rows cannot be
    trusted (failed I/O, a failed update). The home tier's bytes stay reserved until
        the content is voided or the owner releases them.

    Leases on different rows of one page may be open at once. The state is then that of the first that applies
    of FILLING, LEASED, MOVING.
    """

    FREE = "free"
    FILLING = "filling"
    RESIDENT = "resident"
    MOVING = "moving"
    LEASED = "leased"
    LOST = "lost"


_S = PageState

MOVES: dict[PageState, frozenset[PageState]] = {
    _S.FREE: frozenset({_S.FILLING}),
    _S.FILLING: frozenset({_S.RESIDENT, _S.MOVING, _S.LEASED, _S.FREE, _S.LOST}),
    _S.RESIDENT: frozenset({_S.FILLING, _S.MOVING, _S.LEASED, _S.FREE}),
    _S.MOVING: frozenset({_S.RESIDENT, _S.LEASED, _S.FILLING, _S.LOST}),
    _S.LEASED: frozenset({_S.RESIDENT, _S.MOVING, _S.FILLING, _S.LOST}),
    _S.LOST: frozenset({_S.FREE}),
}
"""Every legal move. A page in use (MOVING, LEASED) is never freed: what holds it ends first."""


class Page:
    """A run of `rows` consecutive rows of one segment.

    `segment` names the page's segment in errors. `filled` rows from the first on are valid. `generation`
    counts how often the content was voided, so that a lease on older content is told from one on this.
    """

    __slots__ = ("filled", "filling", "generation", "index", "leased", "moving", "rows", "segment", "state")

    def __init__(self, segment: str, index: int, rows: int) -> None:
        self.segment = segment
        self.index = index
        self.rows = rows
        self.generation = 0
        self.state = PageState.FREE
        self.filled = 0
        # How many fills, other open leases and copies in flight keep the page; `settle` turns them into the
        # state.
        self.filling = 0
        self.leased = 0
        self.moving = 0

    def __str__(self) -> str:
        return f"page {self.index} of {self.segment}"

    def move(self, to: PageState) -> None:
        """Move to another state. Raises `PageStateError` if `MOVES` does not have the move."""
        if to not in MOVES[self.state]:
            raise PageStateError(f"{self} cannot go from {self.state.name} to {to.name}")
        self.state = to

    def settle(self) -> None:
        """Move to the state that the open fills, leases and copies ask for. A LOST page stays LOST."""
        if self.state is PageState.LOST:
            return
        if self.filling:
            to = PageState.FILLING
        elif self.leased:
            to = PageState.LEASED
        elif self.moving:
            to = PageState.MOVING
        else:
            to = PageState.RESIDENT if self.filled else PageState.FREE
        if to is not self.state:
            self.move(to)

    def lose(self) -> None:
        """Mark the rows as not to be trusted."""
        if self.state is not PageState.LOST:
            self.move(PageState.LOST)
        self.filled = 0

    def void(self) -> None:
        """Forget the content and keep the memory. Raises `PageStateError` while anything holds the page."""
        if self.filling or self.leased or self.moving:
            raise PageStateError(f"{self} is {self.state.name}: its leases and copies must end before it is freed")
        if self.state is not PageState.FREE:
            self.move(PageState.FREE)
        self.filled = 0
        self.generation += 1
