"""The host arena: exact, locked in slices side by side or refused with figures, bound to a node; what limits say."""

from __future__ import annotations

import os
import threading
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch

from longstraw.errors import CapacityError, ConfigError
from longstraw.pagers import HostPager, arena, limits, numa
from longstraw.pagers.arena import HostArena
from longstraw.pagers.numa import Binding, choose_node

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class FakeLocker:
    """Takes a while for each slice; refuses from `refuse_from` slices on."""

    name = "fake"

    def __init__(self, refuse_from: int = 1 << 30) -> None:
        self.held: dict[int, int] = {}
        self.refuse_from = refuse_from
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def register(self, address: int, nbytes: int) -> int:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(0.01)
        with self._lock:
            self.at_once -= 1
            if len(self.held) >= self.refuse_from:
                return 2
            self.held[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        del self.held[address]
        return 0


@pytest.fixture
def locker(monkeypatch: pytest.MonkeyPatch) -> FakeLocker:
    fake = FakeLocker()
    monkeypatch.setattr(arena, "make_locker", lambda device: fake)
    monkeypatch.setattr(arena, "REGISTER_BYTES", 1 << 20)
    monkeypatch.setattr(arena.os, "cpu_count", lambda: 4)
    return fake


def test_slices_side_by_side_cover_exactly(locker: FakeLocker) -> None:
    made = HostArena((10 << 20) + 4096, CUDA)
    assert made.memory.numel() == (10 << 20) + 4096
    slices = sorted(locker.held.items())
    assert slices[0][0] == made.memory.data_ptr()
    assert all(at + n == following for (at, n), (following, _) in pairwise(slices))
    assert sum(locker.held.values()) == made.memory.numel()
    assert locker.most_at_once > 1
    assert made.registered_with == "fake"
    made.close()
    assert locker.held == {}


def test_an_arena_that_is_dropped_is_unlocked(locker: FakeLocker) -> None:
    made = HostArena(3 << 20, CUDA)
    assert len(locker.held) == 3
    child = os.fork()
    if child == 0:
        # What the parent registered is not the child's to unregister.
        del made
        os._exit(len(locker.held))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    del made
    assert locker.held == {}


def test_resident_size_is_what_was_asked(locker: FakeLocker) -> None:
    before = psutil.Process().memory_info().rss
    made = HostArena(200 << 20, CUDA)
    grown = psutil.Process().memory_info().rss - before
    assert abs(grown - (200 << 20)) < 0.05 * (200 << 20)  # other allocations of the process are in it
    made.close()


@pytest.mark.parametrize("refuse_from", [0, 3])
def test_refused_registration_raises_and_holds_nothing(locker: FakeLocker, refuse_from: int) -> None:
    locker.refuse_from = refuse_from
    with pytest.raises(CapacityError, match=r"CUDA did not lock 10.00 MiB .*error 2.*ulimit -l.*pinned to false"):
        HostArena(10 << 20, CUDA)
    assert locker.held == {}


def test_the_first_slice_alone_tells(locker: FakeLocker) -> None:
    locker.refuse_from = 0
    with pytest.raises(CapacityError):
        HostArena(10 << 20, CUDA)
    assert locker.most_at_once == 1


def test_pageable_only_when_asked(locker: FakeLocker) -> None:
    made = HostArena(2 << 20, CUDA, pinned=False)
    assert made.registered_with is None
    assert locker.held == {}


def test_more_than_the_container_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{64 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{60 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {20 << 20}\n")
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    assert limits.cgroup_limits() == [(tmp_path, 64 << 20, 40 << 20)]
    assert limits.free_host_bytes() == 24 << 20
    HostArena(23 << 20, CPU)
    figures = r"25.00 MiB of host memory.*limit .* is 64.00 MiB, 40.00 MiB of it used.*to 24.00 MiB"
    with pytest.raises(CapacityError, match=figures):
        HostArena(25 << 20, CPU)


def test_version_1_of_the_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("1000000\n")
    (folder / "memory.usage_in_bytes").write_text("400000\n")
    listing = tmp_path / "cgroup"
    listing.write_text("4:memory:/not/mounted/here\n3:cpu:/\n")
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    real = limits.Path
    monkeypatch.setattr(limits, "Path", lambda path: listing if path == "/proc/self/cgroup" else real(path))
    assert limits.cgroup_limits() == [(folder, 1_000_000, 400_000)]
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert limits.cgroup_limits() == []


def test_locked_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_may_lock_all", lambda: False)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    assert limits.locked_limit() == 8 << 20
    assert "8.00 MiB" in limits.describe_locked_limit()
    assert "memlock" in limits.describe_locked_limit()
    monkeypatch.setattr(limits, "_may_lock_all", lambda: True)
    assert limits.locked_limit() is None


def test_nodes_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[i\].numa: 99 is no node"):
        choose_node(99, CPU)
    assert choose_node("off", CUDA).node is None
    assert choose_node("auto", CPU) == Binding(node=None, why="no GPU to be near to")


def test_a_binding_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, nbytes: int, node: int) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(numa, "bind", refuse)
    lifted = HostPager(1 << 20, CPU, numa=Binding(node=0, why="next to the GPU, says NVML"))
    lifted.grow_to(8192)
    assert "not bound to a NUMA node (not to node 0: [Errno 1] Operation not permitted" in lifted.describe()
    asked = HostPager(1 << 20, CPU, numa=Binding(node=0, why="as asked", asked=True))
    with pytest.raises(CapacityError, match=r"cannot be bound to NUMA node 0 .*numa to off"):
        asked.grow_to(8192)


@pytest.mark.skipif(0 not in limits.numa_nodes(), reason="the kernel shows no NUMA nodes")
def test_memory_is_bound() -> None:
    pager = HostPager(1 << 22, CPU, numa=choose_node(0, CPU))
    pager.grow_to(1 << 22)
    extent = pager.allocate(1 << 22)
    view = pager.view(extent, 0, 1 << 22)
    assert view is not None
    view.fill_(1)
    assert "bound to NUMA node 0 (as asked)" in pager.describe()
    maps = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    assert [row[1] for row in maps if row[0] == f"{view.data_ptr():x}"] == ["bind:0"]


def test_a_node_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "numa_nodes", lambda: {0: 4096})
    with pytest.raises(OSError, match="node 0 has 4096 bytes left, not 8192 bytes"):
        numa.bind(0, 8192, 0)


@pytest.mark.gpu
def test_real_registration_is_parallel_and_near() -> None:
    made = HostArena(1 << 30, torch.device("cuda", 0), node=choose_node("auto", torch.device("cuda", 0)).node)
    assert made.memory.is_pinned()
    assert made.memory[-4096:].is_pinned()
    made.close()
