"""A run's directory: private, leased, reclaimed when its run is dead, and never while it lives; no link is followed."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longstraw.errors import ConfigError
from longstraw.pagers import NvmePager, run_directory
from longstraw.pagers.run_directory import RunDirectory, leftovers, reclaim

CPU = torch.device("cpu")

CRASH = """
import errno, os, sys, torch
from longstraw.pagers import NvmePager
if {named}:
    def refuse(name, *, dir_fd=None):
        raise OSError(errno.EBUSY, "busy")
    os.unlink = refuse
pager = NvmePager(sys.argv[1], 1 << 24, torch.device("cpu"))
extent = pager.allocate(8 << 20)
pager.write(extent, 0, torch.ones(8 << 20, dtype=torch.uint8)).wait()
for _ in range(100):
    transfer = pager.write(extent, 0, torch.ones(8 << 20, dtype=torch.uint8))
print("spilling", flush=True)
transfer.wait()
import time; time.sleep(60)
"""


def crash(path: Path, *, named: bool) -> subprocess.Popen[str]:
    """A run that is killed in the middle of a spill."""
    command = [sys.executable, "-W", "ignore", "-c", CRASH.format(named=named), str(path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert child.stdout is not None
    assert child.stdout.readline() == "spilling\n"
    return child


def kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=20)


def test_private(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    status = directory.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o700
    assert directory.leased
    os.close(directory.open("pages", os.O_RDWR | os.O_CREAT | os.O_EXCL))
    assert stat.S_IMODE((directory.path / "pages").stat().st_mode) == 0o600
    directory.remove("pages")
    directory.close()


def test_a_killed_run_without_a_name_leaves_nothing(tmp_path: Path) -> None:
    child = crash(tmp_path, named=False)
    assert list(tmp_path.iterdir()) == []
    kill(child)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_is_reclaimed_by_the_next_and_a_live_one_is_not(tmp_path: Path) -> None:
    dead, alive = crash(tmp_path, named=True), crash(tmp_path, named=True)
    kill(dead)
    found = {f"-{dead.pid}-" in left.path.name: left for left in leftovers(tmp_path)}
    assert found[True].alive is False
    assert found[False].alive is True
    assert found[True].nbytes >= 8 << 20
    pager = NvmePager(tmp_path, 1 << 24, CPU)
    assert [left.path for left in pager._file.reclaimed] == [found[True].path]
    assert list(tmp_path.iterdir()) == [found[False].path]
    extent, source = pager.allocate(8192), torch.arange(8192).to(torch.uint8)
    target = torch.zeros_like(source)
    pager.write(extent, 0, source).wait()
    pager.read(extent, 0, target).wait()
    assert torch.equal(source, target)
    pager.close()
    assert alive.poll() is None
    kill(alive)
    reclaim(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_the_lease_a_live_run_would_lose_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    assert reclaim(tmp_path) == []
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    assert [left.path for left in reclaim(tmp_path)] == [directory.path]
    directory.close()


def test_links_and_others_directories_are_left_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "data").write_text("mine")
    (tmp_path / f".longstraw-1-{'0' * 16}").symlink_to(victim)
    (tmp_path / f".longstraw-2-{'0' * 16}").write_text("a file")
    wide = tmp_path / f".longstraw-3-{'0' * 16}"
    wide.mkdir(mode=0o755)
    inside = tmp_path / f".longstraw-4-{'0' * 16}"
    inside.mkdir(mode=0o700)
    (inside / "pages").symlink_to(victim / "data")
    gone = reclaim(tmp_path)
    assert [left.path for left in gone] == [inside]
    assert (victim / "data").read_text() == "mine"
    assert wide.is_dir()


def test_another_users_directory_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / f".longstraw-1-{'0' * 16}"
    theirs.mkdir(mode=0o700)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert leftovers(tmp_path) == reclaim(tmp_path) == []
    monkeypatch.undo()
    assert [left.path for left in reclaim(tmp_path)] == [theirs]


def test_a_link_where_the_directory_should_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / f".longstraw-{os.getpid()}-{'a' * 16}").symlink_to(victim)
    names = iter(["a" * 16, "b" * 16])
    monkeypatch.setattr(secrets, "token_hex", lambda n: next(names))
    directory = RunDirectory(tmp_path)
    assert directory.path.name.endswith("b" * 16)
    assert list(victim.iterdir()) == []
    directory.close()
    monkeypatch.setattr(secrets, "token_hex", lambda n: "a" * 16)
    with pytest.raises(ConfigError, match=r"tiers\[i\].path: no file can be made.*8 names were taken"):
        NvmePager(tmp_path, 1 << 20, CPU)
    assert list(victim.iterdir()) == []


def test_reclaimed_between_its_making_and_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, first = fcntl.flock, []

    def slow(fd: int, how: int) -> None:
        if not first:
            first.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.rmdir(first[0])
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    directory = RunDirectory(tmp_path)
    assert str(directory.path) != first[0]
    assert directory.path.is_dir()
    directory.close()


def test_no_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="does not take locks"):
        directory = RunDirectory(tmp_path)
    assert not directory.leased
    assert reclaim(tmp_path) == []
    assert [left.alive for left in leftovers(tmp_path)] == [None]
    directory.close()


def test_runs_that_come_and_go_meanwhile(tmp_path: Path) -> None:
    stop, errors = threading.Event(), []

    def again(once: Callable[[], object]) -> None:
        while not stop.is_set():
            try:
                once()
            except OSError as error:
                errors.append(error)
                stop.set()
            time.sleep(0.001)

    def come_and_go() -> None:
        directory = RunDirectory(tmp_path)
        os.close(directory.open("pages", os.O_CREAT | os.O_WRONLY))
        directory.remove("pages")
        directory.close()

    work = [come_and_go, come_and_go, lambda: reclaim(tmp_path), lambda: leftovers(tmp_path)]
    threads = [threading.Thread(target=again, args=(once,)) for once in work]
    for thread in threads:
        thread.start()
    stop.wait(3.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    reclaim(tmp_path)  # a name whose lease somebody had while he looked is given up
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_goes_between_its_listing_and_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, real = RunDirectory(tmp_path), run_directory._lock

    def late(fd: int) -> bool | None:
        if directory.path.exists():
            directory.remove()
            directory.close()
        return real(fd)

    monkeypatch.setattr(run_directory, "_lock", late)
    assert reclaim(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
