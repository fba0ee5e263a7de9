"""KvikIO: GPUDirect storage where the machine has it, the same calls through host memory where not."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from longstraw.errors import ConfigError
from longstraw.pagers.arena import HostArena
from longstraw.pagers.engines.protocol import Buffer, EngineSettings
from longstraw.pagers.spool import SpoolFile

DRIVER = Path("/proc/driver/nvidia-fs/stats")
"""There if the kernel module that GPUDirect storage goes through is loaded."""
MODE = "KVIKIO_COMPAT_MODE"
"""KvikIO's own variable: ON, OFF or AUTO."""


class KvikioEngine:
    """Operations cut into `queue_depth` tasks for KvikIO's thread pool, each one's byte count checked.

    With checksums the bytes must pass through host memory; without, they go straight between the file and the GPU
    (`read_device`, `write_device`). KvikIO opens the file anew by its descriptor's path. Its thread pool is the
    process's one pool, and gets the size that this tier asks for. Its compatibility mode is switched on where the
    machine has no nvidia-fs, unless KVIKIO_COMPAT_MODE says otherwise: cuFile would go through host memory by itself
    there, and pass for direct.

    Raises ConfigError, with the reason, if KvikIO or the CUDA driver that it needs is missing.
    """

    name = "kvikio"

    def __init__(self, file: SpoolFile, settings: EngineSettings, device: torch.device) -> None:
        self._module = load_module()
        self._settings = settings
        self._device = device
        defaults = self._module.defaults
        if not DRIVER.exists() and MODE not in os.environ:
            defaults.set({"compat_mode": self._module.CompatMode.ON})
        defaults.set(
            {
                "num_threads": settings.threads * settings.requests,
                # Pages in the page cache would take memory that no budget counts.
                "auto_direct_io_read": file.direct,
                "auto_direct_io_write": file.direct,
            }
        )
        self._compat = bool(defaults.is_compat_mode_preferred())
        self._handle = self._module.CuFile(file.reopen_path, "r+")

    def make_buffer(self, nbytes: int) -> Buffer:
        return HostArena(nbytes, self._device)

    def read(self, buffer: Buffer, start: int, stop: int, offset: int) -> None:
        self._move("read", self._handle.pread, buffer.memory[start:stop].numpy(), offset)

    def write(self, buffer: Buffer, start: int, stop: int, offset: int) -> None:
        self._move("write", self._handle.pwrite, buffer.memory[start:stop].numpy(), offset)

    def read_device(self, target: torch.Tensor, offset: int) -> None:
        self._move("read", self._handle.pread, target, offset)

    def write_device(self, source: torch.Tensor, offset: int) -> None:
        self._move("write", self._handle.pwrite, source, offset)

    def _move(self, what: str, call: Any, data: Any, offset: int) -> None:
        nbytes = data.nbytes
        try:
            done = call(data, nbytes, offset, self._settings.request_bytes).get()
        except RuntimeError as cause:
            # Whatever fails below comes as this: the end of the file, a system call's error, cuFile's.
            raise OSError(errno.EIO, f"KvikIO's {what} at byte {offset} failed ({cause})") from cause
        if done != nbytes:
            raise OSError(errno.EIO, f"KvikIO's {what} at byte {offset} moved {done} of {nbytes} bytes")

    @property
    def how(self) -> str:
        """Which of its two ways KvikIO takes."""
        return "compatibility mode (through host memory)" if self._compat else "GPUDirect storage"

    def describe(self) -> str:
        return f"KvikIO {self._module.__version__}, {self.how}, tasks of {self._settings.request_bytes >> 10} KiB"

    def close(self) -> None:
        self._handle.close()


def load_module() -> Any:
    """The package kvikio. Raises ConfigError with the reason if it is missing or cannot work here."""
    if importlib.util.find_spec("kvikio") is None:
        raise ConfigError("tiers[i].engine: kvikio is not installed: pip install kvikio-cu13 (or kvikio-cu12)")
    if not torch.cuda.is_available():
        raise ConfigError("tiers[i].engine: kvikio needs the CUDA driver, also for host memory; set engine to posix")
    try:
        import kvikio
        import kvikio.defaults
    except (ImportError, RuntimeError, OSError) as cause:
        raise ConfigError(f"tiers[i].engine: kvikio cannot be loaded ({cause}); set engine to posix") from cause
    return kvikio
