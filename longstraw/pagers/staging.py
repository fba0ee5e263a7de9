"""Staging slots: buffers of the compute device that rows pass through, reused from one pass to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longstraw.pagers import debug
from longstraw.pagers.transfer import Ended, Transfer, record


@dataclass(kw_only=True, slots=True, eq=False)
class Slot:
    """One buffer, uint8 [n], and what has to end before it may be overwritten."""

    buffer: torch.Tensor
    after: tuple[Transfer, ...]


class StagingPool:
    """Slots handed out by size: the smallest free one that is large enough, else a new one.

    A pool outlives the passes that use it. `bytes` is the size of all slots now, `peak` the largest it has
    been. In debug mode a slot is full of NaN when it is handed out.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._poisons = debug.enabled()
        self._free: list[Slot] = []
        self.bytes = 0
        self.peak = 0

    @property
    def lent_bytes(self) -> int:
        """Bytes of the slots that were handed out and not given back."""
        return self.bytes - sum(slot.buffer.numel() for slot in self._free)

    def acquire(self, nbytes: int, new_bytes: int | None = None) -> Slot:
        """A slot of `nbytes` or more. A new one gets `new_bytes`, the largest that its user will ask for
        again."""
        slot = self._acquire(nbytes, new_bytes)
        if self._poisons:
            for transfer in slot.after:
                transfer.wait()
            slot.buffer.fill_(debug.POISON)
            slot.after = (record(self.device),)
        return slot

    def _acquire(self, nbytes: int, new_bytes: int | None) -> Slot:
        fitting = [slot for slot in self._free if slot.buffer.numel() >= nbytes]
        if fitting:
            # Of equal sizes the one whose last copy is done comes first: nothing has to wait for it.
            slot = min(fitting, key=lambda s: (s.buffer.numel(), not all(t.done() for t in s.after)))
            self._free.remove(slot)
            return slot
        with torch.inference_mode(False):
            buffer = torch.empty(max(nbytes, new_bytes or 0), dtype=torch.uint8, device=self.device)
        self.bytes += buffer.numel()
        self.peak = max(self.peak, self.bytes)
        # The allocator may hand out memory that earlier work of this stream still uses; side streams must
        # wait.
        return Slot(buffer=buffer, after=(record(self.device),))

    def give_back(self, slot: Slot, after: Sequence[Transfer]) -> None:
        """Return a slot; it is overwritten only after the transfers in `after`."""
        slot.after = tuple(Ended(transfer) for transfer in after)
        self._free.append(slot)

    def trim(self) -> None:
        """Free the slots that nobody has. The allocator may reuse their memory after their copies only."""
        for slot in self._free:
            for transfer in slot.after:
                transfer.wait()
            self.bytes -= slot.buffer.numel()
        self._free.clear()
