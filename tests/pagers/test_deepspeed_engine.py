"""Engine deepspeed: what its library does not check is checked, tried apart first, and ended with the engine."""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import subprocess
import sys
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw.errors import CapacityError, ConfigError, PageLostError
from longstraw.pagers import NvmePager, limits
from longstraw.pagers.engines import choose_engine, deepspeed, trial
from longstraw.pagers.spool import SpoolFile
from tests.pagers.fake_engines import CPU, SMALL, FakeHandle, noise


def test_deepspeed_writes_that_never_arrive(
    tmp_path: Path, fake_deepspeed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pager = NvmePager(tmp_path, 1 << 24, CPU, engine="deepspeed", settings=SMALL)
    extent, target = pager.allocate(1 << 20), torch.empty(1 << 20, dtype=torch.uint8)
    pager.write(extent, 0, noise(1 << 20)).wait()
    monkeypatch.setattr(FakeHandle, "sync_pwrite", lambda self, tensor, path, offset: 1)
    pager.write(extent, 0, noise(1 << 20, 1)).wait()
    with pytest.raises(PageLostError, match="another checksum"):
        pager.read(extent, 0, target).wait()
    monkeypatch.setattr(FakeHandle, "sync_pwrite", lambda self, tensor, path, offset: -1)
    with pytest.raises(OSError, match="completed -1 of 1 writes"):
        pager.write(extent, 0, noise(1 << 20)).wait()
    pager.close()


def test_deepspeed_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: object() if name == "deepspeed" else real(name, *a)
    )

    class Builder:
        compatible = False

        def is_compatible(self, verbose: bool) -> bool:
            return self.compatible

        def load(self, verbose: bool) -> Any:
            raise ImportError("libaio.so.1: cannot open shared object file")

    module = types.SimpleNamespace(AsyncIOBuilder=Builder)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", module)
    monkeypatch.setitem(sys.modules, "deepspeed.ops", types.SimpleNamespace(op_builder=module))
    monkeypatch.setitem(sys.modules, "deepspeed", types.SimpleNamespace())
    with pytest.raises(ConfigError, match="libaio's headers are missing"):
        NvmePager(tmp_path, 1 << 20, CPU, engine="deepspeed")
    Builder.compatible = True
    with pytest.raises(ConfigError, match=r"not built or loaded \(libaio.so.1"):
        NvmePager(tmp_path, 1 << 20, CPU, engine="deepspeed")


def test_deepspeed_needs_direct_io(tmp_path: Path, fake_deepspeed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpoolFile(tmp_path)
    file.direct = False
    with pytest.raises(ConfigError, match="needs direct I/O"):
        choose_engine("deepspeed", file, SMALL, CPU, checksum=True)
    file.direct = True
    file.close()


def test_auto_goes_on_without_a_deepspeed_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_deepspeed: None
) -> None:
    def refuse(*given: Any) -> None:
        raise ConfigError("tiers[i].engine: deepspeed was tried in a process of its own, which died by SIGSEGV")

    monkeypatch.setattr(deepspeed, "is_built", lambda: True)
    monkeypatch.setattr(deepspeed, "try_apart", refuse)
    pager = NvmePager(tmp_path, 1 << 20, CPU, engine="auto", settings=SMALL)
    assert pager.engine.name == "posix"
    assert "no deepspeed: deepspeed was tried in a process of its own, which died by SIGSEGV" in pager.describe()
    pager.close()
    with pytest.raises(ConfigError, match="died by SIGSEGV"):
        NvmePager(tmp_path, 1 << 20, CPU, engine="deepspeed", settings=SMALL)
    assert list(tmp_path.iterdir()) == []


def test_deepspeeds_handles_and_buffers_end_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_deepspeed: None
) -> None:
    """Neither a thread that outlives it nor a buffer that is kept holds one; memory that was freed is out of reach."""
    made: list[weakref.ref[FakeHandle]] = []
    freed: list[int] = []

    class Counted(FakeHandle):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(weakref.ref(self))

        def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
            freed.append(tensor.numel())
            return True

    monkeypatch.setattr(deepspeed, "load_op", lambda: types.SimpleNamespace(aio_handle=Counted))
    file = SpoolFile(tmp_path)
    file.grow(SMALL.block)
    engine = deepspeed.DeepSpeedEngine(file, SMALL, CPU)
    assert len(made) == SMALL.threads + 1
    buffer = engine.make_buffer(SMALL.block)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: engine.write(buffer, 0, SMALL.block, 0), range(32)))
        assert len(made) == SMALL.threads + 1
        engine.close()
        assert [handle() for handle in made] == [None] * len(made)
    assert freed == [4096, SMALL.block]
    assert buffer.memory.numel() == 0
    buffer.close()
    assert freed == [4096, SMALL.block]
    file.close()


def test_deepspeed_asks_before_it_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_deepspeed: None) -> None:
    """Its own allocator ends the process, or returns a null pointer, where the kernel refuses."""
    pager = NvmePager(tmp_path, 1 << 20, CPU, engine="deepspeed", settings=SMALL)

    def refuse(*given: Any, **more: Any) -> Any:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(limits.mmap, "mmap", refuse)
    monkeypatch.setattr(FakeHandle, "new_cpu_locked_tensor", lambda *given: pytest.fail("was asked all the same"))
    with pytest.raises(CapacityError, match=r"buffers need 1.00 MiB more of locked memory .*`ulimit -l`"):
        pager.engine.make_buffer(1 << 20)
    monkeypatch.undo()
    pager.close()


FAKE_DEEPSPEED = """
import os, signal, sys, types
import torch

class Handle:
    def __init__(self, *given):
        self.how = os.environ["FAKE_ASYNC_IO"]

    def new_cpu_locked_tensor(self, n, like):
        return torch.zeros(n + 4096, dtype=like.dtype)[:n]

    def free_cpu_locked_tensor(self, tensor):
        return True

    def sync_pwrite(self, tensor, path, offset):
        if self.how == "dies":
            print("mlock failed to allocate", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        fd = os.open(path, os.O_WRONLY)
        os.pwritev(fd, [memoryview(tensor.numpy())], offset + 4096 * (self.how == "lies" and offset > 0))
        os.close(fd)
        return 1

    def sync_pread(self, tensor, path, offset):
        fd = os.open(path, os.O_RDONLY)
        os.preadv(fd, [memoryview(tensor.numpy())], offset)
        os.close(fd)
        return 1

class AsyncIOBuilder:
    def is_compatible(self, verbose):
        return os.environ["FAKE_ASYNC_IO"] != "missing"

    def load(self, verbose):
        if os.environ["FAKE_ASYNC_IO"] == "arch":
            raise ValueError("invalid literal for int() with base 10: '0a'")
        return types.SimpleNamespace(aio_handle=Handle)
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("dies", r"which died by SIGSEGV, as this one would have \(.*mlock failed to allocate\); set engine to posix"),
        ("lies", r"which ended with 1.*bytes \d+:\d+ of a block came back as others"),
        ("missing", r"^tiers\[i\].engine: DeepSpeed's async_io cannot be built here"),
        ("arch", r"base 10: '0a'\); unset TORCH_CUDA_ARCH_LIST, whose 9.0a its builder cannot read, or set engine to"),
        ("works", None),
    ],
)
def test_trial_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, told: str | None
) -> None:
    package, disk = tmp_path / "packages" / "deepspeed" / "ops", tmp_path / "disk"
    package.mkdir(parents=True)
    disk.mkdir()
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "op_builder.py").write_text(FAKE_DEEPSPEED)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("FAKE_ASYNC_IO", how)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0+PTX 9.0a" if how == "arch" else "9.0")
    monkeypatch.setattr(trial, "_passed", set())
    if told is None:
        trial.try_apart(disk, SMALL, CPU)
        monkeypatch.setattr(subprocess, "run", lambda *given, **more: pytest.fail("tried a second time"))
        trial.try_apart(disk, SMALL, CPU)
    else:
        with pytest.raises(ConfigError, match=told):
            trial.try_apart(disk, SMALL, CPU)
    assert list(disk.iterdir()) == []


def test_a_trial_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_passed", set())
    monkeypatch.setattr(trial, "PATIENCE_SECONDS", 0.05)
    with pytest.raises(ConfigError, match="had not ended after 0 s; set engine to posix"):
        trial.try_apart(tmp_path, SMALL, CPU)


@pytest.mark.skipif(not deepspeed.is_built(), reason="DeepSpeed's async_io is not built here")
def test_the_real_deepspeed(tmp_path: Path) -> None:
    pager = NvmePager(tmp_path, 1 << 26, CPU, engine="deepspeed")
    extent = pager.allocate(16 << 20)
    source, target = noise(15_000_001), torch.empty(15_000_001, dtype=torch.uint8)
    pager.write(extent, 5, source).wait()
    pager.read(extent, 5, target).wait()
    assert torch.equal(source, target)
    os.ftruncate(pager._file._buffered, 1 << 20)
    with pytest.raises(OSError, match="the file ended at byte"):
        pager.read(extent, 5, target).wait()
    pager.close()


WITHOUT_PGETEVENTS = """
import ctypes, struct, sys
from pathlib import Path

# Load the call's number; if it is io_pgetevents, ENOSYS; else go on.
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 333), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))

class Filter(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("steps", ctypes.c_void_p)]

libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert libc.prctl(22, 2, ctypes.byref(Filter(4, ctypes.addressof(program))), 0, 0) == 0

import torch
from longstraw.errors import ConfigError
from longstraw.pagers import NvmePager

try:
    NvmePager(Path(sys.argv[1]), 1 << 24, torch.device("cpu"), engine="deepspeed")
except ConfigError as refusal:
    print(refusal)
"""


@pytest.mark.skipif(not deepspeed.is_built(), reason="DeepSpeed's async_io is not built here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter has this machine's call numbers")
def test_the_real_deepspeed_on_a_kernel_without_its_call(tmp_path: Path) -> None:
    """It aborts its process there: seen with a filter, and so by whoever runs in a sandbox with a kernel of its own."""
    command = [sys.executable, "-c", WITHOUT_PGETEVENTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "died by SIGABRT, as this one would have (the kernel has no io_pgetevents" in done.stdout
    assert list(tmp_path.iterdir()) == []
