"""Host memory of an exact size, page-aligned; for CUDA faulted in by several threads and registered."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from longstraw.errors import CapacityError
from longstraw.resident.placement import format_bytes

REGISTER_BYTES = 1 << 30
"""Bytes registered with CUDA in one call. A copy must not cross from one such slice into the next."""


class HostArena:
    """`nbytes` of host memory as a uint8 tensor, `memory`, and the same bytes for Python's own calls,
    `bytes`.

    With a CUDA device it is page-locked: mapped, faulted in, and registered slice by slice. torch's own
    pinned allocator is not used because it rounds sizes up to powers of two. Raises `CapacityError` if the
    machine does not give or lock it; there is no fallback to pageable memory.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._registered: list[int] = []
        self._device = device
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as cause:
            raise CapacityError(
                f"the machine does not give {format_bytes(nbytes)} of host memory ({cause}); "
                "lower the host tier's tiers[i].budget"
            ) from cause
        self.bytes = memoryview(mapping)
        with torch.inference_mode(False):
            self.memory = torch.frombuffer(mapping, dtype=torch.uint8)
        if device.type == "cuda":
            self._fault_in()
            self._register()

    def _fault_in(self) -> None:
        """Touch every memory page from several threads: the kernel clears pages at about 1.3 GB/s on one."""
        workers = min(8, os.cpu_count() or 1)
        share = -(-self.memory.numel() // (workers * mmap.PAGESIZE)) * mmap.PAGESIZE
        parts = [self.memory[i * share : (i + 1) * share : mmap.PAGESIZE] for i in range(workers)]
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda part: part.zero_(), [part for part in parts if part.numel()]))

    def _register(self) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            for start in range(0, self.memory.numel(), REGISTER_BYTES):
                size = min(REGISTER_BYTES, self.memory.numel() - start)
                status = int(runtime.cudaHostRegister(self.memory.data_ptr() + start, size, 0))
                if status != 0:
                    self.close()
                    raise CapacityError(
                        f"CUDA did not lock {format_bytes(self.memory.numel())} of host memory "
                        f"(error {status} at {format_bytes(start)}); lower the host "
                        "tier's tiers[i].budget, or raise the limit of locked memory (ulimit -l, or the "
                        "container's)"
                    )
                self._registered.append(self.memory.data_ptr() + start)

    def close(self) -> None:
        """Unregister. No copy may be on its way. The memory goes when its last tensor does. Idempotent."""
        while self._registered:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = int(runtime.cudaHostUnregister(self._registered.pop()))
            assert status == 0, f"cudaHostUnregister: error {status}"
