"""What a tier on a disk leaves in the page cache: nothing with direct I/O, and what it can give back without."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from longstraw.pagers import NvmePager

Advice = tuple[int, int, int]


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> list[Advice]:
    """Each piece of advice that the kernel is given: offset, length, what."""
    given: list[Advice] = []
    real = os.posix_fadvise

    def advise(fd: int, offset: int, length: int, what: int) -> None:
        given.append((offset, length, what))
        real(fd, offset, length, what)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return given


def write_and_read(path: Path) -> NvmePager:
    pager = NvmePager(path, 1 << 22, torch.device("cpu"))
    extent = pager.allocate(1 << 20)
    source, target = torch.ones(1 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
    pager.write(extent, 0, source).wait()
    pager.read(extent, 0, target).wait()
    assert torch.equal(source, target)
    return pager


def test_buffered_pages_are_dropped_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advice: list[Advice]
) -> None:
    real = os.open

    def open_(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    with pytest.warns(RuntimeWarning, match="does not take direct I/O"):
        pager = write_and_read(tmp_path)
    # All of it when it was written, and again when it was read: by then the kernel has no reason to keep it.
    assert advice == [(0, 1 << 20, os.POSIX_FADV_DONTNEED)] * 2
    pager.close()


def test_direct_pages_never_get_there(tmp_path: Path, advice: list[Advice]) -> None:
    pager = write_and_read(tmp_path)
    if not pager._file.direct:
        pytest.skip("the temporary folder's filesystem takes no direct I/O")
    assert advice == []
    pager.close()
