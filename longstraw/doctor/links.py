"""How fast bytes go between host and GPU: each way, both at once, one GPU alone and all together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longstraw.pagers.arena import REGISTER_BYTES, HostArena
from longstraw.pagers.numa import choose_node
from longstraw.pagers.transfer import side_streams

BYTES = min(1 << 30, REGISTER_BYTES)
"""Bytes of one copy: not across two registered slices, which CUDA would refuse."""
_REPEATS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """Bytes a second. `devices` are the GPUs that copied at the same time; the rates are of all together."""

    devices: tuple[int, ...]
    to_device: float
    from_device: float
    both: float


class _Ends:
    """One GPU's ends of the copies: locked host memory near to it, two device buffers, two streams."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        node = choose_node("auto", self.device).node
        self.arenas = [HostArena(BYTES, self.device, node=node) for _ in range(2)]
        self.buffers = [torch.empty(BYTES, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self.streams = side_streams(self.device)

    def copy(self, *, to_device: bool, from_device: bool) -> None:
        into, out = self.streams
        assert into is not None
        assert out is not None
        if to_device:
            with torch.cuda.stream(into):
                self.buffers[0].copy_(self.arenas[0].memory, non_blocking=True)
        if from_device:
            with torch.cuda.stream(out):
                self.arenas[1].memory.copy_(self.buffers[1], non_blocking=True)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        for arena in self.arenas:
            arena.close()


def measure_links() -> list[LinkRates]:
    """Each GPU alone, then all at once if there are several. Empty without a GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ends = [_Ends(index) for index in range(count)]
    try:
        groups = [[end] for end in ends] + ([ends] if count > 1 else [])
        return [_measure(group) for group in groups]
    finally:
        for end in ends:
            end.close()


def _measure(ends: Sequence[_Ends]) -> LinkRates:
    def rate(*, to_device: bool, from_device: bool) -> float:
        best = 0.0
        for _ in range(3):
            for end in ends:
                torch.cuda.synchronize(end.device)
            began = time.perf_counter()
            for _ in range(_REPEATS):
                for end in ends:
                    end.copy(to_device=to_device, from_device=from_device)
            for end in ends:
                torch.cuda.synchronize(end.device)
            moved = BYTES * _REPEATS * len(ends) * (to_device + from_device)
            best = max(best, moved / (time.perf_counter() - began))
        return best

    return LinkRates(
        devices=tuple(end.device.index for end in ends),
        to_device=rate(to_device=True, from_device=False),
        from_device=rate(to_device=False, from_device=True),
        both=rate(to_device=True, from_device=True),
    )
