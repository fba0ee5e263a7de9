"""Rows in an order that was announced beforehand: the next requests come while the present one is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from longstraw.errors import PageLostError, StreamOrderError
from longstraw.pagers.staging import Slot, StagingPool
from longstraw.pagers.stalls import Stall, StallClock
from longstraw.pagers.trace import Tracer, Track
from longstraw.pagers.transfer import Transfer, record
from longstraw.resident.lease import Access, Lease, claim
from longstraw.resident.segment import Segment
from longstraw.resident.state import State
from longstraw.resident.store import PageStore


@dataclass(frozen=True, slots=True)
class Request:
    """Rows [start, stop) of a segment, and what is done with them."""

    segment: Segment
    start: int
    stop: int
    access: Access

    def __str__(self) -> str:
        return f"{self.access.name} rows {self.start}:{self.stop} of {self.segment}"

    def collides(self, other: Request) -> bool:
        """Whether both cannot be open at once: the same rows, and one of them writes."""
        if self.segment is not other.segment or self.access is other.access is Access.READ:
            return False
        low, high = claim(self.segment, self.start, self.stop, self.access)
        start, stop = claim(other.segment, other.start, other.stop, other.access)
        return start < high and low < stop


class PageStream:
    """Hands out the requests of a schedule one by one, each as a tensor on the compute device.

    Up to `lookahead` requests are brought to staging slots before they are asked for. A request is not
    brought early while one before it in the schedule still has to write its rows, or while its rows are not
    filled yet. Rows in one extent that the compute device addresses are used where they lie: no slot, no
    copy.

    `staging` is a pool to share with other streams; without it the stream has its own, which goes with it. A
    pass holds at most `lookahead` slots and one more for each request that is open.

    `stalls` are the waits for rows that had to be copied, each with the slowest tier that they came from.
    `bytes_read` and `bytes_written` are the bytes copied, by the tier's name. `tracer` is told of the waits.
    """

    def __init__(
        self,
        store: PageStore,
        schedule: Sequence[Request],
        *,
        lookahead: int = 2,
        device: torch.device,
        staging: StagingPool | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        if lookahead < 0:
            raise ValueError(f"lookahead must be at least 0, not {lookahead}")
        self._store = store
        self._schedule = tuple(schedule)
        self._lookahead = lookahead
        self._device = device
        self._pool = staging if staging is not None else StagingPool(device)
        self._own_pool = staging is None
        self._slot_bytes: dict[State, int] = {}
        for request in self._schedule:
            state, nbytes = request.segment.state, (request.stop - request.start) * request.segment.row_bytes
            self._slot_bytes[state] = max(self._slot_bytes.get(state, 0), nbytes)
        self._cursor = 0  # the next request to be entered
        self._issued = 0  # the next request that look-ahead comes to
        self._brought: dict[int, tuple[Lease, Slot]] = {}
        self._open: dict[int, _Entry] = {}
        self._written: dict[int, Segment] = {}
        self._closed = False
        self.stalls: list[Stall] = []
        self._tracer = tracer
        self.bytes_read = dict.fromkeys(store.bytes_read, 0)
        self.bytes_written = dict.fromkeys(store.bytes_written, 0)
        self._bring_ahead()

    def next(self, segment: Segment, start: int, stop: int) -> _Entry:
        """The next request of the schedule, as a context manager that yields a tensor.

        The tensor is [stop - start, row_elements] of the state's dtype, valid inside the `with` only;
        autograd must not save it. Leaving writes back what a FILL or an UPDATE put there. An exception inside
        leaves a READ's rows as they were, a FILL's rows uncounted, and an UPDATE's pages LOST.

        Raises `StreamOrderError` if the schedule has another request next (or none), `PageLostError` if the
        rows cannot be brought or written, `PageStateError` if they were never filled or are in use elsewhere.
        """
        self._expect(segment, start, stop)
        return _Entry(self, self._cursor)

    def _expect(self, segment: Segment, start: int, stop: int) -> None:
        asked = f"rows {start}:{stop} of {segment}"
        if self._closed:
            raise StreamOrderError(f"{asked} asked for, but the stream is closed")
        if self._cursor == len(self._schedule):
            raise StreamOrderError(f"{asked} asked for, but the schedule's {self._cursor} requests are all done")
        planned = self._schedule[self._cursor]
        if planned.segment is not segment or (planned.start, planned.stop) != (start, stop):
            raise StreamOrderError(f"{asked} asked for, but request {self._cursor} of the schedule is {planned}")

    def _bring_ahead(self) -> None:
        if self._closed:
            return
        self._issued = max(self._issued, self._cursor)
        while self._issued < min(self._cursor + self._lookahead, len(self._schedule)):
            if not self._bring_early(self._issued):
                return
            self._issued += 1

    def _bring_early(self, index: int) -> bool:
        """Start the copies for a request ahead, if it needs any. False if it cannot come yet."""
        request = self._schedule[index]
        if request.access is Access.FILL:
            return True
        lease = self._store.lease(request.segment, request.start, request.stop, request.access)
        if lease.view() is not None:
            return True
        before = (*self._open, *range(self._cursor, index))
        if any(request.collides(self._schedule[i]) for i in before) or lease.refusal() is not None:
            return False
        lease.open()
        slot = self._slot(lease)
        self._bring(lease, slot)
        self._brought[index] = (lease, slot)
        return True

    def _slot(self, lease: Lease) -> Slot:
        """A slot for an open lease, which ends if there is no memory for one."""
        try:
            return self._pool.acquire(lease.nbytes, self._slot_bytes[lease.segment.state])
        except BaseException:
            lease.abandon()
            raise

    def _bring(self, lease: Lease, slot: Slot) -> None:
        try:
            lease.bring(slot.buffer[: lease.nbytes], slot.after)
        except BaseException:
            lease.abandon()
            self._pool.give_back(slot, (record(self._device),))
            raise
        for piece in lease.pieces:
            self.bytes_read[piece.pager.name] += piece.nbytes

    def _enter(self, index: int) -> tuple[Lease, Slot | None, torch.Tensor]:
        request = self._schedule[index]
        if index in self._brought:
            lease, slot = self._brought.pop(index)
            rows: torch.Tensor = slot.buffer[: lease.nbytes]
            return self._held(lease, slot, rows)
        lease = self._store.lease(request.segment, request.start, request.stop, request.access)
        lease.open()
        view = lease.view()
        if view is not None:
            return self._held(lease, None, view)
        slot = self._slot(lease)
        if request.access is not Access.FILL:
            self._bring(lease, slot)
        return self._held(lease, slot, slot.buffer[: lease.nbytes])

    def _held(self, lease: Lease, slot: Slot | None, rows: torch.Tensor) -> tuple[Lease, Slot | None, torch.Tensor]:
        # Rows used where they lie come without a wait of their own, unless a write to them is on its way.
        clock = StallClock(self._device, copied=slot is not None)
        # Pages overflow from fast tiers to slow ones, so that the last piece is on the slowest.
        tier = lease.pieces[-1].pager.name
        try:
            if slot is not None and lease.access is Access.FILL:
                for transfer in slot.after:
                    transfer.wait()
            lease.hold()
        except BaseException:
            lease.abandon()
            if slot is not None:
                self._pool.give_back(slot, (record(self._device),))
            raise
        self._note(clock.stop(tier))
        state = lease.segment.state
        # Detached: an in-place write by the consumer must not tie its graph to the slot.
        typed = rows.view(getattr(torch, state.dtype)).view(-1, state.row_elements)
        return lease, slot, typed.detach()

    def _note(self, stall: Stall) -> None:
        self.stalls.append(stall)
        if self._tracer is not None and stall.events is not None:
            self._tracer.waited(*stall.events, Track.STALL, f"wait for {stall.tier}")
        elif self._tracer is not None and stall.seconds() > 0:
            self._tracer.waited_host(stall.host, Track.STALL, f"wait for {stall.tier}")

    def _leave(self, lease: Lease, slot: Slot | None, failed: bool) -> None:
        mark: tuple[Transfer, ...] = (record(self._device),)
        try:
            if failed:
                lease.abandon()
            elif slot is None or lease.access is Access.READ:
                lease.finish()
            else:
                mark = lease.finish(slot.buffer[: lease.nbytes], mark) or mark
                self._written[id(lease.segment)] = lease.segment
                for piece in lease.pieces:
                    self.bytes_written[piece.pager.name] += piece.nbytes
        finally:
            if slot is not None:
                self._pool.give_back(slot, mark)
                if self._closed and self._own_pool:
                    self._pool.trim()

    def close(self) -> None:
        """End the look-ahead. Idempotent; requests may be left.

        Write-backs on a CUDA stream go on (who leases their rows next comes after them); those of worker
        threads are waited for if the stream's own slots are their source. Raises `PageLostError` if a
        write-back is known to have failed; its pages are LOST then, and whoever leases them is told again.
        """
        if self._closed:
            return
        self._closed = True
        for lease, slot in self._brought.values():
            lease.abandon()
            self._pool.give_back(slot, (record(self._device),))
        self._brought.clear()
        if self._own_pool:
            self._pool.trim()
        failures = [segment.settle() for segment in self._written.values()]
        self._written.clear()
        for cause in failures:
            if cause is not None:
                raise PageLostError(f"a write-back failed: {cause}") from cause

    def __enter__(self) -> PageStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except PageLostError as lost:
            error.add_note(f"while closing the stream: {lost}")  # the first error is the one to raise


class _Entry:
    """One request of a stream, entered once."""

    __slots__ = ("_index", "_lease", "_slot", "_stream")

    def __init__(self, stream: PageStream, index: int) -> None:
        self._stream = stream
        self._index = index
        self._lease: Lease | None = None
        self._slot: Slot | None = None

    def __enter__(self) -> torch.Tensor:
        stream, index = self._stream, self._index
        request = stream._schedule[index]
        if index != stream._cursor or stream._closed:
            raise StreamOrderError(f"{request} was entered late or twice: the stream is at {stream._cursor}")
        self._lease, self._slot, rows = stream._enter(index)
        stream._cursor += 1
        stream._open[index] = self
        try:
            stream._bring_ahead()
        except BaseException:
            self._end(failed=True)
            raise
        return rows

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(failed=error is not None)
        if error is None:
            self._stream._bring_ahead()

    def _end(self, *, failed: bool) -> None:
        assert self._lease is not None
        del self._stream._open[self._index]
        self._stream._leave(self._lease, self._slot, failed)
