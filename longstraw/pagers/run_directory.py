"""A run's own directory on a disk, leased while the run lives; and what dead runs left, reclaimed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"\.longstraw-\d+-[0-9a-f]{16}")
_TRIES = 8
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RunDirectory:
    """A directory of mode 0700 under `path`, created exclusively.

    Its lease is a lock on the directory itself (flock), which the kernel lifts when the process ends, however it
    ends. Names in it are looked up from `fd`, so that nobody can swap it for another meanwhile. `leased` is False
    where the filesystem has no such locks: nobody reclaims it there, and a `RuntimeWarning` says so.

    Raises OSError if it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        for _ in range(_TRIES):
            self.path = path / f".longstraw-{os.getpid()}-{secrets.token_hex(8)}"
            try:
                self.path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            try:
                self.fd = os.open(self.path, _OPEN)
            except FileNotFoundError:
                continue  # reclaimed before it was leased
            state = _lock(self.fd)
            if state is not False and _is_at(self.fd, self.path):
                break
            os.close(self.fd)
        else:
            raise FileExistsError(errno.EEXIST, f"no new directory could be made, {_TRIES} names were taken", str(path))
        self.leased = state is True
        if not self.leased:
            warnings.warn(
                f"{path} does not take locks (flock): what this run leaves there after a crash is not reclaimed by "
                "later ones; delete it by hand",
                RuntimeWarning,
                stacklevel=4,
            )

    def open(self, name: str, flags: int) -> int:
        """Open a file in the directory, mode 0600, never through a link."""
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)

    def remove(self, *names: str) -> None:
        """Remove files of these names and the directory. Raises OSError if it must stay."""
        for name in names:
            os.unlink(name, dir_fd=self.fd)
        self.path.rmdir()

    def close(self) -> None:
        """End the lease."""
        os.close(self.fd)


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """A run's directory that was found: its size, and whether its run lives (None: that cannot be told there)."""

    path: Path
    nbytes: int
    alive: bool | None


def leftovers(path: Path) -> list[Leftover]:
    """The run directories of this user under `path`, those of live runs among them."""
    return [found for found, fd in _walk(path) if _closed(fd)]


def reclaim(path: Path) -> list[Leftover]:
    """Delete what this user's dead runs left under `path`, and say what it was.

    A run is dead when the lease of its directory can be taken. Directories of live runs, of other users, with other
    modes, and links of whatever name are left alone.
    """
    gone = []
    for found, fd in _walk(path):
        try:
            if found.alive is False:
                # The lease is ours until `fd` is closed.
                for name in os.listdir(fd):
                    os.unlink(name, dir_fd=fd)
                found.path.rmdir()
                gone.append(found)
        finally:
            os.close(fd)
    return gone


def _walk(path: Path) -> list[tuple[Leftover, int]]:
    found = []
    for entry in sorted(path.iterdir()):
        if not _NAME.fullmatch(entry.name):
            continue
        try:
            fd = os.open(entry, _OPEN)
        except OSError as refusal:
            # A link or a file of such a name is not a run's, another user's directory is not ours to open, and one
            # that has gone meanwhile is what is wanted.
            if refusal.errno in (errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOENT):
                continue
            raise
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            os.close(fd)
            continue
        state = _lock(fd)
        if state is True and not _is_at(fd, entry):
            # Its run removed it, and ended the lease, since it was listed.
            os.close(fd)
            continue
        nbytes = sum(_size(name, fd) for name in os.listdir(fd))
        found.append((Leftover(path=entry, nbytes=nbytes, alive=None if state is None else not state), fd))
    return found


def _size(name: str, fd: int) -> int:
    """Bytes of a file's blocks; 0 if its live run has removed it since it was listed."""
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0


def _closed(fd: int) -> bool:
    os.close(fd)
    return True


def _lock(fd: int) -> bool | None:
    """Take the lease: True if it was taken, False if someone has it, None if there are no locks here."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as refusal:
        if refusal.errno in (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether the opened directory still has its name: a reclaimer may have been faster than our lock."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
