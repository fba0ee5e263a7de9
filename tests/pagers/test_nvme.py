"""The nvme tier: its file leaves nothing, I/O ends in full or with an error, writes side by side lose
nothing."""

from __future__ import annotations

import errno
import gc
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from longstraw.errors import CapacityError, ConfigError, PageLostError
from longstraw.pagers import NvmePager
from longstraw.pagers.engines.protocol import BLOCK_BYTES as PART_BYTES
from longstraw.pagers.spool import SpoolFile

CPU = torch.device("cpu")
Call = Callable[[int, list[memoryview], int], int]


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def pager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NvmePager]:
    pager = NvmePager(tmp_path, 1 << 26, CPU, checksum=request.param)
    yield pager
    pager.close()


def test_nothing_is_left_and_nobody_else_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    unlink = os.unlink

    def spy(name: str, *, dir_fd: int) -> None:
        modes.append(stat.S_IMODE(os.stat(name, dir_fd=dir_fd).st_mode))
        modes.append(stat.S_IMODE(os.fstat(dir_fd).st_mode))
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", spy)
    file = SpoolFile(tmp_path)
    assert modes == [0o600, 0o700]
    assert list(tmp_path.iterdir()) == []
    file.close()
    file.close()


def test_a_file_that_cannot_be_unlinked_goes_on_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *, dir_fd: int) -> None:
        raise OSError(errno.EBUSY, "busy")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.warns(RuntimeWarning, match="stays until the tier is closed"):
            file = SpoolFile(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_tier_that_is_dropped_gives_its_file_back(tmp_path: Path) -> None:
    pager = NvmePager(tmp_path, 1 << 20, CPU)
    extent = pager.allocate(8192)
    pager.write(extent, 0, noise(8192)).wait()
    held = [Path("/proc/self/fd") / str(fd) for fd in pager._file._descriptors]
    assert held
    assert all(str(fd.readlink()).startswith(str(tmp_path)) for fd in held)
    del pager
    gc.collect()
    assert not any(str(fd.readlink()).startswith(str(tmp_path)) for fd in held if fd.exists() or fd.is_symlink())


def test_a_file_that_cannot_be_unlinked_goes_when_it_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, *, dir_fd: int) -> None:
        raise OSError(errno.EBUSY, "busy")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.warns(RuntimeWarning, match="stays until the tier is closed"):
            file = SpoolFile(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    del file
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_path_must_be_a_directory_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"tiers\[i\].path: .*nowhere is not a directory"):
        NvmePager(tmp_path / "nowhere", 1 << 20, CPU)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"tiers\[i\].path: .*denied"):
        NvmePager(tmp_path, 1 << 20, CPU)


@pytest.mark.parametrize("at", ["open", "write"])
def test_buffered_where_direct_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    real_open, real_write = os.open, os.pwritev
    direct: set[int] = set()

    def open_(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT and at == "open":
            raise OSError(errno.EINVAL, "no direct I/O")
        fd = real_open(path, flags, *args, **kwargs)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def write(fd: int, data: list[memoryview], offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real_write(fd, data, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwritev", write)
    with pytest.warns(RuntimeWarning, match="does not take direct I/O") as warned:
        pager = NvmePager(tmp_path, 1 << 20, CPU)
    assert len(warned) == 1
    assert "buffered" in pager.describe()
    extent, source, target = pager.allocate(8192), noise(5000), torch.empty(5000, dtype=torch.uint8)
    pager.write(extent, 3, source).wait()
    pager.read(extent, 3, target).wait()
    assert torch.equal(source, target)
    pager.close()


def short(call: Call, rng: random.Random) -> Call:
    """A call that does a part of what it is asked, whole sectors or not, and sometimes nothing at all."""

    def part(fd: int, data: list[memoryview], offset: int) -> int:
        size = len(data[0])
        done = call(fd, data, offset)
        return done if size <= 4096 else rng.choice((size, size - 1, size // 2, 4096, max(4096, size - 5000)))

    return part


def test_short_calls_are_continued(pager: NvmePager, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = pager.allocate(4 << 20)
    source, target = noise(3_000_001), torch.empty(3_000_001, dtype=torch.uint8)
    monkeypatch.setattr(os, "pwritev", short(os.pwritev, random.Random(0)))
    monkeypatch.setattr(os, "preadv", short(os.preadv, random.Random(1)))
    pager.write(extent, 1, source).wait()
    pager.read(extent, 1, target).wait()
    assert torch.equal(source, target)


def test_calls_that_do_nothing_end_in_an_error(pager: NvmePager, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = pager.allocate(1 << 20)
    monkeypatch.setattr(os, "pwritev", lambda fd, data, offset: 0)
    with pytest.raises(OSError, match="no write went on at byte 0"):
        pager.write(extent, 0, noise(1 << 20)).wait()
    monkeypatch.setattr(os, "preadv", lambda fd, data, offset: 0)
    with pytest.raises(OSError, match="the file ended at byte 0"):
        pager.read(extent, 0, torch.empty(1 << 20, dtype=torch.uint8)).wait()


def test_error_is_raised_by_every_way_to_wait(pager: NvmePager, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = pager.allocate(1 << 20)

    def fail(fd: int, data: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "bad block")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        failed = pager.write(extent, 0, noise(1 << 20))
        for wait in (failed.wait, failed.result, lambda: failed.order(None)):
            with pytest.raises(OSError, match="bad block"):
                wait()
        assert failed.done()
    # A read that comes after the failed write fails with it; a new write is as good as ever.
    target = torch.empty(1 << 20, dtype=torch.uint8)
    with pytest.raises(OSError, match="bad block"):
        pager.read(extent, 0, target, (failed,)).wait()
    pager.write(extent, 0, noise(1 << 20)).wait()
    pager.read(extent, 0, target).wait()
    assert torch.equal(target, noise(1 << 20))


def test_a_failed_write_spares_the_rows_beside_it(pager: NvmePager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of it may have reached the disk: the unit's checksum is neither that of before nor of what was asked."""
    extent, source = pager.allocate(1 << 20), noise(8192)
    pager.write(extent, 0, source).wait()
    write = os.pwritev

    def fail_late(fd: int, data: list[memoryview], offset: int) -> int:
        write(fd, data, offset)
        raise OSError(errno.EIO, "bad block")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail_late)
        with pytest.raises(OSError, match="bad block"):
            pager.write(extent, 4096, torch.zeros(4096, dtype=torch.uint8)).wait()
    target = torch.empty(4096, dtype=torch.uint8)
    pager.read(extent, 0, target).wait()
    assert torch.equal(target, source[:4096])


def test_full_disk_says_how_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pager = NvmePager(tmp_path, 1 << 40, CPU)
    fallocate = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        if size > 1 << 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match=r"2.00 GiB asked for.* free on its filesystem"):
        pager.grow_to(2 << 30)
    assert pager.largest_free() == 0
    pager.allocate(4096)
    pager.close()


def test_neighbours_in_one_unit_do_not_lose_bytes(pager: NvmePager) -> None:
    extent = pager.allocate(1 << 20)
    source, target = noise(1 << 20), torch.empty(1 << 20, dtype=torch.uint8)
    cuts = sorted(random.Random(3).sample(range(1, 1 << 20), 300))
    ranges = list(zip([0, *cuts], [*cuts, 1 << 20], strict=True))
    random.Random(4).shuffle(ranges)
    writes = [pager.write(extent, low, source[low:high]) for low, high in ranges]
    for write in writes:
        write.wait()
    pager.read(extent, 0, target).wait()
    assert torch.equal(source, target)


def test_without_the_lock_neighbours_lose_bytes(pager: NvmePager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of the test above, taken away: two writes of one unit read it, then both write it."""
    import contextlib
    import threading

    monkeypatch.setattr(pager._lock, "hold", lambda *args, **kwargs: contextlib.nullcontext())
    both_have_read = threading.Barrier(2)
    write = os.pwritev

    def late(fd: int, data: list[memoryview], offset: int) -> int:
        both_have_read.wait(timeout=30)
        return write(fd, data, offset)

    extent = pager.allocate(4096)
    pager.write(extent, 0, torch.zeros(4096, dtype=torch.uint8)).wait()
    monkeypatch.setattr(os, "pwritev", late)
    ones = torch.ones(100, dtype=torch.uint8)
    for transfer in [pager.write(extent, 0, ones), pager.write(extent, 200, ones)]:
        transfer.wait()
    assert os.pread(pager._file._buffered, 4096, extent.offset).count(1) == 100


def test_the_free_end_grows(tmp_path: Path) -> None:
    pager = NvmePager(tmp_path, 4 * 4096, CPU)
    pager.grow_to(2 * 4096)
    pager.allocate(4096)
    assert pager.allocate(3 * 4096).offset == 4096
    pager.close()


def test_long_copies_are_cut(pager: NvmePager) -> None:
    nbytes = 2 * PART_BYTES + 4097
    first, extent = pager.allocate(4096), pager.allocate(3 * PART_BYTES)
    assert (first.offset, extent.offset) == (0, 4096)
    source, target = noise(nbytes), torch.empty(nbytes, dtype=torch.uint8)
    pager.write(extent, 4095, source).wait()
    pager.read(extent, 4095, target).wait()
    assert torch.equal(source, target)


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    pager = NvmePager(tmp_path, 1 << 20, CPU)
    unchecked = NvmePager(tmp_path, 1 << 20, CPU, checksum=False, name="unchecked")
    for tier in (pager, unchecked):
        extent, target = tier.allocate(1 << 18), torch.empty(1 << 18, dtype=torch.uint8)
        tier.write(extent, 0, noise(1 << 18)).wait()
        os.pwrite(tier._file._buffered, b"\0\1", 70_000)
        if tier is unchecked:
            tier.read(extent, 0, target).wait()
            continue
        tier.read(extent, 0, target[:65_536]).wait()
        with pytest.raises(PageLostError, match=r"bytes 65536:131072 of its file in .* are not what was written"):
            tier.read(extent, 0, target).wait()
        with pytest.raises(PageLostError, match="checksum"):  # a write must not give the bytes beside it a new sum
            tier.write(extent, 66_000, noise(100)).wait()
    pager.close()
    unchecked.close()


def test_close_gives_everything_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pager = NvmePager(tmp_path, 1 << 20, CPU)
    pager.write(pager.allocate(4096), 0, noise(4096))
    pager.close()
    pager.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_bad_unit_that_was_freed_does_not_fail_the_next_write(tmp_path: Path) -> None:
    pager = NvmePager(tmp_path, 1 << 20, CPU)
    first, second = pager.allocate(8192), pager.allocate(1 << 17)  # the first unit is shared by both
    pager.write(first, 0, noise(8192)).wait()
    pager.write(second, 0, noise(1 << 17)).wait()
    os.pwrite(pager._file._buffered, b"bad", 5)
    os.pwrite(pager._file._buffered, b"bad", 70_000)
    pager.free(first)
    first = pager.allocate(8192)
    with pytest.raises(PageLostError, match="checksum"):  # the neighbour's bytes in it may be the bad ones
        pager.write(first, 0, noise(8192)).wait()
    pager.free(second)
    pager.free(first)
    again = pager.allocate(1 << 17)
    source, target = noise(100_000, 7), torch.empty(100_000, dtype=torch.uint8)
    pager.write(again, 9, source).wait()
    pager.read(again, 9, target).wait()
    assert torch.equal(source, target)
    pager.close()


def test_a_bad_last_unit_that_the_budget_ends_inside_is_forgotten_too(tmp_path: Path) -> None:
    pager = NvmePager(tmp_path, 98_304, CPU)
    extent = pager.allocate(98_304)
    pager.write(extent, 0, noise(98_304)).wait()
    os.pwrite(pager._file._buffered, b"bad", 5)
    os.pwrite(pager._file._buffered, b"bad", 70_000)
    pager.free(extent)
    again, source, target = pager.allocate(98_304), noise(98_000, 7), torch.empty(98_000, dtype=torch.uint8)
    pager.write(again, 9, source).wait()
    pager.read(again, 9, target).wait()
    assert torch.equal(source, target)
    pager.close()
