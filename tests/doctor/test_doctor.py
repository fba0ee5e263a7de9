"""The examination: each finding has its fix; limits, disks, leftovers and refused folders are told."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw.doctor import DiskRates, Level, LinkRates, ProbeResult, disks, examine, gpus, memory, probe, software
from longstraw.doctor.finding import Finding
from longstraw.errors import ConfigError
from longstraw.pagers import limits, numa
from longstraw.pagers.engines import EngineSettings, Rates
from longstraw.pagers.engines.record import record_path, recorded_rates
from longstraw.pagers.run_directory import RunDirectory


@pytest.fixture
def invoke() -> Callable[..., Any]:
    from typer.testing import CliRunner

    from longstraw.cli import app

    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {finding.text: finding.level for finding in findings}


def test_every_finding_that_is_not_good_has_a_fix(tmp_path: Path) -> None:
    found = examine([tmp_path, tmp_path / "missing"])
    assert all(bool(f.fix) == (f.level is not Level.GOOD) for f in found)
    areas = {f.area for f in found}
    assert {"gpu", "memory", "memlock", "numa", "versions", "libaio", "async_io", "gds", f"disk {tmp_path}"} <= areas
    missing = [f for f in found if f.area == f"disk {tmp_path / 'missing'}"]
    assert [f.level for f in missing] == [Level.BAD]
    with pytest.raises(AssertionError):
        Finding(area="x", level=Level.NOTE, text="without a fix")


def test_little_memory_and_little_locking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_host_bytes", lambda: 1 << 20)
    monkeypatch.setattr(limits, "locked_limit", lambda: 8 << 20)
    found = memory.examine_memory()
    assert any(f.level is Level.BAD and "only 1.00 MiB" in f.text for f in found)
    assert any(f.level is Level.NOTE and "8.00 MiB" in f.text and "ulimit -l unlimited" in f.fix for f in found)


def test_what_async_io_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed says only when a run begins that it cannot offload to a disk."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: object() if name == "deepspeed" else real(name, *a)
    )
    monkeypatch.setattr(software, "is_built", lambda: False)
    monkeypatch.setattr(software, "_has_headers", lambda: False)
    found = software._async_io()
    assert found.level is Level.NOTE
    assert "libaio.h" in found.text
    assert "apt install g++ libaio-dev" in found.fix
    monkeypatch.setattr(software, "_has_headers", lambda: True)
    monkeypatch.setattr(software.shutil, "which", lambda name: "/usr/bin/g++")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert software._async_io().fix.startswith("python -c 'from deepspeed.ops.op_builder import AsyncIOBuilder")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a;10.0+PTX")
    assert "cannot read 9.0a in TORCH_CUDA_ARCH_LIST" in software._async_io().text
    assert software._async_io().fix.startswith("env -u TORCH_CUDA_ARCH_LIST python -c")
    monkeypatch.setattr(software, "is_built", lambda: True)
    monkeypatch.setattr(software, "lacks_pgetevents", lambda: False)
    assert software._async_io().level is Level.GOOD
    monkeypatch.setattr(software, "lacks_pgetevents", lambda: True)
    assert "no io_pgetevents" in software._async_io().text


def test_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    texts = levels(disks.examine_disk(tmp_path))
    assert any("a run that lives" in text for text in texts)
    directory.close()
    dead = [f for f in disks.examine_disk(tmp_path) if "of a dead run" in f.text]
    assert [f.fix for f in dead] == [f"longstraw clean {tmp_path}"]
    assert list(tmp_path.iterdir()) == []  # the file that was made there has reclaimed it, and is gone

    real = os.open

    def no_direct(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_direct)
    assert any("refuses direct I/O" in f.text and "ext4" in f.fix for f in disks.examine_disk(tmp_path))


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert [f.text for f in disks.examine_disk(tmp_path) if f.level is Level.BAD] == [
        f"no file can be made in {tmp_path} ([Errno 13] denied); name one that you may write to"
    ]


def test_memory_that_poses_as_a_disk() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm here")
    assert any(f.level is Level.BAD and "not a disk" in f.text for f in disks.examine_disk(shm))


def test_a_library_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have the GPU and not the driver's management library."""

    class NVMLError(Exception):
        pass

    def refuse() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    module = types.SimpleNamespace(NVMLError=NVMLError, nvmlInit=refuse)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: module if name == "pynvml" else real(name, *a))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (found,) = gpus.examine_gpus()
    assert found.level is Level.NOTE
    assert "Shared Library Not Found" in found.text
    monkeypatch.setattr(numa, "numa_nodes", lambda: {0: 1 << 30, 1: 1 << 30})
    assert "Shared Library Not Found" in numa.choose_node("auto", torch.device("cuda", 0)).why


def test_probe_leaves_a_record_for_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert recorded_rates(tmp_path) is None
    result = probe([tmp_path], EngineSettings(threads=2, block=64 << 10), seconds=0.02, disk_bytes=1 << 20)
    assert result.save() == record_path()
    rates = recorded_rates(tmp_path)
    assert rates is not None
    assert rates["posix"] == result.disks[0].engines["posix"].worse
    assert recorded_rates(tmp_path / "cache") is None


def test_a_probe_keeps_what_it_does_not_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    link = LinkRates(devices=(0,), to_device=5e10, from_device=4e10, both=8e10)

    def disk(name: str, rate: float) -> DiskRates:
        rates = Rates(read=rate, write=rate, read_cpu=0.0, write_cpu=0.0)
        settings = EngineSettings()
        return DiskRates(path=tmp_path / name, direct=True, settings=settings, engines={"posix": rates}, refused={})

    ProbeResult(date="then", links=[link], disks=[disk("a", 1e9), disk("b", 2e9)]).save()
    ProbeResult(date="now", links=[], disks=[disk("b", 3e9)]).save()
    assert recorded_rates(tmp_path / "a") == {"posix": 1e9}
    assert recorded_rates(tmp_path / "b") == {"posix": 3e9}
    record = json.loads(record_path().read_text())
    assert [one["to_device"] for one in record["links"]] == [5e10]
    assert [path.name for path in record_path().parent.iterdir()] == ["probe.json"]

    record_path().write_text(json.dumps(record | {"machine": "another"}))
    ProbeResult(date="here", links=[], disks=[disk("b", 4e9)]).save()
    assert recorded_rates(tmp_path / "a") is None

    record_path().write_text("{")
    with pytest.raises(ConfigError, match=r"probe\.json is no record of `longstraw probe`.*delete it"):
        recorded_rates(tmp_path / "b")


def test_commands(tmp_path: Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out.json"
    ended = invoke("doctor", tmp_path, "--json", out)
    assert ended.exit_code == 0, ended.output
    assert any("longstraw" in row["text"] for row in json.loads(out.read_text()))
    assert invoke("doctor", tmp_path / "missing").exit_code == 1

    ended = invoke("probe", tmp_path, "--seconds", 0.05, "--size", "1MiB", "--block", "64KiB", "--json", out)
    assert ended.exit_code == 0, ended.output
    assert str(tmp_path) in json.loads(out.read_text())["disks"]
    assert record_path().is_file()
    assert "--block 3KiB" in str(invoke("probe", tmp_path, "--block", "3KiB").exception)
    assert "size" in str(invoke("probe", tmp_path, "--size", "much").exception)

    directory = RunDirectory(tmp_path)
    assert "its run lives" in invoke("clean", tmp_path).output
    directory.close()
    assert "its run is dead" in invoke("clean", tmp_path, "--dry-run").output
    assert directory.path.is_dir()
    assert "deleted" in invoke("clean", tmp_path).output
    assert not directory.path.exists()
    assert "nothing there" in invoke("clean", tmp_path).output
    assert "is no directory" in str(invoke("clean", tmp_path / "missing").exception)


@pytest.mark.gpu
def test_links() -> None:
    from longstraw.doctor import measure_links

    rates = measure_links()
    assert len(rates) >= torch.cuda.device_count()
    assert all(rate.to_device > 1e9 and rate.from_device > 1e9 and rate.both > 1e9 for rate in rates)
