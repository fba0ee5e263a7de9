"""The nvme tier's file: private, gone after a crash, read and written in full or with an error."""

from __future__ import annotations

import errno
import mmap
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

from longstraw.errors import CapacityError, ConfigError
from longstraw.pagers.run_directory import RunDirectory, reclaim
from longstraw.resident.placement import format_bytes

SECTOR = 4096
"""Offsets, sizes and addresses of direct I/O are multiples of this."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PATIENCE = 16
_FILE = "pages"


class SpoolFile:
    """A file in a directory of its own under `path`, which must exist.

    The directory (mode 0700) and the file (0600) are created exclusively and unlinked at once, so that a
    crash leaves no bytes behind; where the filesystem refuses that, they go in `close`, or when a later run
    begins there and finds the directory's lease free. Direct I/O is used if the filesystem takes it, else
    buffered I/O, with a `RuntimeWarning`; `direct` says which. `reclaimed` is what dead runs had left.

    Raises `ConfigError` if `path` is no directory that files can be made in.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._left_behind: list[RunDirectory] = []
        if not path.is_dir():
            raise ConfigError(f"tiers[i].path: {path} is not a directory; create it, or name one that exists")
        try:
            self.reclaimed = reclaim(path)
            directory = RunDirectory(path)
            try:
                self._buffered, direct = self._open(directory)
            except BaseException:
                directory.remove(*os.listdir(directory.fd))
                directory.close()
                raise
        except OSError as cause:
            raise ConfigError(
                f"tiers[i].path: no file can be made in {path} ({cause}); name one that you may write to"
            ) from cause
        self._fd = self._buffered if direct is None else direct
        self.direct = direct is not None
        self._descriptors = list({self._buffered, self._fd})
        # The file of a runtime that is dropped without `close` has no name any more, and would hold its disk blocks
        # until the process ends.
        weakref.finalize(self, _close, self._descriptors, self._left_behind, os.getpid()).atexit = False
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

    def _open(self, directory: RunDirectory) -> tuple[int, int | None]:
        buffered = directory.open(_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        direct: int | None = None
        try:
            direct = directory.open(_FILE, os.O_RDWR | os.O_DIRECT)
        except OSError as refusal:
            if refusal.errno != errno.EINVAL:
                os.close(buffered)
                raise
        try:
            directory.remove(_FILE)
        except OSError as refusal:
            # The directory stays, and its lease with it.
            self._left_behind.append(directory)
            warnings.warn(
                f"{directory.path} stays until the tier is closed, or, after a crash, until the next run there or "
                f"`longstraw clean {self.path}`: {refusal}",
                RuntimeWarning,
                stacklevel=4,
            )
        else:
            directory.close()
        return buffered, direct

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
                self._descriptors.remove(self._fd)
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

    @property
    def reopen_path(self) -> str:
        """A path by which this process opens the file again, though it has no name."""
        return f"/proc/self/fd/{self._buffered}"

    def measure(self) -> int:
        """Bytes that the file has now; fewer than `size` if someone cut it."""
        return os.fstat(self._buffered).st_size

    def mend(self) -> None:
        """Make a file that someone cut as long as it was, with zeros. Nothing that counts may be in it."""
        if self.measure() < self.size:
            size, self.size = self.size, self.measure()
            self.grow(size)

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` from `offset` on. Raises `OSError` if the file ends before."""
        self._whole(os.preadv, into, offset, "read")
        self._drop_cache(offset, len(into))

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`. Raises `OSError` if the device does not take it."""
        self._whole(os.pwritev, data, offset, "write")
        self._drop_cache(offset, len(data))

    def _drop_cache(self, offset: int, size: int) -> None:
        # Written pages are on their way to the disk then, and go when the next call finds them clean.
        if not self.direct:
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)

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
        self._fd = self._buffered = -1
        _close(self._descriptors, self._left_behind, os.getpid())


def _close(descriptors: list[int], left_behind: list[RunDirectory], pid: int) -> None:
    while descriptors:
        os.close(descriptors.pop())
    while left_behind:
        directory = left_behind.pop()
        try:
            # Someone may have removed the name under us: only what is there can go. What a forked child drops is its
            # parent's still.
            if os.getpid() == pid:
                directory.remove(*os.listdir(directory.fd))
        finally:
            directory.close()
