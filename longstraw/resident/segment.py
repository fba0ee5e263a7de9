"""One state's rows of one owner: its pages, where they lie, the leases open on them and the writes on their
way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longstraw.resident.page import Page
from longstraw.resident.state import State

if TYPE_CHECKING:
    from longstraw.pagers.protocol import Extent, Pager
    from longstraw.pagers.transfer import Transfer
    from longstraw.resident.lease import Lease


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Rows [start, stop) of a segment, contiguous in one extent of one tier."""

    tier: int
    pager: Pager
    extent: Extent
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The part of a row range that lies in one run.

    `offset` is in bytes from the start of the run's extent, `at` in bytes from the start of the row range.
    """

    pager: Pager
    extent: Extent
    offset: int
    nbytes: int
    at: int


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """A write-back of rows [start, stop) whose transfers have not been seen to end."""

    start: int
    stop: int
    transfers: tuple[Transfer, ...]


class Segment:
    """Rows of one state that one owner reserved. `PageStore.reserve` makes it, `PageStore.release` ends it.

    `pages` are its pages in order (the last may be shorter), `runs` its extents in order. Rows are reached
    through a `Lease` alone.
    """

    def __init__(self, owner: str, state: State, rows: int, page_rows: int, runs: Sequence[Run]) -> None:
        self.owner = owner
        self.state = state
        self.rows = rows
        self.page_rows = page_rows
        self.row_bytes = state.row_bytes
        self.runs = tuple(runs)
        self.released = False
        self.leases: list[Lease] = []
        self.pending: list[PendingWrite] = []
        self.lost_cause: BaseException | None = None
        label = str(self)
        count = -(-rows // page_rows)
        self.pages = [Page(label, i, min(page_rows, rows - i * page_rows)) for i in range(count)]

    def __str__(self) -> str:
        return f"{self.state} of {self.owner!r}"

    @property
    def filled(self) -> int:
        """Rows from the first on that are valid without a hole."""
        rows = 0
        for page in self.pages:
            rows += page.filled
            if page.filled < page.rows:
                break
        return rows

    def tier_bytes(self) -> dict[str, int]:
        """Bytes reserved in each tier, by the tier's name."""
        sizes: dict[str, int] = {}
        for run in self.runs:
            sizes[run.pager.name] = sizes.get(run.pager.name, 0) + run.extent.nbytes
        return sizes

    def pages_of(self, start: int, stop: int) -> list[Page]:
        """The pages that rows [start, stop) touch."""
        return self.pages[start // self.page_rows : -(-stop // self.page_rows)]

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Rows [start, stop) cut at the borders of the runs."""
        pieces = []
        for run in self.runs:
            low, high = max(run.start, start), min(run.stop, stop)
            if low < high:
                pieces.append(
                    Piece(
                        pager=run.pager,
                        extent=run.extent,
                        offset=(low - run.start) * self.row_bytes,
                        nbytes=(high - low) * self.row_bytes,
                        at=(low - start) * self.row_bytes,
                    )
                )
        return pieces

    def writes_over(self, start: int, stop: int) -> tuple[Transfer, ...]:
        """The transfers of write-backs on their way that overlap rows [start, stop)."""
        return tuple(
            transfer
            for write in self.pending
            if write.start < stop and start < write.stop
            for transfer in write.transfers
        )

    def begin_write(self, start: int, stop: int, transfers: tuple[Transfer, ...]) -> None:
        """Note a write-back on its way; its pages are MOVING until `settle` sees its end."""
        self.pending.append(PendingWrite(start, stop, transfers))
        for page in self.pages_of(start, stop):
            page.moving += 1

    def settle(self, *, block: bool = False) -> BaseException | None:
        """End the write-backs that are done (all of them, waiting, if `block`).

        A failed one leaves its pages LOST. Returns the first failure found now, for the caller to raise or
        note.
        """
        failure: BaseException | None = None
        still = []
        for write in self.pending:
            if not block and not all(transfer.done() for transfer in write.transfers):
                still.append(write)
                continue
            cause = wait_all(write.transfers)
            pages = self.pages_of(write.start, write.stop)
            for page in pages:
                page.moving -= 1
            if cause is not None:
                self.lose(pages, cause)
                failure = failure or cause
            for page in pages:
                page.settle()
        self.pending = still
        return failure

    def lose(self, pages: Sequence[Page], cause: BaseException) -> None:
        """Mark pages LOST. The first cause is kept, without its frames: they would keep tensors alive."""
        if self.lost_cause is None:
            self.lost_cause = cause.with_traceback(None)
        for page in pages:
            page.lose()

    def void(self) -> None:
        """Forget the content of every page. Leases must be closed; waits for write-backs on their way."""
        self.settle(block=True)
        for page in self.pages:
            page.void()
        self.lost_cause = None


def wait_all(transfers: Sequence[Transfer]) -> BaseException | None:
    """Wait on the host until every transfer has ended, also after one failed. Returns the first failure."""
    failure: BaseException | None = None
    for transfer in transfers:
        try:
            transfer.result()
        except Exception as cause:  # noqa: BLE001 (handed back: the caller marks the pages LOST)
            failure = failure or cause
    return failure
