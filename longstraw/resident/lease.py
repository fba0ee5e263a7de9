"""The lease: the only way to the bytes of a page, whatever its tier and its kind of state."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any

from longstraw.errors import LongstrawError, PageLostError, PageStateError
from longstraw.resident.page import PageState
from longstraw.resident.segment import Segment, wait_all

if TYPE_CHECKING:
    from longstraw.pagers.transfer import Transfer
    from longstraw.resident.store import PageStore


class Access(Enum):
    """What a lease does with its rows.

    READ: bring them. FILL: write them without bringing what was there. UPDATE: bring, change, write back.
    """

    READ = "read"
    FILL = "fill"
    UPDATE = "update"


class LeasePhase(Enum):
    """CLOSED: holds nothing. OPEN: the rows are claimed. BRINGING: they are copied to a slot. HELD: in
    use."""

    CLOSED = "closed"
    OPEN = "open"
    BRINGING = "bringing"
    HELD = "held"


def claim(segment: Segment, start: int, stop: int, access: Access) -> tuple[int, int]:
    """Rows that nobody else may write (or, for a writer, use) meanwhile.

    A fill claims the rest of its last page too: rows behind it stop counting if it fails.
    """
    if access is Access.FILL:
        stop = min(-(-stop // segment.page_rows) * segment.page_rows, segment.rows)
    return start, stop


class Lease:
    """A claim on rows [start, stop) of a segment, and the copies that it needs.

    The order of calls: `open`; then either `view` (the rows where they lie) or `bring` (unless it fills) into
    a slot; `hold` before the rows are used; at last `finish`, or `abandon` after a failure. As a context
    manager it opens and holds on entry and ends either way on exit, which is enough where `view` gives the
    rows in place.

    Raises `PageStateError` for rows that were never filled, a hole, rows in use by another lease that does
    not go with this one, or a segment that was released; `PageLostError` where the bytes are lost.
    """

    __slots__ = (
        "_generations",
        "_reads",
        "_store",
        "access",
        "pages",
        "phase",
        "pieces",
        "segment",
        "start",
        "stop",
    )

    def __init__(self, store: PageStore, segment: Segment, start: int, stop: int, access: Access) -> None:
        self._store = store
        self.segment = segment
        self.start = start
        self.stop = stop
        self.access = access
        self.phase = LeasePhase.CLOSED
        self.pages = segment.pages_of(start, stop)
        self.pieces = segment.pieces(start, stop)
        self._reads: tuple[Transfer, ...] = ()
        self._generations: list[int] = []

    def __str__(self) -> str:
        return f"{self.access.name} rows {self.start}:{self.stop} of {self.segment}"

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return (self.stop - self.start) * self.segment.row_bytes

    def refusal(self) -> LongstrawError | None:
        """Why the lease cannot be opened now, or None if it can."""
        segment, page_rows = self.segment, self.segment.page_rows
        if segment.released:
            return PageStateError(f"{self}: the segment was released")
        if not 0 <= self.start < self.stop <= segment.rows:
            return PageStateError(f"{self}: the segment has rows 0:{segment.rows}")
        segment.settle()
        fill = self.access is Access.FILL
        for page in self.pages:
            base = page.index * page_rows
            if page.state is PageState.LOST:
                error = PageLostError(f"{self}: {page} is lost: {segment.lost_cause}")
                error.__cause__ = segment.lost_cause
                return error
            if fill and self.start - base > page.filled:
                return PageStateError(f"{self}: leaves a hole, {page} is filled up to row {base + page.filled}")
            if not fill and min(self.stop, base + page.rows) > base + page.filled:
                return PageStateError(f"{self}: {page} is filled up to row {base + page.filled} only")
        return self._conflict()

    def _conflict(self) -> LongstrawError | None:
        start, stop = claim(self.segment, self.start, self.stop, self.access)
        for other in self.segment.leases:
            if self.access is Access.READ and other.access is Access.READ:
                continue
            low, high = claim(self.segment, other.start, other.stop, other.access)
            if low < stop and start < high:
                return PageStateError(f"{self}: these rows are in use by an open lease ({other})")
        return None

    def open(self) -> None:
        """Claim the rows. Raises as the class says; nothing is claimed then."""
        assert self.phase is LeasePhase.CLOSED
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        self._generations = [page.generation for page in self.pages]
        self.segment.leases.append(self)
        self.phase = LeasePhase.OPEN

    def view(self) -> Any | None:
        """The rows where they lie: a uint8 tensor [nbytes], or None if they have to be brought to a slot."""
        if len(self.pieces) != 1:
            return None
        piece = self.pieces[0]
        return piece.pager.view(piece.extent, piece.offset, piece.nbytes)

    def bring(self, slot: Any, after: Sequence[Transfer] = ()) -> None:
        """Start the copies of the rows into `slot` (uint8 [nbytes]), after `after` and after writes on their
        way.

        Raises `PageLostError` if a copy fails at once; the lease is closed then.
        """
        assert self.phase is LeasePhase.OPEN
        assert self.access is not Access.FILL
        for page in self.pages:
            page.moving += 1
            page.settle()
        self.phase = LeasePhase.BRINGING
        after = (*after, *self.segment.writes_over(self.start, self.stop))
        for piece in self.pieces:
            target = slot[piece.at : piece.at + piece.nbytes]
            try:
                self._reads += (piece.pager.read(piece.extent, piece.offset, target, after),)
            except Exception as cause:
                raise self._lost(cause) from cause
            self._store.count_read(piece.pager.name, piece.nbytes)

    def hold(self) -> None:
        """Order the consumer after the copies (and writes on their way), and move the pages to the consumer.

        Raises `PageLostError` if a copy failed; the lease is closed then.
        """
        if self.phase is LeasePhase.CLOSED:
            raise PageStateError(f"{self}: the lease has ended (its owner was released by force)")
        assert self.phase is not LeasePhase.HELD
        self._same_generation()
        waits = self._reads
        if self.phase is LeasePhase.OPEN:
            # Rows used in place must be there, and a fill's write-back must land after the writes before it.
            waits = self.segment.writes_over(self.start, self.stop)
            self._enter_held()
        try:
            for transfer in waits:
                transfer.wait()
        except Exception as cause:
            raise self._lost(cause) from cause
        if self.phase is LeasePhase.BRINGING:
            self._enter_held()

    def _enter_held(self) -> None:
        self._count(self.phase, -1)
        self.phase = LeasePhase.HELD
        self._count(self.phase, 1)
        self._settle()

    def finish(self, slot: Any | None = None, after: Sequence[Transfer] = ()) -> tuple[Transfer, ...]:
        """End the lease after its rows were used well.

        `slot` (uint8 [nbytes]) is given when a writer's rows lie in a slot: it is written back, after
        `after`. Returns the write-backs; `slot` must not be overwritten before they have ended. Raises
        `PageLostError` if one fails at once.
        """
        if self.phase is LeasePhase.CLOSED:
            return ()
        assert self.phase is LeasePhase.HELD
        self._same_generation()
        writes: tuple[Transfer, ...] = ()
        if slot is not None and self.access is not Access.READ:
            writes = self._write_back(slot, after)
        if self.access is Access.FILL:
            for page in self.pages:
                if page.state is not PageState.LOST:
                    page.filled = max(page.filled, min(self.stop - page.index * self.segment.page_rows, page.rows))
        self._close()
        return writes

    def _write_back(self, slot: Any, after: Sequence[Transfer]) -> tuple[Transfer, ...]:
        writes: tuple[Transfer, ...] = ()
        for piece in self.pieces:
            source = slot[piece.at : piece.at + piece.nbytes]
            try:
                writes += (piece.pager.write(piece.extent, piece.offset, source, after),)
            except Exception as cause:
                wait_all(writes)
                raise self._lost(cause) from cause
            self._store.count_write(piece.pager.name, piece.nbytes)
        self.segment.begin_write(self.start, self.stop, writes)
        return writes

    def abandon(self) -> None:
        """End the lease after a failure, or unused.

        A read leaves its pages as they were. A fill's rows do not count as filled. An update's pages are
        LOST: they may be half changed. Waits on the host for copies on their way.
        """
        if self.phase is LeasePhase.CLOSED:
            return
        cause = wait_all(self._reads) if self.phase is LeasePhase.BRINGING else None
        if cause is None and self.phase is LeasePhase.HELD and self.access is Access.UPDATE:
            cause = PageLostError(f"{self}: an exception ended the update")
        if cause is not None:
            self.segment.lose(self.pages, cause)
        elif self.phase is LeasePhase.HELD and self.access is Access.FILL:
            self.segment.settle(block=True)  # an earlier write-back must not keep a page that goes FREE now
            for page in self.pages:
                page.filled = min(page.filled, max(self.start - page.index * self.segment.page_rows, 0))
        self._close()

    def __enter__(self) -> Lease:
        self.open()
        self.hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.abandon()

    def _lost(self, cause: Exception) -> PageLostError:
        """Mark the pages LOST and close; the error to raise."""
        if self.phase is LeasePhase.BRINGING:
            wait_all(self._reads)  # no copy may still write into the slot once it is given back
        self.segment.lose(self.pages, cause)
        self._close()
        return PageLostError(f"{self}: {cause}")

    def _close(self) -> None:
        self._count(self.phase, -1)
        self.phase = LeasePhase.CLOSED
        self._reads = ()
        self.segment.leases.remove(self)
        self._settle()

    def _count(self, phase: LeasePhase, by: int) -> None:
        """Count this lease on its pages, or off them, for what it does in `phase`."""
        if phase is LeasePhase.BRINGING:
            for page in self.pages:
                page.moving += by
        elif phase is LeasePhase.HELD and self.access is Access.FILL:
            for page in self.pages:
                page.filling += by
        elif phase is LeasePhase.HELD:
            for page in self.pages:
                page.leased += by

    def _settle(self) -> None:
        for page in self.pages:
            page.settle()

    def _same_generation(self) -> None:
        assert self._generations == [page.generation for page in self.pages], f"{self}: voided under an open lease"
