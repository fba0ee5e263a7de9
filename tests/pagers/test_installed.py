"""Memory that the kernel does not count yet: budgets and arenas do, but not overhead or what is offline."""

from __future__ import annotations

import types
from pathlib import Path

import psutil
import pytest
import torch

from longstraw.config import Config
from longstraw.doctor import Level, memory
from longstraw.errors import CapacityError, ConfigError
from longstraw.pagers import arena, installed, limits
from longstraw.pagers.arena import HostArena
from longstraw.runtime.tiers import build_store

CPU = torch.device("cpu")
BLOCK = 128 << 20


def list_blocks(root: Path, online: int, offline: int = 0) -> Path:
    folder = root / "devices/system/memory"
    folder.mkdir(parents=True)
    (folder / "block_size_bytes").write_text(f"{BLOCK:x}\n")
    for index in range(online + offline):
        (folder / f"memory{index}").mkdir()
        (folder / f"memory{index}" / "state").write_text("online\n" if index < online else "offline\n")
    return folder


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that counts 31 of its 128 GiB so far, 30 of them available."""
    root = tmp_path / "sys"
    folder = list_blocks(root, 1024)
    monkeypatch.setattr(installed, "SYSTEM", root)
    counted = types.SimpleNamespace(total=31 << 30, available=30 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: counted)
    monkeypatch.setattr(limits, "cgroup_limits", list)
    return folder


def test_what_is_not_counted_yet(machine: Path) -> None:
    whole = int((128 << 30) * 0.97)
    assert installed.uncounted_bytes(31 << 30) == whole - (31 << 30)
    assert limits.total_host_bytes() == whole
    assert limits.free_host_bytes() == whole - (1 << 30)
    assert f"{(whole - (1 << 30)) / 2**30:.2f} GiB of the machine's" in limits.describe_host_limits()


def test_overhead_is_not_memory_to_come(machine: Path) -> None:
    assert installed.uncounted_bytes(125 << 30) == 0
    assert installed.uncounted_bytes(128 << 30) == 0


def test_blocks_that_are_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list_blocks(tmp_path, 256, offline=768)
    monkeypatch.setattr(installed, "SYSTEM", tmp_path)
    assert installed.uncounted_bytes(31 << 30) == 0


def test_a_kernel_that_lists_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "SYSTEM", tmp_path)
    assert installed.uncounted_bytes(31 << 30) == 0


def test_of_each_node(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = tmp_path / "node"
    for node, blocks in ((0, range(512)), (1, range(512, 1024))):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "meminfo").write_text(
            f"Node {node} MemTotal: {31 << 20} kB\nNode {node} MemFree: {30 << 20} kB\nNode {node} FilePages: 0 kB\n"
        )
        for block in blocks:
            (nodes / f"node{node}" / f"memory{block}").symlink_to(machine / f"memory{block}")
    monkeypatch.setattr(limits, "_NODES", nodes)
    left = int((64 << 30) * 0.97) - (1 << 30)
    assert limits.numa_nodes() == {0: left, 1: left}


def test_a_budget_above_the_count_is_taken(machine: Path) -> None:
    store = build_store(Config(tiers=[{"kind": "host", "budget": "90GiB"}]), CPU)
    assert store.pagers[0].budget == 90 << 30
    with pytest.raises(ConfigError, match=r"130.00 GiB can never be had: this machine.* has 124.16 GiB in all"):
        build_store(Config(tiers=[{"kind": "host", "budget": "130GiB"}]), CPU)


def test_an_arena_above_the_count_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the flag the kernel refuses a mapping above its count at once; nothing of it is touched here."""
    nbytes = psutil.virtual_memory().total + psutil.swap_memory().total + (1 << 30)
    monkeypatch.setattr(limits, "free_host_bytes", lambda: 2 * nbytes)
    made = HostArena(nbytes, CPU)
    assert made.memory.numel() == nbytes
    del made
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "0":
        monkeypatch.setattr(arena, "_MAP_NORESERVE", 0)
        with pytest.raises(CapacityError, match="Cannot allocate memory"):
            HostArena(nbytes, CPU)


def test_memory_that_may_be_added(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = installed.SYSTEM / "bus/virtio/drivers/virtio_mem"
    driver.mkdir(parents=True)
    (driver / "bind").touch()
    assert installed.hot_add() is None, "a driver without a device"
    (driver / "virtio5").mkdir()
    assert installed.hot_add() == "virtio-mem"
    with pytest.warns(RuntimeWarning, match=r"tiers\[0\].budget: 200.00 GiB is more than .*virtio-mem may add"):
        build_store(Config(tiers=[{"kind": "host", "budget": "200GiB"}]), CPU)
    monkeypatch.setattr(limits, "cgroup_limits", lambda: [(Path("/group"), 64 << 30, 0)])
    with pytest.raises(ConfigError, match="can never be had"):
        build_store(Config(tiers=[{"kind": "host", "budget": "200GiB"}]), CPU)
    found = [f for f in memory.examine_memory() if f.level is Level.NOTE and "virtio-mem" in f.text]
    assert len(found) == 1


def test_the_examination_tells(machine: Path) -> None:
    assert any("93.16 GiB more are online" in f.text for f in memory.examine_memory())
