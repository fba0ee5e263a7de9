"""The nvme tier's file: private, gone after a crash, read and written in full or with an error."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path

from longstraw.errors import CapacityError, ConfigError
from longstraw.resident.placement import format_bytes

SECTOR = 4096
"""Offsets, sizes and addresses of direct I/O are multiples of this."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PATIENCE = 16
_FILE = "pages"


class SpoolFile:
    """A file in a directory of its own under `path`, which must exist.

    The directory (mode 0700) and the file (0600) are created exclusively and unlinked at once, so that a
    crash leaves no bytes behind; where the filesystem refuses that, they go in `close`. Direct I/O is used if
    the filesystem takes it, else buffered I/O, with a `RuntimeWarning`; `direct` says which.

    Raises `ConfigError` if `path` is no directory that files can be made in.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._left_behind: Path | None = None
        if not path.is_dir():
            raise ConfigError(f"tiers[i].path: {path} is not a directory; create it, or name one that exists")
        directory = path / f".longstraw-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            directory.mkdir(mode=0o700)
            try:
                self._buffered, direct = self._open(directory)
            except BaseException:
                (directory / _FILE).unlink(missing_ok=True)
                directory.rmdir()
                raise
        except OSError as cause:
            raise ConfigError(
                f"tiers[i].path: no file can be made in {path} ({cause}); name one that you may write to"
            ) from cause
        self._fd = self._buffered if direct is None else direct
        self.direct = direct is not None
        try:
            self._probe()
        except BaseException:
            self.close()
            raise
        if not self.direct:
            warnings.warn(
                f"{path} does not take direct I/O (O_DIRECT): its pages go through the page cache, "
                "which takes memory that no tier's budget counts",
                RuntimeWarning,
                stacklevel=3,
            )

    def _open(self, directory: Path) -> tuple[int, int | None]:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        # Names are looked up in the opened directory: nobody can swap it for another meanwhile.
        at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            buffered = os.open(_FILE, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=at)
            direct: int | None = None
            try:
                direct = os.open(_FILE, flags | os.O_DIRECT, dir_fd=at)
            except OSError as refusal:
                if refusal.errno != errno.EINVAL:
                    os.close(buffered)
                    raise
            try:
                os.unlink(_FILE, dir_fd=at)
                directory.rmdir()
            except OSError as refusal:
                self._left_behind = directory
                warnings.warn(
                    f"{directory} stays until the tier is closed, also after a crash: {refusal}",
                    RuntimeWarning,
                    stacklevel=4,
                )
            return buffered, direct
        finally:
            os.close(at)

    def _probe(self) -> None:
        """Write and read one sector: some filesystems refuse direct I/O only then."""
        self.grow(SECTOR)
        if not self.direct:
            return
        with mmap.mmap(-1, SECTOR) as sector:
            try:
                os.pwritev(self._fd, [sector], 0)
                os.preadv(self._fd, [sector], 0)
            except OSError as refusal:
                if refusal.errno != errno.EINVAL:
                    raise
                os.close(self._fd)
                self._fd, self.direct = self._buffered, False

    def grow(self, size: int) -> None:
        """Allocate disk blocks up to `size` bytes. Raises `CapacityError`, with the figures, if there are
        none."""
        if size <= self.size:
            return
        try:
            os.posix_fallocate(self._buffered, self.size, size - self.size)
        except OSError as cause:
            os.ftruncate(self._buffered, self.size)
            if cause.errno not in _NO_ROOM:
                raise
            disk = os.fstatvfs(self._buffered)
            raise CapacityError(
                f"{self.path} cannot hold the pages: {format_bytes(size)} asked for, "
                f"{format_bytes(self.size)} had, {format_bytes(disk.f_bavail * disk.f_frsize)} free on its "
                f"filesystem ({cause}); free space there, or lower its tiers[i].budget"
            ) from cause
        self.size = size

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` from `offset` on. Raises `OSError` if the file ends before."""
        self._whole(os.preadv, into, offset, "read")

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`. Raises `OSError` if the device does not take it."""
        self._whole(os.pwritev, data, offset, "write")

    def _whole(
        self, call: Callable[[int, list[memoryview], int], int], data: memoryview, offset: int, what: str
    ) -> None:
        # Interrupted calls are repeated by Python itself (PEP 475); short ones are continued here.
        done, idle = 0, 0
        while done < len(data):
            count = call(self._fd, [data[done:]], offset + done)
            if count == 0 and what == "read":
                raise OSError(errno.EIO, f"the file ended at byte {offset + done}, {len(data) - done} bytes early")
            if self.direct and done + count < len(data):
                count -= count % SECTOR  # a direct call goes on at a whole sector
            idle = idle + 1 if count == 0 else 0
            if idle == _PATIENCE:
                raise OSError(errno.EIO, f"no {what} went on at byte {offset + done}, {idle} times in a row")
            done += count

    def close(self) -> None:
        """Close, and remove what could not be unlinked at once. Idempotent."""
        if self._buffered < 0:
            return
        if self._fd != self._buffered:
            os.close(self._fd)
        os.close(self._buffered)
        self._fd = self._buffered = -1
        if self._left_behind is not None:
            (self._left_behind / _FILE).unlink(missing_ok=True)
            self._left_behind.rmdir()
            self._left_behind = None
