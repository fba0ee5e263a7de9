"""The most memory that a piece of work held at once, and how that was measured."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_SAMPLE_SECONDS = 0.005

KERNEL = "the kernel's high-water mark of the process's resident memory"
SAMPLED = "the process's resident memory, sampled every 5 ms (a shorter peak is missed)"
CUDA = "the most that torch had allocated on the GPU"


class PeakMemory:
    """Context manager: afterwards `peak_bytes` is the most held at once inside, `start_bytes` that at entry.

    On a GPU both count what torch allocated there. On a CPU they count the whole process, from the kernel's
    own high-water mark where it can be reset (Linux), else by sampling; `method` says which. On entry, memory
    that was freed but not yet given back is given back, so that no measurement hides in the last one's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start_bytes = 0
        self.peak_bytes = 0
        self.method = CUDA if device.type == "cuda" else KERNEL if _can_reset_mark() else SAMPLED
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None

    @property
    def added_bytes(self) -> int:
        """What the work itself added at its peak."""
        return self.peak_bytes - self.start_bytes

    def __enter__(self) -> Self:
        gc.collect()
        if self.method == CUDA:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self.start_bytes = torch.cuda.memory_allocated(self._device)
            return self
        _give_back()
        self.start_bytes = _resident()
        if self.method == KERNEL:
            _reset_mark()
        else:
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.method == CUDA:
            torch.cuda.synchronize(self._device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        elif self.method == KERNEL:
            self.peak_bytes = max(_read_mark(), self.start_bytes)
        else:
            assert self._sampler is not None
            self._stop.set()
            self._sampler.join()
            self.peak_bytes = max(self.peak_bytes, _resident(), self.start_bytes)

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, _resident())


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _can_reset_mark() -> bool:
    if not (sys.platform == "linux" and _CLEAR_REFS.exists()):
        return False
    try:
        _reset_mark()
    except OSError:
        # Some containers mount /proc read-only; `method` then says that the figure was sampled.
        return False
    return True


def _reset_mark() -> None:
    # proc(5): writing 5 resets the peak resident set size.
    _CLEAR_REFS.write_text("5")


def _read_mark() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no VmHWM line")


def _give_back() -> None:
    """glibc keeps freed memory, which would count as held by the next measurement."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
