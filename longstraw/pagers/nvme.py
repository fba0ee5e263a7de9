"""The nvme tier: one file, read and written in whole units by worker threads through aligned buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import torch

from longstraw.errors import PageLostError
from longstraw.pagers.checksums import Checksums
from longstraw.pagers.engines import Buffer, DeviceEngine, EngineName, EngineSettings, choose_engine
from longstraw.pagers.extents import ExtentAllocator
from longstraw.pagers.protocol import Extent, check_rows
from longstraw.pagers.range_lock import RangeLock
from longstraw.pagers.spool import SECTOR, SpoolFile
from longstraw.pagers.trace import Tracer, Track
from longstraw.pagers.transfer import ThreadTransfer, Transfer, record_on, side_streams
from longstraw.resident.placement import HolesError, format_bytes

CHECKED_BYTES = 64 << 10
"""Bytes under one checksum, and so the unit of I/O with checksums; without, it is a sector."""


class NvmePager:
    """`budget` bytes of one file under `path`.

    Every read and write is of whole units. A write that ends inside one reads it first and puts its bytes in;
    a lock on the bytes keeps two such writes from losing each other's. With `checksum` each unit's XXH3 is
    kept in memory and compared whenever the unit is read. Without, an engine that can moves bytes between the
    file and the GPU by itself. A copy is cut where the file's offset is a multiple of `settings.block`; each
    worker has one buffer of that size.

    `disk_read` and `disk_written` count the bytes that the file was asked for and given, what a write had to
    read first and what units round up to included: the second is the wear of the disk.

    Raises `ConfigError` if `path` is no directory that files can be made in, or the engine cannot work here.
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
        engine: EngineName = "posix",
        settings: EngineSettings | None = None,
    ) -> None:
        self.name = name
        self.device = device
        self.budget = budget
        self.peak = 0
        self.tracer: Tracer | None = None
        self.disk_read = 0
        self.disk_written = 0
        self._counting = threading.Lock()
        settings = settings or EngineSettings()
        assert settings.block % CHECKED_BYTES == 0, settings
        self._block = settings.block
        self._extents = ExtentAllocator()
        self._file = SpoolFile(Path(path))
        try:
            chosen = choose_engine(engine, self._file, settings, device, checksum=checksum)
        except BaseException:
            self._file.close()
            raise
        self.engine = chosen.engine
        self._why = chosen.why
        self._unit = CHECKED_BYTES if checksum else SECTOR
        self._sums = Checksums(CHECKED_BYTES) if checksum else None
        self._to_device = self.engine if isinstance(self.engine, DeviceEngine) and self._sums is None else None
        self._lock = RangeLock()
        self._buffers: SimpleQueue[Buffer] = SimpleQueue()
        self._workers: ThreadPoolExecutor | None = ThreadPoolExecutor(settings.threads, "longstraw-nvme")
        self._in, self._out = side_streams(device)
        for _ in range(settings.threads):
            self._buffers.put(self.engine.make_buffer(settings.block))

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
            raise HolesError(
                f"tier {self.name}: {format_bytes(nbytes)} more asked for in one piece, "
                f"{format_bytes(self.used)} of {format_bytes(self.budget)} used, the largest hole is "
                f"{format_bytes(self.largest_free())}; raise its tiers[i].budget"
            )
        units = -(-size // self._unit)
        self._file.grow(units * self._unit)
        self._extents.extend(nbytes)
        if self._sums is not None:
            self._sums.grow_to(units)

    def largest_free(self) -> int:
        return self._extents.largest_free()

    def allocate(self, nbytes: int) -> Extent:
        if self.used == 0:
            # Not before: what was cut off would come back as zeros, for which there may be no checksum.
            self._file.mend()
        offset = self._extents.allocate(nbytes)
        if offset is None:
            self._grow(nbytes - self._extents.free_tail())
            offset = self._extents.allocate(nbytes)
            assert offset is not None
        self.peak = max(self.peak, self.used)
        return Extent(self.name, offset, nbytes)

    def free(self, extent: Extent) -> None:
        self._extents.free(extent.offset, extent.nbytes)
        if self._sums is not None:
            # Units that are wholly free now: a bad one must not fail the next write that begins inside it. Behind the
            # last one's end nothing is ever allocated, unless the tier grows: it is whole then as well.
            low, high = self._extents.hole_at(extent.offset)
            stop = high // self._unit * self._unit if high < self._extents.capacity else self._units_over(low, high)[1]
            self._sums.forget(-(-low // self._unit) * self._unit, stop)

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
        check_rows(tensor)
        parts: list[Future[None]] = []
        low, stop = start, start + tensor.numel()
        while low < stop:
            high = min(stop, low // self._block * self._block + self._block)
            parts.append(self._workers.submit(work, low, tensor[low - start : high - start], after))
            low = high
        return ThreadTransfer(tensor.numel(), parts)

    def _read_part(self, start: int, target: torch.Tensor, after: tuple[Transfer, ...]) -> None:
        for transfer in after:
            transfer.order(self._in)
        with self._span("read", target.numel()):
            self._read_now(start, target)

    def _read_now(self, start: int, target: torch.Tensor) -> None:
        if self._to_device is not None and target.device.type == "cuda":
            self._read_device(self._to_device, start, target)
            return
        low, high = self._units_over(start, start + target.numel())
        with self._lock.hold(low, high, shared=True), self._buffer() as buffer:
            self._read_units(buffer, 0, high - low, low)
            self._copy(self._in, target, buffer.memory[start - low : start - low + target.numel()])

    def _write_part(self, start: int, source: torch.Tensor, after: tuple[Transfer, ...]) -> None:
        for transfer in after:
            transfer.order(self._out)
        with self._span("write", source.numel()):
            self._write_now(start, source)

    def _write_now(self, start: int, source: torch.Tensor) -> None:
        if self._to_device is not None and source.device.type == "cuda":
            self._write_device(self._to_device, start, source)
            return
        stop = start + source.numel()
        low, high = self._units_over(start, stop)
        with self._lock.hold(low, high, shared=False), self._buffer() as buffer:
            if start > low:
                self._read_units(buffer, 0, self._unit, low)
            if stop < high and (start == low or high - low > self._unit):
                last = high - self._unit
                self._read_units(buffer, last - low, high - low, last)
            self._copy(self._out, buffer.memory[start - low : stop - low], source)
            self._write_units(buffer, high - low, low)

    @contextmanager
    def _span(self, what: str, nbytes: int) -> Iterator[None]:
        if self.tracer is None:
            yield
            return
        span = self.tracer.begin(Track.DISK, f"{what} {self.name}", bytes=nbytes)
        try:
            yield
        finally:
            span.end()

    def _read_device(self, engine: DeviceEngine, start: int, target: torch.Tensor) -> None:
        assert self._in is not None
        self._in.synchronize()  # what still uses the target was ordered before this stream
        low, high = self._units_over(start, start + target.numel())
        with self._lock.hold(low, high, shared=True):
            engine.read_device(target, start)
        self._count(read=target.numel())

    def _write_device(self, engine: DeviceEngine, start: int, source: torch.Tensor) -> None:
        assert self._out is not None
        self._out.synchronize()
        low, high = self._units_over(start, start + source.numel())
        # The engine may read the sectors at both ends and write them back.
        with self._lock.hold(low, high, shared=False):
            engine.write_device(source, start)
        self._count(written=high - low)

    def _units_over(self, start: int, stop: int) -> tuple[int, int]:
        return start // self._unit * self._unit, -(-stop // self._unit) * self._unit

    def _read_units(self, buffer: Buffer, start: int, stop: int, offset: int) -> None:
        self.engine.read(buffer, start, stop, offset)
        self._count(read=stop - start)
        wrong = None if self._sums is None else self._sums.first_wrong(buffer.bytes[start:stop], offset)
        if wrong is not None:
            raise PageLostError(
                f"tier {self.name}: bytes {wrong}:{wrong + self._unit} of its file in {self._file.path} are not what "
                "was written: another checksum. If it comes again, check that disk (dmesg, smartctl)"
            )

    def _write_units(self, buffer: Buffer, size: int, offset: int) -> None:
        try:
            self.engine.write(buffer, 0, size, offset)
        except BaseException:
            # The rows' pages are lost. Rows beside them in the same units are whole, whichever part was
            # written.
            if self._sums is not None:
                self._sums.forget(offset, offset + size)
            raise
        if self._sums is not None:
            self._sums.note(buffer.bytes[:size], offset)
        self._count(written=size)

    def _count(self, *, read: int = 0, written: int = 0) -> None:
        with self._counting:
            self.disk_read += read
            self.disk_written += written

    @contextmanager
    def _buffer(self) -> Iterator[Buffer]:
        buffer = self._buffers.get()
        try:
            yield buffer
        finally:
            self._buffers.put(buffer)

    def _copy(self, stream: torch.cuda.Stream | None, target: torch.Tensor, source: torch.Tensor) -> None:
        if stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        record_on(stream, target.numel()).result()  # the buffer goes to another copy now

    def describe(self) -> str:
        checked = "with" if self._sums is not None else "without"
        return (
            f"{self.name}: {format_bytes(self.budget)} in {self._file.path}, {checked} checksums, engine "
            f"{self.engine.name} ({self._why}): {self.engine.describe()}"
        )

    def close(self) -> None:
        if self._workers is None:
            return
        self._workers.shutdown(wait=True)
        self._workers = None
        while not self._buffers.empty():
            self._buffers.get().close()
        self.engine.close()
        self._file.close()
        self._extents = ExtentAllocator()
