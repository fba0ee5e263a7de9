"""DeepSpeed's async_io handles (libaio), lent to one call at a time; what they do not check of a result is checked."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import weakref
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import torch

from longstraw.errors import ConfigError
from longstraw.pagers.engines.protocol import Buffer, EngineSettings
from longstraw.pagers.engines.trial import try_apart
from longstraw.pagers.limits import check_lockable
from longstraw.pagers.spool import SECTOR, SpoolFile


class _LockedBuffer:
    """Memory of DeepSpeed's own page-locked kind: from any other it would copy once more.

    `close` frees it under whatever tensors still look at it; `memory` has none of it then.
    """

    def __init__(self, handle: Any, nbytes: int, opened: set[_LockedBuffer]) -> None:
        # If it cannot lock, DeepSpeed ends the process, or where it was built without asserts, goes on with a null
        # pointer.
        check_lockable(nbytes, "tiers[i].engine: deepspeed's buffers")
        self._handle = handle
        self._whole = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._opened = opened
        self.memory = self._whole
        self.bytes = memoryview(self.memory.numpy())
        opened.add(self)

    def close(self) -> None:
        if self not in self._opened:
            return
        self._opened.remove(self)
        self.bytes.release()
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._handle.free_cpu_locked_tensor(self._whole)
        # The handle is the engine's to end; a buffer that is kept must not keep it.
        del self._handle, self._whole


class DeepSpeedEngine:
    """As many handles as threads; a handle keeps `queue_depth` requests of an operation in flight.

    DeepSpeed waits for completions and does not look at what they say: a failed or short request passes for done. So
    the file's size is compared before a read, the number of completed operations after each, and the tier must have
    checksums, which tell a write that never arrived when it comes back. What it does look at, it asserts: a kernel that
    lacks a call or grants no queue ends the process. So the same work is done in a process of its own first, unless
    this one is `expendable`. The handles open the file anew by its descriptor's path, with O_DIRECT.

    Handles are made here and end in `close`, on its thread, or at exit before the interpreter is torn down: a process
    whose handle lived longer was seen not to end, and one that a thread owned would end inside that thread's own
    teardown, where its wait lets go of Python's lock.

    Raises ConfigError, with the reason, if the op cannot be built or loaded, does not work here, or the file takes no
    direct I/O.
    """

    name = "deepspeed"

    def __init__(
        self, file: SpoolFile, settings: EngineSettings, device: torch.device, *, expendable: bool = False
    ) -> None:
        if not file.direct:
            raise ConfigError(
                f"tiers[i].engine: deepspeed needs direct I/O, which {file.path} refuses; set it to posix"
            )
        self._file = file
        self._settings = settings
        op = load_op()
        if not expendable:
            try_apart(file.path, settings, device)
        # The first page-locks buffers and tries the file; the others are lent to operations.
        self._handles: list[Any] = [self._make_handle(op) for _ in range(settings.threads + 1)]
        self._idle: SimpleQueue[int] = SimpleQueue()
        for place in range(1, settings.threads + 1):
            self._idle.put(place)
        self._opened: set[_LockedBuffer] = set()
        weakref.finalize(self, self._handles.clear)
        self._try_out()

    def _try_out(self) -> None:
        """Write a sector of the new file, and read it back.

        The first write of a process must be alone: it warns about the wear of disks behind a C++ guard, with Python's
        lock in hand, and a second thread that meets the guard meanwhile waits for ever (DeepSpeed 0.19).
        """
        buffer = self.make_buffer(SECTOR)
        buffer.memory.fill_(0xA5)
        handle = self._handles[0]
        done = handle.sync_pwrite(buffer.memory, self._file.reopen_path, 0)
        buffer.memory.zero_()
        done += handle.sync_pread(buffer.memory, self._file.reopen_path, 0)
        right = done == 2 and bool(buffer.memory.eq(0xA5).all())
        buffer.close()
        if not right:
            self.close()
            raise ConfigError(
                f"tiers[i].engine: DeepSpeed's async_io does not write and read a sector in {self._file.path}; set "
                "engine to posix"
            )

    def _make_handle(self, op: ModuleType) -> Any:
        return op.aio_handle(self._settings.request_bytes, self._settings.requests, False, True, 1)

    def make_buffer(self, nbytes: int) -> Buffer:
        return _LockedBuffer(self._handles[0], nbytes, self._opened)

    def read(self, buffer: Buffer, start: int, stop: int, offset: int) -> None:
        size = self._file.measure()
        if size < offset + stop - start:
            raise OSError(errno.EIO, f"the file ended at byte {size}, before byte {offset + stop - start}")
        self._run("read", "sync_pread", buffer.memory[start:stop], offset)

    def write(self, buffer: Buffer, start: int, stop: int, offset: int) -> None:
        self._run("write", "sync_pwrite", buffer.memory[start:stop], offset)

    def _run(self, what: str, call: str, part: torch.Tensor, offset: int) -> None:
        place = self._idle.get()
        try:
            count = getattr(self._handles[place], call)(part, self._file.reopen_path, offset)
        finally:
            self._idle.put(place)
        if count != 1:
            raise OSError(errno.EIO, f"DeepSpeed's async_io completed {count} of 1 {what}s")

    def describe(self) -> str:
        settings = self._settings
        return f"DeepSpeed async_io, {settings.requests} requests of {settings.request_bytes >> 10} KiB an operation"

    def close(self) -> None:
        for buffer in list(self._opened):
            buffer.close()
        self._handles.clear()


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
    except Exception as cause:  # its builder raises whatever it meets: TypeError where CUDA's folder is not known
        last = (str(cause).strip() or type(cause).__name__).splitlines()[-1]
        archs = unreadable_archs()
        unset = f"unset TORCH_CUDA_ARCH_LIST, whose {archs} its builder cannot read, or " if archs else ""
        raise ConfigError(
            f"tiers[i].engine: DeepSpeed's async_io was not built or loaded ({last}); {unset}set engine to posix"
        ) from cause
    return op


def unreadable_archs() -> str:
    """The entries of TORCH_CUDA_ARCH_LIST that DeepSpeed's builder stops at, such as 9.0a; "" if there are none.

    torch takes them; DeepSpeed 0.19 reads each part of a number as an integer.
    """
    entries = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    return ", ".join(entry for entry in entries if not re.fullmatch(r"\d+\.\d+(\+PTX)?", entry))


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
