"""One checksum for each unit of a file, kept in memory: what was written is compared with what comes back."""

from __future__ import annotations

from array import array


class Checksums:
    """XXH3 (64 bits) of each `unit` bytes of a file. A unit that was never written, or whose write failed, has none."""

    def __init__(self, unit: int) -> None:
        # Here, since GPU machines that use no disk may not have it.
        from xxhash import xxh3_64_intdigest

        self._digest = xxh3_64_intdigest
        self.unit = unit
        self._sums = array("Q")
        self._known = bytearray()

    def grow_to(self, units: int) -> None:
        missing = units - len(self._known)
        self._sums.extend([0] * missing)
        self._known.extend(bytes(missing))

    def note(self, data: memoryview, offset: int) -> None:
        """`data`, whole units, is what the file has at `offset`."""
        for at in range(0, len(data), self.unit):
            index = (offset + at) // self.unit
            self._sums[index] = self._digest(data[at : at + self.unit])
            self._known[index] = 1

    def forget(self, start: int, stop: int) -> None:
        """Bytes [start, stop) of the file, whole units (none if stop is not above start), are what nobody knows."""
        first, last = start // self.unit, stop // self.unit
        self._known[first:last] = bytes(max(last - first, 0))

    def first_wrong(self, data: memoryview, offset: int) -> int | None:
        """The file's offset of the first unit in `data` that is not what was written, or None."""
        for at in range(0, len(data), self.unit):
            index = (offset + at) // self.unit
            if self._known[index] and self._sums[index] != self._digest(data[at : at + self.unit]):
                return offset + at
        return None
