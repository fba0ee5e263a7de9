"""First-fit allocation of contiguous, aligned extents, with a free list whose neighbours are merged."""

from __future__ import annotations

from bisect import bisect_left, insort

from longstraw.resident.placement import EXTENT_ALIGNMENT


class ExtentAllocator:
    """Hands out byte ranges of one or several regions. Sizes and offsets are multiples of `EXTENT_ALIGNMENT`.

    A range never crosses from one region into another.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (start, stop), sorted, no two adjacent
        self._end = 0
        self.capacity = 0
        self.used = 0

    def add_region(self, nbytes: int) -> int:
        """Add a region of its own and return its offset."""
        _check(nbytes)
        # The gap before the region keeps its ranges from being merged with those of the region before it.
        start = self._end + EXTENT_ALIGNMENT if self._end else 0
        self._end = start + nbytes
        self.capacity += nbytes
        self._insert(start, self._end)
        return start

    def extend(self, nbytes: int) -> None:
        """Make the last region longer."""
        _check(nbytes)
        start, self._end = self._end, self._end + nbytes
        self.capacity += nbytes
        self._insert(start, self._end)

    def drop_region(self, start: int, nbytes: int) -> bool:
        """Take a region away again if all of it is free; says whether it was."""
        at = bisect_left(self._free, (start, start + nbytes))
        if at == len(self._free) or self._free[at] != (start, start + nbytes):
            return False
        del self._free[at]
        self.capacity -= nbytes
        return True

    def largest_free(self) -> int:
        """Bytes of the largest hole."""
        return max((stop - start for start, stop in self._free), default=0)

    def free_tail(self) -> int:
        """Bytes of the hole at the end of the last region, which `extend` makes longer."""
        if not self._free or self._free[-1][1] != self._end:
            return 0
        start, stop = self._free[-1]
        return stop - start

    def allocate(self, nbytes: int) -> int | None:
        """The offset of the first hole that takes `nbytes`, or None."""
        _check(nbytes)
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                if stop - start == nbytes:
                    del self._free[at]
                else:
                    self._free[at] = (start + nbytes, stop)
                self.used += nbytes
                return start
        return None

    def free(self, start: int, nbytes: int) -> None:
        """Give a range back. Freeing bytes that are free already is a bug and asserts."""
        _check(nbytes)
        self._insert(start, start + nbytes)
        self.used -= nbytes

    def hole_at(self, start: int) -> tuple[int, int]:
        """The whole free range [start, stop) that byte `start`, which is free, lies in."""
        at = bisect_left(self._free, (start + 1, 0)) - 1
        low, high = self._free[at]
        assert low <= start < high, start
        return low, high

    def _insert(self, start: int, stop: int) -> None:
        at = bisect_left(self._free, (start, stop))
        assert at == len(self._free) or stop <= self._free[at][0], f"bytes {start}:{stop} are free already"
        assert at == 0 or self._free[at - 1][1] <= start, f"bytes {start}:{stop} are free already"
        if at < len(self._free) and self._free[at][0] == stop:
            stop = self._free.pop(at)[1]
        if at > 0 and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
        insort(self._free, (start, stop))


def _check(nbytes: int) -> None:
    assert nbytes > 0, nbytes
    assert nbytes % EXTENT_ALIGNMENT == 0, nbytes
