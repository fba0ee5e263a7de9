"""Engines of the nvme tier: the same bytes through each, checked results, refusals with a reason, the choice."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw.errors import ConfigError, PageLostError
from longstraw.pagers import NvmePager
from longstraw.pagers.engines import EngineSettings, choose, choose_engine, deepspeed, kvikio, measure
from longstraw.pagers.engines.measure import Rates
from longstraw.pagers.engines.record import record_path
from longstraw.pagers.spool import SpoolFile
from tests.pagers.fake_engines import CPU, SMALL, FakeCuFile, noise


@pytest.fixture(params=["posix", "deepspeed", "kvikio"])
def pager(
    request: pytest.FixtureRequest, tmp_path: Path, fake_deepspeed: None, fake_kvikio: dict[str, Any]
) -> Iterator[NvmePager]:
    pager = NvmePager(tmp_path, 1 << 26, CPU, engine=request.param, settings=SMALL)
    yield pager
    pager.close()
    assert list(tmp_path.iterdir()) == []


def test_the_same_bytes_through_each(pager: NvmePager) -> None:
    extent = pager.allocate(4 << 20)
    source, target = noise(3_000_001), torch.empty(3_000_001, dtype=torch.uint8)
    pager.write(extent, 77, source).wait()
    pager.read(extent, 77, target).wait()
    assert torch.equal(source, target)
    assert pager.engine.name in pager.describe()
    assert pager.disk_written >= 3_000_001


def test_truncated_file(pager: NvmePager) -> None:
    extent = pager.allocate(4 << 20)
    pager.write(extent, 0, noise(4 << 20)).wait()
    os.ftruncate(pager._file._buffered, 1 << 20)
    target = torch.empty(4 << 20, dtype=torch.uint8)
    with pytest.raises((OSError, PageLostError), match=r"ended at byte|KvikIO's read at byte \d+ failed \(.*EOF"):
        pager.read(extent, 0, target).wait()
    pager.write(extent, 0, noise(4 << 20, 1)).wait()  # it grows again
    pager.read(extent, 0, target).wait()
    assert torch.equal(target, noise(4 << 20, 1))


def test_kvikio_counts_bytes(tmp_path: Path, fake_kvikio: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pager = NvmePager(tmp_path, 1 << 24, CPU, engine="kvikio", settings=EngineSettings(threads=2, queue_depth=8))
    assert fake_kvikio["num_threads"] == 16
    assert fake_kvikio["auto_direct_io_read"] is fake_kvikio["auto_direct_io_write"] is pager._file.direct
    assert "compatibility mode" in pager.describe()
    extent = pager.allocate(1 << 20)
    monkeypatch.setattr(FakeCuFile, "short", 1)
    with pytest.raises(OSError, match="moved 1048575 of 1048576 bytes"):
        pager.write(extent, 0, noise(1 << 20)).wait()
    pager.close()


def test_kvikio_says_which_way_it_goes(
    tmp_path: Path, fake_kvikio: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the kernel module it is told to go through host memory; the user's variable has the last word."""
    monkeypatch.setattr(kvikio, "DRIVER", tmp_path / "stats")
    monkeypatch.delenv(kvikio.MODE, raising=False)
    NvmePager(tmp_path, 1 << 20, CPU, engine="kvikio").close()
    assert fake_kvikio.pop("compat_mode") == "on"
    monkeypatch.setenv(kvikio.MODE, "OFF")
    NvmePager(tmp_path, 1 << 20, CPU, engine="kvikio").close()
    monkeypatch.delenv(kvikio.MODE)
    (tmp_path / "stats").touch()
    NvmePager(tmp_path, 1 << 20, CPU, engine="kvikio").close()
    assert "compat_mode" not in fake_kvikio


def test_refusals_name_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    missing = {"kvikio", "deepspeed"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in missing else real(name, *a))
    for name in missing:
        with pytest.raises(ConfigError, match=rf"tiers\[i\].engine: {name} is not installed: pip install"):
            NvmePager(tmp_path, 1 << 20, CPU, engine=name)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is there")
def test_kvikio_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object() if name == "kvikio" else real(name, *a))
    with pytest.raises(ConfigError, match="kvikio needs the CUDA driver"):
        NvmePager(tmp_path, 1 << 20, CPU, engine="kvikio")


def test_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_kvikio: dict[str, Any]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(deepspeed, "is_built", lambda: False)
    file = SpoolFile(tmp_path)
    rates = {"posix": 2e9, "kvikio": 2.1e9}

    def told(engine: Any, *rest: Any) -> Rates:
        rate = rates[engine.name]
        return Rates(read=rate, write=2 * rate, read_cpu=0, write_cpu=0)

    monkeypatch.setattr(choose, "measure", told)
    chosen = choose_engine("auto", file, SMALL, CPU, checksum=True)
    assert chosen.engine.name == "posix"  # a twentieth is not worth it
    rates["kvikio"] = 3e9
    chosen = choose_engine("auto", file, SMALL, CPU, checksum=True)
    figures = "by a short probe: posix 2.00 GB/s, kvikio 3.00 GB/s"
    without = "; no deepspeed: its async_io is not built; engine: deepspeed builds it"
    assert (chosen.engine.name, chosen.why) == ("kvikio", figures + without)

    engines = {"posix": {"read": 9e9, "write": 8e9}, "kvikio": {"read": 4e9, "write": 9e9}}
    record = {"version": 1, "machine": platform.node(), "disks": {str(tmp_path.resolve()): {"engines": engines}}}
    record_path().parent.mkdir(parents=True)
    record_path().write_text(json.dumps(record))
    chosen = choose_engine("auto", file, SMALL, CPU, checksum=True)
    assert chosen.engine.name == "posix"
    assert chosen.why == "by the record of `longstraw probe`: posix 8.00 GB/s, kvikio 4.00 GB/s" + without
    record_path().write_text(json.dumps(record | {"machine": "another"}))
    assert choose_engine("auto", file, SMALL, CPU, checksum=True).engine.name == "kvikio"

    def refuse() -> Any:
        raise ConfigError("tiers[i].engine: kvikio is not installed: pip")

    monkeypatch.setattr(kvikio, "load_module", refuse)
    chosen = choose_engine("auto", file, SMALL, CPU, checksum=False)
    assert chosen.engine.name == "posix"
    assert "no kvikio: kvikio is not installed" in chosen.why
    assert "no deepspeed" in chosen.why
    file.close()


def test_measure(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path)
    file.grow(2 << 20)
    engine = choose_engine("posix", file, SMALL, CPU, checksum=True).engine
    rates = measure(engine, SMALL, 2 << 20, 0.02)
    assert min(rates.read, rates.write) > 1e6
    assert rates.worse == min(rates.read, rates.write)
    file.close()


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed")
@pytest.mark.parametrize("checksum", [True, False])
def test_the_real_kvikio(tmp_path: Path, checksum: bool) -> None:
    cuda = torch.device("cuda")
    pager = NvmePager(tmp_path, 1 << 26, cuda, engine="kvikio", checksum=checksum)
    print(pager.describe())
    direct = kvikio.DRIVER.exists() or os.environ.get(kvikio.MODE, "ON").upper() == "OFF"
    assert ("GPUDirect storage" if direct else "compatibility mode (through host memory)") in pager.describe()
    assert (pager._to_device is None) is checksum
    extent = pager.allocate(16 << 20)
    source, target = noise(15_000_001).to(cuda), torch.empty(15_000_001, dtype=torch.uint8, device=cuda)
    torch.cuda.synchronize()
    written = pager.write(extent, 5, source)
    pager.read(extent, 5, target, (written,)).wait()
    assert torch.equal(source, target)
    os.ftruncate(pager._file._buffered, 1 << 20)
    with pytest.raises(OSError, match=r"KvikIO's read at byte \d+ (failed|moved)"):
        pager.read(extent, 5, target).wait()
    pager.close()
    assert list(tmp_path.iterdir()) == []
