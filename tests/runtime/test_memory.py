"""How much of a device's memory is there to plan with."""

from __future__ import annotations

import pytest
import torch

from longstraw.runtime.memory import free_device_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("fraction", "want"),
    [
        (1.0, 60 + 9),  # what the driver has, and what torch's cache holds beside live tensors
        (0.5, 50 - 11),
        (0.1, 0),  # already beyond it
    ],
)
def test_free_bytes_keep_to_the_fraction_that_the_user_set(
    monkeypatch: pytest.MonkeyPatch, fraction: float, want: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 11 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
    assert free_device_bytes(torch.device("cuda", 0)) == want * GIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_free_bytes_are_what_can_be_allocated() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    # Segments that are partly in use stay in the cache, and are free for small tensors only.
    margin = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) + (64 << 20)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + GIB) / total, device)
    try:
        free = free_device_bytes(device)
        assert GIB - 4096 <= free <= GIB + margin
        torch.empty(free - margin, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(free + margin, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
        torch.cuda.empty_cache()
