"""The nvme tier: one file, read and written in whole units by worker threads through aligned buffers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Literal
from zlib import crc32

import torch

from longstraw.errors import CapacityError, PageLostError
from longstraw.pagers.arena import HostArena
from longstraw.pagers.extents import ExtentAllocator
from longstraw.pagers.protocol import Extent
from longstraw.pagers.range_lock import RangeLock
from longstraw.pagers.spool import SECTOR, SpoolFile
from longstraw.pagers.transfer import ThreadTransfer, Transfer, record_on, side_streams
from longstraw.resident.placement import format_bytes

THREADS = 4
PART_BYTES = 4 << 20
"""A copy is cut where the file's offset is a multiple of this; each worker has one buffer of this size."""
CHECKED_BYTES = 64 << 10
"""Bytes under one checksum, and so the unit of I/O with checksums; without, it is a sector."""
_UNKNOWN = -1


class NvmePager:
    """`budget` bytes of one file under `path`.

    Every read and write is of whole units. A write that ends inside one reads it first and puts its bytes in;
    a lock on the bytes keeps two such writes from losing each other's. With `checksum` each unit's CRC-32 is
    kept in memory and compared whenever the unit is read.

    Raises `ConfigError` if `path` is no directory that files can be made in.
    """

    kind: Literal["nvme"] = "nvme"

    def __init__(
        self,
        path: Path | str,
        budget: int,
        device: torch.device,
        *,
        checksum: bool = True,
        name: str = "nvme",
    ) -> None:
        self.name = name
        self.device = device
        self.budget = budget
        self.peak = 0
        self._extents = ExtentAllocator()
        self._file = SpoolFile(Path(path))
        self._unit = CHECKED_BYTES if checksum else SECTOR
        self._sums = array("q") if checksum else None
        self._lock = RangeLock()
        self._buffers: SimpleQueue[HostArena] = SimpleQueue()
        self._workers: ThreadPoolExecutor | None = ThreadPoolExecutor(THREADS, "longstraw-nvme")
        self._in, self._out = side_streams(device)
        for _ in range(THREADS):
            self._buffers.put(HostArena(PART_BYTES, device))

    @property
    def used(self) -> int:
        """Bytes allocated now."""
        return self._extents.used

    def grow_to(self, nbytes: int) -> None:
        if nbytes > self._extents.capacity:
            self._grow(nbytes - self._extents.capacity)

    def _grow(self, nbytes: int) -> None:
        size = self._extents.capacity + nbytes
        if size > self.budget:
            raise CapacityError(
                f"tier {self.name}: {format_bytes(nbytes)} more asked for in one piece, "
                f"{format_bytes(self.used)} of {format_bytes(self.budget)} used, the largest hole is "
                f"{format_bytes(self.largest_free())}; raise its tiers[i].budget"
            )
        units = -(-size // self._unit)
        self._file.grow(units * self._unit)
        self._extents.extend(nbytes)
        if self._sums is not None:
            self._sums.extend([_UNKNOWN] * (units - len(self._sums)))

    def largest_free(self) -> int:
        return self._extents.largest_free()

    def allocate(self, nbytes: int) -> Extent:
        offset = self._extents.allocate(nbytes)
        if offset is None:
            self._grow(nbytes - self._extents.free_tail())
            offset = self._extents.allocate(nbytes)
            assert offset is not None
        self.peak = max(self.peak, self.used)
        return Extent(self.name, offset, nbytes)

    def free(self, extent: Extent) -> None:
        self._extents.free(extent.offset, extent.nbytes)

    def view(self, extent: Extent, offset: int, nbytes: int) -> torch.Tensor | None:
        return None

    def read(self, extent: Extent, offset: int, target: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        return self._submit(self._read_part, extent.offset + offset, target, tuple(after))

    def write(self, extent: Extent, offset: int, source: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        return self._submit(self._write_part, extent.offset + offset, source, tuple(after))

    def _submit(
        self,
        work: Callable[[int, torch.Tensor, tuple[Transfer, ...]], None],
        start: int,
        tensor: torch.Tensor,
        after: tuple[Transfer, ...],
    ) -> Transfer:
        """Queue the parts of a copy. Workers take them in order, so a part never waits for one behind it."""
        assert self._workers is not None, f"tier {self.name} is closed"
        parts: list[Future[None]] = []
        low, stop = start, start + tensor.numel()
        while low < stop:
            high = min(stop, low // PART_BYTES * PART_BYTES + PART_BYTES)
            parts.append(self._workers.submit(work, low, tensor[low - start : high - start], after))
            low = high
        return ThreadTransfer(tensor.numel(), parts)

    def _read_part(self, start: int, target: torch.Tensor, after: tuple[Transfer, ...]) -> None:
        for transfer in after:
            transfer.order(self._in)
        low, high = self._units_over(start, start + target.numel())
        with self._lock.hold(low, high, shared=True), self._buffer() as buffer:
            self._read_units(buffer.bytes[: high - low], low)
            self._copy(self._in, target, buffer.memory[start - low : start - low + target.numel()])

    def _write_part(self, start: int, source: torch.Tensor, after: tuple[Transfer, ...]) -> None:
        for transfer in after:
            transfer.order(self._out)
        stop = start + source.numel()
        low, high = self._units_over(start, stop)
        with self._lock.hold(low, high, shared=False), self._buffer() as buffer:
            if start > low:
                self._read_units(buffer.bytes[: self._unit], low)
            if stop < high and (start == low or high - low > self._unit):
                last = high - self._unit
                self._read_units(buffer.bytes[last - low : high - low], last)
            self._copy(self._out, buffer.memory[start - low : stop - low], source)
            self._write_units(buffer.bytes[: high - low], low)

    def _units_over(self, start: int, stop: int) -> tuple[int, int]:
        return start // self._unit * self._unit, -(-stop // self._unit) * self._unit

    def _read_units(self, data: memoryview, offset: int) -> None:
        self._file.read(data, offset)
        if self._sums is None:
            return
        for at in range(0, len(data), self._unit):
            expected = self._sums[(offset + at) // self._unit]
            if expected not in (_UNKNOWN, crc32(data[at : at + self._unit])):
                raise PageLostError(
                    f"tier {self.name}: bytes {offset + at}:{offset + at + self._unit} of its file are not "
                    "what was written: another checksum"
                )

    def _write_units(self, data: memoryview, offset: int) -> None:
        try:
            self._file.write(data, offset)
        except BaseException:
            # The rows' pages are lost. Rows beside them in the same units are whole, whichever part was
            # written.
            self._note_sums(data, offset, known=False)
            raise
        self._note_sums(data, offset, known=True)

    def _note_sums(self, data: memoryview, offset: int, *, known: bool) -> None:
        if self._sums is None:
            return
        for at in range(0, len(data), self._unit):
            self._sums[(offset + at) // self._unit] = crc32(data[at : at + self._unit]) if known else _UNKNOWN

    @contextmanager
    def _buffer(self) -> Iterator[HostArena]:
        arena = self._buffers.get()
        try:
            yield arena
        finally:
            self._buffers.put(arena)

    def _copy(self, stream: torch.cuda.Stream | None, target: torch.Tensor, source: torch.Tensor) -> None:
        if stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        record_on(stream, target.numel()).result()  # the buffer goes to another copy now

    def describe(self) -> str:
        how = "direct I/O" if self._file.direct else "buffered I/O (its filesystem refuses O_DIRECT)"
        checked = "with" if self._sums is not None else "without"
        return f"{self.name}: {format_bytes(self.budget)} in {self._file.path}, {how}, {checked} checksums"

    def close(self) -> None:
        if self._workers is None:
            return
        self._workers.shutdown(wait=True)
        self._workers = None
        self._file.close()
        while not self._buffers.empty():
            self._buffers.get().close()
        self._extents = ExtentAllocator()
