"""Whatever the disk does: the right gradients or a clear error, nothing held, and the next transaction is fine."""

from __future__ import annotations

import copy
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw import Runtime
from longstraw.errors import CapacityError, ConfigError, PageLostError
from longstraw.pagers import HostPager, StagingPool, arena, host
from longstraw.runtime import tiers as tiers_module
from tests.pagers.test_run_directory import crash, kill
from tests.parity.models import assert_idle, assert_parity, build, make_group, plain_step, replay_group, settings
from tests.runtime.faults import Entry, assert_undone

GROUP = make_group(61, (7, 1, 6, 5))
"""61 tokens in pages of 16, 60 of them captured: an odd tail."""

Call = Callable[[int, list[Any], int], int]


class Bench:
    """A model whose pages are all on disk, and how often the disk is written and read in one transaction."""

    def __init__(self, path: Path) -> None:
        self.model = build("qwen3")
        tiers = [{"kind": "nvme", "path": str(path), "budget": "64MiB", "threads": 2, "block": "64KiB"}]
        self.runtime = Runtime(self.model, settings(tiers=tiers))
        self.reference = copy.deepcopy(self.model)
        plain_step(self.reference, [GROUP])

    @property
    def file(self) -> Any:
        return self.runtime._engine.store.pagers[0]._file  # type: ignore[attr-defined]

    def run(self) -> None:
        with self.runtime.transaction(GROUP.prompt) as txn:
            txn.score(GROUP.responses)
            replay_group(txn, GROUP)

    def assert_right(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.run()
        assert_parity(self.model, self.reference)

    def assert_survives(self) -> None:
        """The fault is there, and nobody sees it."""
        self.assert_right()

    def assert_fails(self, error: type[BaseException], words: str) -> None:
        self.model.zero_grad(set_to_none=True)
        entry = Entry(self.model)
        with pytest.raises(error, match=words):
            self.run()
        assert_undone(self.runtime, self.model, entry)


def open_files() -> int:
    """Of this process, less those that only garbage of earlier tests still holds."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    # Threads of earlier tests may end meanwhile.
    files, threads = open_files(), set(threading.enumerate())
    made = Bench(tmp_path)
    yield made
    made.assert_right()  # after every fault, in every test
    made.runtime.close()
    assert list(tmp_path.iterdir()) == []
    assert open_files() == files
    assert set(threading.enumerate()) <= threads


def at_call(call: Call, number: int, wrong: Call, *, once: bool = False) -> Call:
    """`call`, but `wrong` from its call of this number (from 0) on, or at that call alone."""
    count, lock = [0], threading.Lock()

    def replaced(fd: int, data: list[Any], offset: int) -> int:
        with lock:
            at, count[0] = count[0], count[0] + 1
        return wrong(fd, data, offset) if at == number or (at > number and not once) else call(fd, data, offset)

    replaced.count = count  # type: ignore[attr-defined]
    return replaced


def failing(code: int) -> Call:
    def fail(fd: int, data: list[Any], offset: int) -> int:
        raise OSError(code, os.strerror(code))

    return fail


ONCE = pytest.mark.parametrize("once", [False, True], ids=["from then on", "once"])
"""A fault that passes is the harder one: nothing later stumbles over it."""


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_short_calls(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = getattr(os, name)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, at_call(real, 3, lambda fd, data, at: real(fd, [data[0][:4096]], at)))
        bench.assert_survives()


@ONCE
def test_no_room_at_every_nth_write(bench: Bench, monkeypatch: pytest.MonkeyPatch, once: bool) -> None:
    """posix_fallocate has the blocks, yet copy-on-write and thin disks may still say so."""
    real = os.pwritev
    counted = at_call(real, 1 << 30, real)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", counted)
        bench.run()
    writes = counted.count[0]  # type: ignore[attr-defined]
    assert writes > 20
    for number in range(writes - 4):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", at_call(real, number, failing(errno.ENOSPC), once=once))
            bench.assert_fails(PageLostError, "No space left on device")
        if number % 5 == 0:
            bench.assert_right()
    # The last writes are of gradients that nobody reads again: whether they are seen to fail is a matter of time.
    for number in range(writes - 4, writes):
        bench.model.zero_grad(set_to_none=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", at_call(real, number, failing(errno.ENOSPC), once=once))
            try:
                bench.run()
            except PageLostError:
                assert all(p.grad is None for p in bench.model.parameters())
            else:
                assert_parity(bench.model, bench.reference)


@ONCE
@pytest.mark.parametrize(("name", "number"), [("preadv", 0), ("preadv", 25), ("preadv", 70), ("pwritev", 9)])
def test_bad_blocks(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, number: int, once: bool) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, name, at_call(getattr(os, name), number, failing(errno.EIO), once=once))
        bench.assert_fails(PageLostError, "Input/output error")


@ONCE
@pytest.mark.parametrize("number", [2, 30, 70])
def test_a_flipped_byte(bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int, once: bool) -> None:
    real = os.preadv

    def flip(fd: int, data: list[Any], offset: int) -> int:
        done = real(fd, data, offset)
        data[0][100] ^= 4
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", at_call(real, number, flip, once=once))
        bench.assert_fails(PageLostError, "another checksum")


@pytest.mark.parametrize("number", [0, 9, 17])
def test_a_byte_that_flips_on_its_way_to_the_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = os.pwritev

    def flip(fd: int, data: list[Any], offset: int) -> int:
        # The buffer itself stays as it is: only the disk has the wrong byte. Direct I/O wants aligned memory.
        data[0][100] ^= 4
        done = real(fd, data, offset)
        data[0][100] ^= 4
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", at_call(real, number, flip, once=True))
        bench.assert_fails(PageLostError, "another checksum")


@pytest.mark.parametrize("number", [0, 9, 17])
def test_a_write_that_never_arrives(bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The disk says that it wrote all of it."""
    real = os.pwritev
    with monkeypatch.context() as patch:
        lost = at_call(real, number, lambda fd, data, offset: len(data[0]), once=True)
        patch.setattr(os, "pwritev", lost)
        bench.assert_fails(PageLostError, "another checksum")


def test_a_flipped_byte_without_checksums_would_train_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.runtime.close()
    tiers = [{"kind": "nvme", "path": str(tmp_path), "budget": "64MiB", "checksum": False, "engine": "posix"}]
    bench.runtime = Runtime(bench.model, settings(tiers=tiers))
    real = os.preadv

    def flip(fd: int, data: list[Any], offset: int) -> int:
        done = real(fd, data, offset)
        data[0][103] ^= 4
        return done

    monkeypatch.setattr(os, "preadv", flip)
    with pytest.raises(AssertionError):
        bench.assert_right()
    bench.runtime.close()


def test_a_truncated_file(bench: Bench) -> None:
    bench.model.zero_grad(set_to_none=True)
    entry = Entry(bench.model)
    with pytest.raises(PageLostError, match="the file ended at byte"):  # noqa: PT012, SIM117
        with bench.runtime.transaction(GROUP.prompt) as txn:
            txn.score(GROUP.responses)
            os.ftruncate(bench.file._buffered, 4096)
            replay_group(txn, GROUP)
    assert_undone(bench.runtime, bench.model, entry)


def test_a_file_removed_under_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a filesystem where it has a name: what is open stays, and closing finds nothing to remove."""

    def refuse(name: str, *, dir_fd: int | None = None) -> None:
        raise OSError(errno.EBUSY, "busy")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.warns(RuntimeWarning, match="stays until the tier is closed"):
            bench = Bench(tmp_path)
    (folder,) = tmp_path.iterdir()
    with bench.runtime.transaction(GROUP.prompt) as txn:
        txn.score(GROUP.responses)
        (folder / "pages").unlink()
        replay_group(txn, GROUP)
    assert_parity(bench.model, bench.reference)
    assert_idle(bench.runtime)
    bench.assert_right()
    bench.runtime.close()
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_directory(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    if os.geteuid() == 0:
        # Modes do not keep root out; of /sys the kernel lets nobody make a directory.
        folder = Path("/sys")
    model, before = build("qwen3"), open_files()
    tiers = [{"kind": "nvme", "path": str(folder), "budget": "auto", "engine": "posix"}]
    with pytest.raises(ConfigError, match=rf"tiers\[0\].path: no file can be made in {folder} .*you may write to"):
        Runtime(model, settings(tiers=tiers))
    assert open_files() == before


def test_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def open_(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    with pytest.warns(RuntimeWarning, match="does not take direct I/O"):
        bench = Bench(tmp_path)
    bench.assert_right()
    bench.runtime.close()


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    first, second = Bench(tmp_path), Bench(tmp_path)
    with first.runtime.transaction(GROUP.prompt) as txn:
        txn.score(GROUP.responses)
        second.assert_right()
        second.runtime.close()
        replay_group(txn, GROUP)
    assert_parity(first.model, first.reference)
    first.runtime.close()


def test_a_run_after_one_that_was_killed_in_the_middle_of_a_spill(tmp_path: Path) -> None:
    dead = crash(tmp_path, named=True)
    kill(dead)
    (left,) = tmp_path.iterdir()
    assert (left / "pages").stat().st_size >= 8 << 20
    bench = Bench(tmp_path)
    assert list(tmp_path.iterdir()) == []
    bench.assert_right()
    bench.assert_right()
    bench.runtime.close()


def test_staging_exhausted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = StagingPool._acquire, [0]

    def refuse(self: StagingPool, nbytes: int, new_bytes: int | None) -> Any:
        count[0] += 1
        if count[0] > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. (no room for a slot)")
        return real(self, nbytes, new_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(StagingPool, "_acquire", refuse)
        bench.assert_fails(CapacityError, "no room for a slot")


class Locker:
    """In the place of CUDA: registers `allowed` slices, and refuses what comes after."""

    name = "test"

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.allowed = 1 << 30

    def register(self, address: int, nbytes: int) -> int:
        if len(self.held) >= self.allowed:
            return 2
        self.held.add(address)
        return 0

    def unregister(self, address: int) -> int:
        self.held.remove(address)
        return 0


@pytest.mark.parametrize("allowed", [0, 2])
def test_registration_refused(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    """A host tier as on a GPU, but for the streams: the prompt is refused, and fits once CUDA locks again."""
    locker = Locker()
    monkeypatch.setattr(arena, "make_locker", lambda device: locker)
    monkeypatch.setattr(arena, "REGISTER_BYTES", 16 << 10)
    monkeypatch.setattr(host, "side_streams", lambda device: (None, None))
    monkeypatch.setattr(
        tiers_module, "HostPager", lambda budget, device, **rest: HostPager(budget, torch.device("cuda"), **rest)
    )
    model = build("qwen3")
    reference = copy.deepcopy(model)
    plain_step(reference, [GROUP])
    entry = Entry(model)
    with Runtime(model, settings(tiers=[{"kind": "host", "budget": "64MiB"}])) as runtime:
        locker.allowed = allowed
        with pytest.raises(CapacityError, match=r"CUDA did not lock .*error 2"), runtime.transaction(GROUP.prompt):
            pass
        assert_undone(runtime, model, entry)
        assert locker.held == set()
        locker.allowed = 1 << 30
        model.zero_grad(set_to_none=True)
        with runtime.transaction(GROUP.prompt) as txn:
            txn.score(GROUP.responses)
            replay_group(txn, GROUP)
        assert_parity(model, reference)
        assert len(locker.held) > 2
    assert locker.held == set()


def test_a_budget_that_is_too_small(tmp_path: Path) -> None:
    tiers = [{"kind": "nvme", "path": str(tmp_path), "budget": "16KiB", "engine": "posix"}]
    model = build("qwen3")
    entry = Entry(model)
    with Runtime(model, settings(tiers=tiers)) as runtime:
        with pytest.raises(CapacityError, match=r"raise tiers\[0\].budget by"), runtime.transaction(GROUP.prompt):
            pass
        assert_undone(runtime, model, entry)


@pytest.mark.parametrize("view", ["transposed", "strided", "another dtype"])
def test_views_whose_bytes_do_not_lie_in_order(bench: Bench, view: str) -> None:
    pager = bench.runtime._engine.store.pagers[0]
    extent = pager.allocate(4096)
    rows = torch.zeros(64, 64, dtype=torch.uint8)
    tensor = {"transposed": rows.T, "strided": rows.view(-1)[::2], "another dtype": rows.view(torch.int32)[0]}[view]
    for copy_ in (pager.read, pager.write):
        with pytest.raises(ValueError, match=r"contiguous uint8 \[n\]"):
            copy_(extent, 0, tensor)
    pager.free(extent)
