"""Host memory of an exact size, page-aligned; for CUDA faulted in and registered in slices, side by side."""

from __future__ import annotations

import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from longstraw.errors import CapacityError
from longstraw.pagers import limits, numa
from longstraw.pagers.locking import Locker, make_locker
from longstraw.resident.placement import format_bytes

REGISTER_BYTES = 256 << 20
"""Bytes registered with CUDA in one call. A copy must not cross from one such slice into the next."""
WORKERS = 8
"""Slices that are faulted in and registered at once. The kernel clears pages at about 1.3 GB/s on one thread."""
_MAP_NORESERVE = 0x4000
"""Python 3.12's mmap has no name for it. Without, the kernel refuses a mapping larger than its count of the machine's
memory, which some machines only reach as memory is used; what is free was looked at before."""
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HostArena:
    """`nbytes` of host memory as a uint8 tensor, `memory`, and the same bytes for Python's own calls, `bytes`.

    With a CUDA device it is page-locked unless `pinned` is False: mapped, bound to the NUMA node `node` (if one is
    given), faulted in, and registered, slice by slice. torch's own pinned allocator is not used because it rounds
    sizes up to powers of two. `registered_with` is what it was registered through, or None.

    Raises CapacityError if the machine does not give or lock it (there is no fallback to pageable memory), and
    OSError if it cannot be bound to the node.
    """

    def __init__(
        self,
        nbytes: int,
        device: torch.device,
        *,
        pinned: bool = True,
        node: int | None = None,
        workers: int = WORKERS,
    ) -> None:
        self._registered: list[int] = []
        self._locker: Locker | None = None
        free = limits.free_host_bytes()
        if nbytes > free:
            raise CapacityError(
                f"the machine does not give {format_bytes(nbytes)} of host memory: {limits.describe_host_limits()}; "
                f"lower the host tier's tiers[i].budget to {format_bytes(free)} or less, or raise the limit"
            )
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, ValueError, OverflowError) as cause:
            raise CapacityError(
                f"the machine does not give {format_bytes(nbytes)} of host memory ({cause}); "
                "lower the host tier's tiers[i].budget"
            ) from cause
        self.bytes = memoryview(mapping)
        with torch.inference_mode(False):
            self.memory = torch.frombuffer(mapping, dtype=torch.uint8)
        if node is not None:
            numa.bind(self.memory.data_ptr(), nbytes, node)
        if device.type == "cuda" and pinned:
            if _HUGE_PAGES.exists() and nbytes >= 2 << 20:
                # Fewer, larger pages to fault in and to register.
                mapping.madvise(mmap.MADV_HUGEPAGE)
            self._locker = make_locker(device)
            # Memory of a runtime that is dropped without `close` would stay locked, though nobody has it any more.
            weakref.finalize(self, _unlock, self._locker, self._registered, os.getpid()).atexit = False
            self._lock_all(self._locker, min(workers, os.cpu_count() or 1))

    @property
    def registered_with(self) -> str | None:
        return self._locker.name if self._locker is not None else None

    def _lock_all(self, locker: Locker, workers: int) -> None:
        total = self.memory.numel()
        starts = list(range(0, total, REGISTER_BYTES))
        # The first alone: where locking is forbidden, that shows before the rest is faulted in.
        failures = [self._lock_slice(locker, starts[0])]
        if failures == [None] and len(starts) > 1:
            with ThreadPoolExecutor(min(workers, len(starts) - 1), "longstraw-register") as pool:
                failures += pool.map(lambda start: self._lock_slice(locker, start), starts[1:])
        for failure in failures:
            if failure is not None:
                start, status = failure
                self.close()
                raise CapacityError(
                    f"CUDA did not lock {format_bytes(total)} of host memory (error {status} at "
                    f"{format_bytes(start)}): {limits.describe_locked_limit()}; {limits.describe_host_limits()}. Lower "
                    "the host tier's tiers[i].budget, or, to train with slower copies, set its pinned to false"
                )

    def _lock_slice(self, locker: Locker, start: int) -> tuple[int, int] | None:
        """Fault in and register one slice. Where it failed and CUDA's error, or None."""
        part = self.memory[start : start + REGISTER_BYTES]
        part[:: mmap.PAGESIZE].zero_()
        status = locker.register(part.data_ptr(), part.numel())
        if status != 0:
            return start, status
        self._registered.append(part.data_ptr())
        return None

    def close(self) -> None:
        """Unregister. No copy may be on its way. The memory goes when its last tensor does. Idempotent."""
        if self._locker is not None:
            _unlock(self._locker, self._registered, os.getpid())


def _unlock(locker: Locker, registered: list[int], pid: int) -> None:
    # A forked child has the addresses and not the registrations.
    while registered and os.getpid() == pid:
        status = locker.unregister(registered.pop())
        assert status == 0, f"cudaHostUnregister: error {status}"
