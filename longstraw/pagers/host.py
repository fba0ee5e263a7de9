"""The host tier: exact-size arenas of host memory, page-locked for CUDA, copied on two side streams."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from longstraw.errors import CapacityError
from longstraw.pagers.arena import REGISTER_BYTES, HostArena
from longstraw.pagers.extents import ExtentAllocator
from longstraw.pagers.numa import UNBOUND, Binding
from longstraw.pagers.protocol import Extent, check_rows
from longstraw.pagers.trace import Tracer, Track
from longstraw.pagers.transfer import DoneTransfer, Transfer, record_on, side_streams
from longstraw.resident.placement import HolesError, format_bytes


class HostPager:
    """`budget` bytes of host memory.

    Each growth step is one arena of exactly the missing bytes; arenas stay between transactions, because
    locking memory is slow. On a CPU the rows are used where they lie. On CUDA they are page-locked (unless
    `pinned` is False) and copied on one stream each way. `numa` is the node that they are bound to: a binding
    that was not asked for by name is lifted where the kernel refuses it, and `describe` says so.
    """

    kind: Literal["host"] = "host"

    def __init__(
        self,
        budget: int,
        device: torch.device,
        name: str = "host",
        *,
        pinned: bool = True,
        numa: Binding = UNBOUND,
    ) -> None:
        self.name = name
        self.device = device
        self.budget = budget
        self.peak = 0
        self.tracer: Tracer | None = None
        self._pinned = pinned
        self._binding = numa
        self._extents = ExtentAllocator()
        self._arenas: dict[int, HostArena] = {}  # by offset, ascending
        self._starts: list[int] = []
        self._in, self._out = side_streams(device)

    @property
    def used(self) -> int:
        """Bytes allocated now."""
        return self._extents.used

    def grow_to(self, nbytes: int) -> None:
        missing = nbytes - self._extents.capacity
        if missing > 0:
            self._grow(missing)

    def _grow(self, nbytes: int) -> None:
        while self._extents.capacity + nbytes > self.budget and self._drop_empty():
            pass
        if self._extents.capacity + nbytes > self.budget:
            raise HolesError(
                f"tier {self.name}: {format_bytes(nbytes)} asked for in one piece, "
                f"{format_bytes(self.used)} of {format_bytes(self.budget)} used, the largest hole is "
                f"{format_bytes(self.largest_free())}; raise its tiers[i].budget"
            )
        arena = self._make_arena(nbytes)
        start = self._extents.add_region(nbytes)
        self._arenas[start] = arena
        self._starts = list(self._arenas)

    def _make_arena(self, nbytes: int) -> HostArena:
        try:
            return HostArena(nbytes, self.device, pinned=self._pinned, node=self._binding.node)
        except OSError as refusal:
            if self._binding.asked:
                raise CapacityError(
                    f"tier {self.name}: {format_bytes(nbytes)} cannot be bound to NUMA node {self._binding.node} "
                    f"({refusal}); lower its tiers[i].budget, or set its numa to off"
                ) from refusal
            self._binding = Binding(node=None, why=f"not to node {self._binding.node}: {refusal}")
            return HostArena(nbytes, self.device, pinned=self._pinned)

    def _drop_empty(self) -> bool:
        """Give back one arena that holds nothing; says whether there was one."""
        for start, arena in self._arenas.items():
            if self._extents.drop_region(start, arena.memory.numel()):
                self._synchronize()
                arena.close()
                del self._arenas[start]
                self._starts = list(self._arenas)
                return True
        return False

    def largest_free(self) -> int:
        return self._extents.largest_free()

    def allocate(self, nbytes: int) -> Extent:
        offset = self._extents.allocate(nbytes)
        if offset is None:
            self._grow(nbytes)
            offset = self._extents.allocate(nbytes)
            assert offset is not None
        self.peak = max(self.peak, self.used)
        return Extent(self.name, offset, nbytes)

    def free(self, extent: Extent) -> None:
        self._extents.free(extent.offset, extent.nbytes)

    def view(self, extent: Extent, offset: int, nbytes: int) -> torch.Tensor | None:
        return None if self.device.type == "cuda" else self._bytes(extent, offset, nbytes)

    def _bytes(self, extent: Extent, offset: int, nbytes: int) -> torch.Tensor:
        start = self._starts[bisect_right(self._starts, extent.offset) - 1]
        at = extent.offset + offset - start
        return self._arenas[start].memory[at : at + nbytes]

    def read(self, extent: Extent, offset: int, target: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        return self._copy(self._in, target, self._bytes(extent, offset, target.numel()), after)

    def write(self, extent: Extent, offset: int, source: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        return self._copy(self._out, self._bytes(extent, offset, source.numel()), source, after)

    def _copy(
        self,
        stream: torch.cuda.Stream | None,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Transfer],
    ) -> Transfer:
        check_rows(target)
        check_rows(source)
        for transfer in after:
            transfer.order(stream)
        if stream is None:
            target.copy_(source)
            return DoneTransfer(target.numel())
        track = Track.TO_DEVICE if stream is self._in else Track.FROM_DEVICE
        span = None if self.tracer is None else self.tracer.begin_on(stream, track, self.name, bytes=target.numel())
        with torch.cuda.stream(stream):
            for low, high in self._unbroken(target if target.device.type == "cpu" else source):
                target[low:high].copy_(source[low:high], non_blocking=True)
        if span is not None:
            span.end()
        return record_on(stream, target.numel())

    def _unbroken(self, host: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Cut a range of an arena where one registered slice ends: CUDA refuses to copy across."""
        low, size, at = 0, host.numel(), int(host.storage_offset())
        while low < size:
            high = min(size, (at + low) // REGISTER_BYTES * REGISTER_BYTES + REGISTER_BYTES - at)
            yield low, high
            low = high

    def _synchronize(self) -> None:
        for stream in (self._in, self._out):
            if stream is not None:
                stream.synchronize()

    def describe(self) -> str:
        size = format_bytes(self._extents.capacity)
        node = self._binding.node
        where = f"bound to NUMA node {node}" if node is not None else "not bound to a NUMA node"
        return (
            f"{self.name}: {format_bytes(self.budget)} of host memory, {size} in {len(self._arenas)} arenas, "
            f"{self._how()}, {where} ({self._binding.why})"
        )

    def _how(self) -> str:
        if self.device.type != "cuda":
            return "used in place"
        if not self._pinned:
            return "pageable as asked (pinned: false), copied slowly"
        through = {arena.registered_with for arena in self._arenas.values() if arena.registered_with}
        return f"page-locked{f' through {through.pop()}' if through else ''}, copied"

    def close(self) -> None:
        self._synchronize()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self._starts = []
        self._extents = ExtentAllocator()
