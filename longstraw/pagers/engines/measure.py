"""How fast an engine reads and writes, its blocks side by side on as many threads as the tier would use."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from longstraw.pagers.engines.protocol import Buffer, DiskEngine, EngineSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Bytes a second each way, and the seconds of CPU that the process spent on each gigabyte (10^9)."""

    read: float
    write: float
    read_cpu: float
    write_cpu: float

    @property
    def worse(self) -> float:
        """The slower way: a page that is written is read."""
        return min(self.read, self.write)


def measure(engine: DiskEngine, settings: EngineSettings, nbytes: int, seconds: float) -> Rates:
    """Write, then read, the file's first `nbytes` (which it must have) again and again, for `seconds` each way."""
    buffers = [engine.make_buffer(settings.block) for _ in range(settings.threads)]
    try:
        for buffer in buffers:
            buffer.memory.random_()  # a disk may do zeros without writing them
        with ThreadPoolExecutor(settings.threads, "longstraw-measure") as pool:
            write, write_cpu = _run(pool, engine.write, buffers, nbytes, seconds)
            read, read_cpu = _run(pool, engine.read, buffers, nbytes, seconds)
    finally:
        for buffer in buffers:
            buffer.close()
    return Rates(read=read, write=write, read_cpu=read_cpu, write_cpu=write_cpu)


def _run(
    pool: ThreadPoolExecutor,
    call: Callable[[Buffer, int, int, int], None],
    buffers: list[Buffer],
    nbytes: int,
    seconds: float,
) -> tuple[float, float]:
    block = buffers[0].memory.numel()
    offsets = range(0, nbytes - block + 1, block)
    cpu, began = _cpu_seconds(), time.perf_counter()

    def work(lane: int) -> int:
        done = 0
        # Every block at least once, so that what is read later has been written.
        for at in offsets[lane :: len(buffers)]:
            call(buffers[lane], 0, block, at)
            done += block
        for at in itertools.cycle(offsets[lane :: len(buffers)]):
            if time.perf_counter() - began >= seconds:
                break
            call(buffers[lane], 0, block, at)
            done += block
        return done

    moved = sum(pool.map(work, range(len(buffers))))
    return moved / (time.perf_counter() - began), (_cpu_seconds() - cpu) / (moved / 1e9)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
