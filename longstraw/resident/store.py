"""The owner of every page: reserves them over the tiers, all or nothing, and frees them by owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from longstraw.errors import CapacityError, PageStateError
from longstraw.resident.lease import Access, Lease
from longstraw.resident.placement import (
    EXTENT_ALIGNMENT,
    HolesError,
    PlacedRun,
    Reservation,
    TierBudget,
    place,
    round_up,
)
from longstraw.resident.segment import Run, Segment

if TYPE_CHECKING:
    from longstraw.pagers.protocol import Extent, Pager

__all__ = ["PageStore", "Segment"]


class PageStore:
    """Pages of `page_rows` rows over tiers, fastest first.

    The pagers stay the caller's: `close` them after the store's last owner has released. Raises `ValueError`
    for no tier, or two of one name.

    `bytes_read` and `bytes_written` count the bytes copied from and to each tier, by its name, `reads` and
    `writes` the copies. Rows used where they lie are not copied and not counted.

    `poison` is debug mode's: called for each extent that holds nothing, when it is new, when its segment is
    voided, and before it is freed.
    """

    def __init__(
        self,
        pagers: Sequence[Pager],
        page_rows: int = 1024,
        poison: Callable[[Pager, Extent], None] | None = None,
    ) -> None:
        names = [pager.name for pager in pagers]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a store needs one pager or more, of different names, not {names}")
        if page_rows < 1:
            raise ValueError(f"page_rows must be at least 1, not {page_rows}")
        self.pagers = tuple(pagers)
        self.page_rows = page_rows
        self._poison = poison
        self._owners: dict[str, list[Segment]] = {}
        self.bytes_read = dict.fromkeys(names, 0)
        self.bytes_written = dict.fromkeys(names, 0)
        self.reads = dict.fromkeys(names, 0)
        self.writes = dict.fromkeys(names, 0)

    def reserve(self, owner: str, reservations: Sequence[Reservation]) -> list[Segment]:
        """Reserve memory for every reservation, or for none. One segment each, in the order given, all pages
        FREE.

        An owner may reserve more later. What a tier has only in holes that are too small goes to the next tier.
        Raises `CapacityError` if the tiers cannot hold them, with the figures.
        """
        in_holes = [0] * len(self.pagers)
        scattered: HolesError | None = None
        while True:
            tiers = [
                TierBudget(name=pager.name, free_bytes=pager.budget - pager.used - lost, budget_bytes=pager.budget)
                for pager, lost in zip(self.pagers, in_holes, strict=True)
            ]
            try:
                placed = place(reservations, tiers, self.page_rows)
            except CapacityError as shortage:
                raise scattered or shortage from None
            try:
                segments = self._take(owner, reservations, placed, in_holes)
            except HolesError as error:
                scattered = error
                continue
            self._owners.setdefault(owner, []).extend(segments)
            return segments

    def _take(
        self,
        owner: str,
        reservations: Sequence[Reservation],
        placed: Sequence[Sequence[PlacedRun]],
        in_holes: list[int],
    ) -> list[Segment]:
        """Memory for every run, or for none. HolesError if a tier's is too scattered, with those bytes added to its
        `in_holes`."""
        wanted = [0] * len(self.pagers)
        for runs, reservation in zip(placed, reservations, strict=True):
            for run in runs:
                wanted[run.tier] += round_up(run.rows * reservation.state.row_bytes)
        made: list[Run] = []
        segments: list[Segment] = []
        tier = 0
        try:
            for pager, nbytes in zip(self.pagers, wanted, strict=True):
                if nbytes:
                    pager.grow_to(pager.used + nbytes)
            for runs, reservation in zip(placed, reservations, strict=True):
                first = len(made)
                for placed_run in runs:
                    tier = placed_run.tier
                    self._allocate(placed_run, reservation.state.row_bytes, made)
                segments.append(Segment(owner, reservation.state, reservation.rows, self.page_rows, made[first:]))
        except BaseException as error:
            if isinstance(error, HolesError):
                left = self.pagers[tier].budget - self.pagers[tier].used
                # Doubled, for each try is a whole one: pieces of a run round up each for themselves.
                in_holes[tier] = max(in_holes[tier] + left, 2 * in_holes[tier], EXTENT_ALIGNMENT)
            for taken in made:
                taken.pager.free(taken.extent)
            raise
        return segments

    def _allocate(self, placed: PlacedRun, row_bytes: int, made: list[Run]) -> None:
        """Extents for one placed run: one if the tier has a hole of that size, else several of whole
        pages."""
        pager = self.pagers[placed.tier]
        start = placed.first_page * self.page_rows
        stop = start + placed.rows
        while start < stop:
            rows = stop - start
            hole = pager.largest_free() // row_bytes
            if hole < rows and hole >= self.page_rows:
                rows = hole // self.page_rows * self.page_rows
            extent = pager.allocate(round_up(rows * row_bytes))
            made.append(Run(tier=placed.tier, pager=pager, extent=extent, start=start, stop=start + rows))
            if self._poison is not None:
                self._poison(pager, extent)
            start += rows

    def release(self, owner: str, *, force: bool = False) -> None:
        """Free everything that the owner has, in whatever state. Unknown or already released owners have
        nothing.

        Waits for copies on their way, so that none writes into freed memory. Raises `PageStateError` if a
        lease is still open, unless `force` (for use after a failure): then the lease ends, and its tensor
        must not be used.
        """
        segments = self._owners.get(owner, [])
        for segment in segments:
            if segment.leases and not force:
                raise PageStateError(f"cannot release {owner!r}: a lease is open ({segment.leases[0]})")
        for segment in segments:
            for lease in list(segment.leases):
                lease.abandon()
            segment.void()
            segment.released = True
            for run in segment.runs:
                # What is free on a disk nobody can look at, and release must not fail where the disk does.
                if self._poison is not None and run.pager.kind != "nvme":
                    self._poison(run.pager, run.extent)
                run.pager.free(run.extent)
        self._owners.pop(owner, None)

    def void(self, segment: Segment) -> None:
        """Forget a segment's content and keep its memory: pages FREE, nothing filled, generation one higher.

        Raises `PageStateError` if a lease is open on it or it was released.
        """
        if segment.released:
            raise PageStateError(f"cannot void {segment}: it was released")
        if segment.leases:
            raise PageStateError(f"cannot void {segment}: a lease is open ({segment.leases[0]})")
        segment.void()
        if self._poison is not None:
            for run in segment.runs:
                self._poison(run.pager, run.extent)

    def lease(self, segment: Segment, start: int, stop: int, access: Access) -> Lease:
        """A lease on rows [start, stop), not yet opened."""
        return Lease(self, segment, start, stop, access)

    def usage(self) -> dict[str, dict[str, int]]:
        """Bytes of each tier, by name: `used` now, `budget`, and `peak` use so far."""
        return {p.name: {"used": p.used, "budget": p.budget, "peak": p.peak} for p in self.pagers}

    def pages_in_use(self) -> int:
        """Pages that some owner has reserved."""
        return sum(len(segment.pages) for segments in self._owners.values() for segment in segments)

    def count_read(self, tier: str, nbytes: int) -> None:
        """Count one copy from a tier."""
        self.bytes_read[tier] += nbytes
        self.reads[tier] += 1

    def count_write(self, tier: str, nbytes: int) -> None:
        """Count one copy to a tier."""
        self.bytes_written[tier] += nbytes
        self.writes[tier] += 1
