"""DeepSpeed's async_io handles (libaio), one a thread, with every result that they do not check checked."""

from __future__ import annotations

import errno
import importlib.util
import os
import threading
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from longstraw.errors import ConfigError
from longstraw.pagers.engines.protocol import Buffer, EngineSettings
from longstraw.pagers.spool import SECTOR, SpoolFile


class _LockedBuffer:
    """Memory of DeepSpeed's own page-locked kind: from any other it would copy once more."""

    def __init__(self, handle: Any, nbytes: int) -> None:
        self._handle = handle
        self._whole = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        self.memory = self._whole
        self.bytes = memoryview(self.memory.numpy())

    def close(self) -> None:
        self.bytes.release()
        self._handle.free_cpu_locked_tensor(self._whole)


class DeepSpeedEngine:
    """One handle for each thread; a handle keeps `queue_depth` requests of an operation in flight.

    DeepSpeed waits for completions and does not look at what they say: a failed or short request passes for done. So
    the file's size is compared before a read, the number of completed operations after each, and the tier must have
    checksums, which tell a write that never arrived when it comes back. The handles open the file anew by its
    descriptor's path, with O_DIRECT.

    Raises ConfigError, with the reason, if the op cannot be built or loaded or the file takes no direct I/O.
    """

    name = "deepspeed"

    def __init__(self, file: SpoolFile, settings: EngineSettings) -> None:
        if not file.direct:
            raise ConfigError(
                f"tiers[i].engine: deepspeed needs direct I/O, which {file.path} refuses; set it to posix"
            )
        self._file = file
        self._settings = settings
        self._op = load_op()
        self._mine = threading.local()
        # The handle that page-locks buffers. It goes with `close`, or at exit before the interpreter is torn down: a
        # process whose handle lived longer was seen not to end.
        self._pins: list[Any] = [self._make_handle()]
        weakref.finalize(self, self._pins.clear)
        self._try_out()

    def _try_out(self) -> None:
        """Write a sector of the new file, and read it back.

        The first write of a process must be alone: it warns about the wear of disks behind a C++ guard, with Python's
        lock in hand, and a second thread that meets the guard meanwhile waits for ever (DeepSpeed 0.19).
        """
        buffer = self.make_buffer(SECTOR)
        buffer.memory.fill_(0xA5)
        handle = self._pins[0]
        done = handle.sync_pwrite(buffer.memory, self._file.reopen_path, 0)
        buffer.memory.zero_()
        done += handle.sync_pread(buffer.memory, self._file.reopen_path, 0)
        right = done == 2 and bool(buffer.memory.eq(0xA5).all())
        buffer.close()
        if not right:
            raise ConfigError(
                f"tiers[i].engine: DeepSpeed's async_io does not write and read a sector in {self._file.path}; set "
                "engine to posix"
            )

    def _make_handle(self) -> Any:
        return self._op.aio_handle(self._settings.request_bytes, self._settings.requests, False, True, 1)

    def _handle(self) -> Any:
        if not hasattr(self._mine, "handle"):
            self._mine.handle = self._make_handle()
        return self._mine.handle

    def make_buffer(self, nbytes: int) -> Buffer:
        return _LockedBuffer(self._pins[0], nbytes)

    def read(self, buffer: Buffer, start: int, stop: int, offset: int) -> None:
        size = self._file.measure()
        if size < offset + stop - start:
            raise OSError(errno.EIO, f"the file ended at byte {size}, before byte {offset + stop - start}")
        self._completed("read", self._handle().sync_pread(buffer.memory[start:stop], self._file.reopen_path, offset))

    def write(self, buffer: Buffer, start: int, stop: int, offset: int) -> None:
        self._completed("write", self._handle().sync_pwrite(buffer.memory[start:stop], self._file.reopen_path, offset))

    def _completed(self, what: str, count: int) -> None:
        if count != 1:
            raise OSError(errno.EIO, f"DeepSpeed's async_io completed {count} of 1 {what}s")

    def describe(self) -> str:
        settings = self._settings
        return f"DeepSpeed async_io, {settings.requests} requests of {settings.request_bytes >> 10} KiB an operation"

    def close(self) -> None:
        self._mine = threading.local()
        self._pins.clear()


def load_op() -> ModuleType:
    """DeepSpeed's async_io op, compiled on first use (minutes). Raises ConfigError with the reason if it cannot be."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("tiers[i].engine: deepspeed is not installed: pip install 'longstraw[deepspeed]'")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise ConfigError(
            "tiers[i].engine: DeepSpeed's async_io cannot be built here: libaio's headers are missing (apt install "
            "libaio-dev, or name their folder in CFLAGS and LDFLAGS); or set engine to posix"
        )
    try:
        op: ModuleType = builder.load(verbose=False)
    except (RuntimeError, OSError, ImportError) as cause:
        last = str(cause).strip().splitlines()[-1]
        raise ConfigError(
            f"tiers[i].engine: DeepSpeed's async_io was not built or loaded ({last}); set engine to posix"
        ) from cause
    return op


def is_built() -> bool:
    """Whether the op is there without compiling: what `auto` and the probe look at."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return False
    # The package itself takes seconds to import, and looks for accelerators.
    if any(Path(spec.submodule_search_locations[0]).glob("ops/aio/async_io_op*.so")):
        return True
    from torch.utils import cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    return any(root.glob("async_io/async_io.so")) or any(root.glob("*/async_io/async_io.so"))
