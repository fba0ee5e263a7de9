"""How much memory is free, on the device and on the host, and what counts as having run out of it."""

from __future__ import annotations

import torch

from longstraw.pagers.limits import free_host_bytes

__all__ = ["free_device_bytes", "free_host_bytes", "is_out_of_memory", "release_cached"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that an allocation failed, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch has no type of its own for this on the CPU.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def free_device_bytes(device: torch.device) -> int:
    """Bytes that torch can still allocate on `device`: its own cache counts as free, and what lies beyond
    `torch.cuda.set_per_process_memory_fraction` does not."""
    if device.type != "cuda":
        return free_host_bytes()
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    index = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
    allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    return max(min(free + torch.cuda.memory_reserved(device), allowed) - allocated, 0)


def release_cached(device: torch.device) -> None:
    """Give torch's cached blocks back, so that a narrower retry does not meet the fragments of the wider try."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
