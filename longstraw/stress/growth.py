"""Whether the process grows from one runtime to the next."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache

import psutil
import torch

WARM_ERAS = 2
"""Runtimes after which a process is warm."""
STEADY_ERAS = WARM_ERAS + 6
"""Runtimes from which on a steady rise can be told from one more cache."""

_NAMES = {
    "resident_bytes": "bytes of resident memory",
    "device_bytes": "bytes of CUDA memory",
    "files": "open files",
    "threads": "threads",
}
_ONCE = {"resident_bytes": 256 << 20, "device_bytes": 64 << 20}
"""What may come once the process is warm: caches of torch, and workspaces that libraries keep."""
_STEADILY = {"resident_bytes": 32 << 20, "device_bytes": 16 << 20, "files": 0, "threads": 0}
"""What may come from the first warm runtimes to the last ones, though it never went back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What a process holds while it has no runtime open: bytes, open file descriptors, threads."""

    resident_bytes: int
    device_bytes: int
    files: int
    threads: int

    @classmethod
    def now(cls, device: torch.device) -> Held:
        """What is garbage, and what the C library keeps for later, is given back first."""
        gc.collect()
        _trim()
        process = psutil.Process()
        return cls(
            resident_bytes=process.memory_info().rss,
            device_bytes=held_device_bytes(device),
            files=process.num_fds() if hasattr(process, "num_fds") else 0,
            threads=process.num_threads(),
        )


def held_device_bytes(device: torch.device) -> int:
    """Bytes of tensors that are alive on a CUDA device; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def grown(eras: Sequence[Held]) -> list[str]:
    """What the process holds more of than it may, a sentence each.

    Args:
        eras: what was held after each runtime so far. Nothing is said of `WARM_ERAS` of them or fewer, and of files and
            threads nothing of fewer than `STEADY_ERAS`.
    """
    if len(eras) <= WARM_ERAS:
        return []
    held = [asdict(era) for era in eras]
    warm, last = held[WARM_ERAS - 1], held[-1]
    found = [
        f"{last[what]} {_NAMES[what]} are held between runtimes, once it was {warm[what]}"
        for what, slack in _ONCE.items()
        if last[what] - warm[what] > slack
    ]
    return found or (_steady(held[WARM_ERAS:]) if len(eras) >= STEADY_ERAS else [])


def _steady(warm: Sequence[Mapping[str, int]]) -> list[str]:
    """What the last third of runtimes never held as little of as the first third at its most."""
    third = len(warm) // 3
    found = []
    for what, slack in _STEADILY.items():
        early, late = max(era[what] for era in warm[:third]), min(era[what] for era in warm[-third:])
        if late - early > slack:
            found.append(f"{_NAMES[what]} rise from runtime to runtime: at most {early} at first, {late} or more later")
    return found


@cache
def _libc() -> ctypes.CDLL | None:
    found = ctypes.CDLL(None) if sys.platform == "linux" else None
    return found if hasattr(found, "malloc_trim") else None


def _trim() -> None:
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)
