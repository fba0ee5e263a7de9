"""The device tier: memory of the compute device itself. Rows are used where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from longstraw.errors import CapacityError
from longstraw.pagers.protocol import Extent, check_rows
from longstraw.pagers.transfer import DoneTransfer, Transfer, record
from longstraw.resident.placement import format_bytes


class DevicePager:
    """`budget` bytes of the compute device, one allocation an extent.

    Copies run on the current stream, so they are ordered with the consumer's own work.
    """

    kind: Literal["device"] = "device"

    def __init__(self, budget: int, device: torch.device, name: str = "device") -> None:
        self.name = name
        self.device = device
        self.budget = budget
        self.used = 0
        self.peak = 0
        self._memory: dict[int, torch.Tensor] = {}
        self._next = 0

    def grow_to(self, nbytes: int) -> None:
        """Nothing to prepare: the device's allocator is fast."""

    def largest_free(self) -> int:
        return self.budget - self.used

    def allocate(self, nbytes: int) -> Extent:
        if self.used + nbytes > self.budget:
            raise CapacityError(
                f"tier {self.name}: {format_bytes(nbytes)} asked for, "
                f"{format_bytes(self.budget - self.used)} of {format_bytes(self.budget)} free; "
                "raise its tiers[i].budget"
            )
        with torch.inference_mode(False):
            self._memory[self._next] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        extent = Extent(self.name, self._next, nbytes)
        # Offsets only have to differ here. They grow like addresses, so that an extent is told apart in a
        # trace.
        self._next += nbytes
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return extent

    def free(self, extent: Extent) -> None:
        del self._memory[extent.offset]
        self.used -= extent.nbytes

    def view(self, extent: Extent, offset: int, nbytes: int) -> torch.Tensor:
        return self._memory[extent.offset][offset : offset + nbytes]

    def read(self, extent: Extent, offset: int, target: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        return self._copy(target, self.view(extent, offset, target.numel()), after)

    def write(self, extent: Extent, offset: int, source: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        return self._copy(self.view(extent, offset, source.numel()), source, after)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Transfer]) -> Transfer:
        check_rows(target)
        check_rows(source)
        for transfer in after:
            transfer.wait()
        target.copy_(source)
        # On CUDA the copy has only been issued: others that use either end (a side stream) wait for the mark.
        return DoneTransfer(target.numel()) if self.device.type != "cuda" else record(self.device)

    def describe(self) -> str:
        return f"{self.name}: {format_bytes(self.budget)} of {self.device}, used in place"

    def close(self) -> None:
        self._memory.clear()
        self.used = 0
