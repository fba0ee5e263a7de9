"""The peak of device memory, over a transaction and lap by lap."""

from __future__ import annotations

import torch


class DevicePeak:
    """Most bytes that torch had allocated on a CUDA device; 0 on a CPU, which does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest = 0

    def begin(self) -> None:
        """Start measuring."""
        self._highest = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def lap(self) -> int:
        """The peak since the last lap."""
        if self._device.type != "cuda":
            return 0
        found = torch.cuda.max_memory_allocated(self._device)
        self._highest = max(self._highest, found)
        torch.cuda.reset_peak_memory_stats(self._device)
        return found

    def highest(self) -> int:
        """The peak since `begin`."""
        self.lap()
        return self._highest
