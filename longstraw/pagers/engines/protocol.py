"""What reads and writes the nvme tier's file: one block at a time, from a buffer of its own making."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from longstraw.config import AUTO, Auto

THREADS = 4
BLOCK_BYTES = 4 << 20
QUEUE_DEPTH = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How an engine cuts its work.

    Attributes:
        threads: operations on their way at once, each of one block.
        block: bytes of one operation.
        queue_depth: requests that an engine with a queue cuts each operation into; `auto` elsewhere.
    """

    threads: int = THREADS
    block: int = BLOCK_BYTES
    queue_depth: int | Auto = AUTO

    @property
    def requests(self) -> int:
        """The queue depth as a number."""
        return QUEUE_DEPTH if self.queue_depth == AUTO else self.queue_depth

    @property
    def request_bytes(self) -> int:
        """Bytes of one request in the queue, whole disk sectors."""
        return max(self.block // self.requests // 4096 * 4096, 4096)


class Buffer(Protocol):
    """Host memory that an engine can use: as a uint8 tensor, and for Python's own calls."""

    memory: torch.Tensor
    bytes: memoryview

    def close(self) -> None:
        """Give the memory back."""


class DiskEngine(Protocol):
    """Reads and writes one file. Offsets, sizes and places in a buffer are whole sectors.

    Calls block and come from several threads; each thread's call has a buffer that no other uses. A call that
    returns has moved every byte: whatever the engine below reports is checked, and anything else raises OSError.
    """

    @property
    def name(self) -> str:
        """What `tiers[i].engine` calls it."""

    def make_buffer(self, nbytes: int) -> Buffer:
        """Memory for one operation."""

    def read(self, buffer: Buffer, start: int, stop: int, offset: int) -> None:
        """Fill bytes [start, stop) of the buffer from the file's `offset` on."""

    def write(self, buffer: Buffer, start: int, stop: int, offset: int) -> None:
        """Write bytes [start, stop) of the buffer at the file's `offset`."""

    def describe(self) -> str:
        """How it works, for people."""

    def close(self) -> None:
        """No operation is on its way. The file stays open: it is the pager's."""


@runtime_checkable
class DeviceEngine(DiskEngine, Protocol):
    """One that also moves bytes between the file and GPU memory by itself."""

    def read_device(self, target: torch.Tensor, offset: int) -> None:
        """Fill GPU memory, uint8 [n], of any size and at any offset."""

    def write_device(self, source: torch.Tensor, offset: int) -> None:
        """Write GPU memory, uint8 [n], of any size and at any offset."""
