"""The engine that is always there: positioned reads and writes, direct where the filesystem takes that."""

from __future__ import annotations

import torch

from longstraw.pagers.arena import HostArena
from longstraw.pagers.engines.protocol import Buffer
from longstraw.pagers.spool import SpoolFile


class PosixEngine:
    """preadv and pwritev of whole blocks by the caller's thread; short ones are continued."""

    name = "posix"

    def __init__(self, file: SpoolFile, device: torch.device) -> None:
        self._file = file
        self._device = device

    def make_buffer(self, nbytes: int) -> Buffer:
        return HostArena(nbytes, self._device)

    def read(self, buffer: Buffer, start: int, stop: int, offset: int) -> None:
        self._file.read(buffer.bytes[start:stop], offset)

    def write(self, buffer: Buffer, start: int, stop: int, offset: int) -> None:
        self._file.write(buffer.bytes[start:stop], offset)

    def describe(self) -> str:
        how = "direct I/O" if self._file.direct else "buffered I/O (its filesystem refuses O_DIRECT)"
        return f"preadv/pwritev, {how}"

    def close(self) -> None:
        """It holds nothing."""
