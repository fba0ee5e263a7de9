"""Tiers without memory: the runtime's own placement and schedules, to be counted instead of run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from longstraw.config import AUTO, Config, NvmeTier
from longstraw.errors import CapacityError
from longstraw.pagers.protocol import Extent
from longstraw.pagers.staging import StagingPool
from longstraw.pagers.stream import Request
from longstraw.pagers.transfer import DoneTransfer, Transfer
from longstraw.planner.machine import Machine
from longstraw.resident.lease import Access
from longstraw.resident.store import PageStore
from longstraw.runtime.adapter import ModelProfile
from longstraw.runtime.prompt_state import PromptState
from longstraw.runtime.sizing import block_rows, keep_outputs
from longstraw.runtime.tiers import TIER_SHARE

DEVICE = torch.device("cuda")
"""Plans are made for a GPU. Only its type is read, so that none need be there."""


class CountingPager:
    """A tier that hands out extents and holds nothing."""

    def __init__(self, kind: Literal["device", "host", "nvme"], budget: int, name: str) -> None:
        self.name, self.kind, self.budget, self.device = name, kind, budget, DEVICE
        self.used = 0
        self.peak = 0

    def grow_to(self, nbytes: int) -> None:
        """There is nothing to grow."""

    def largest_free(self) -> int:
        return self.budget - self.used

    def allocate(self, nbytes: int) -> Extent:
        if self.used + nbytes > self.budget:
            raise CapacityError(f"tier {self.name}: {nbytes} bytes asked for, {self.budget - self.used} are free")
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return Extent(self.name, self.used - nbytes, nbytes)

    def free(self, extent: Extent) -> None:
        self.used -= extent.nbytes

    def view(self, extent: Extent, offset: int, nbytes: int) -> torch.Tensor | None:
        return None

    def read(self, extent: Extent, offset: int, target: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        return DoneTransfer(target.numel())

    def write(self, extent: Extent, offset: int, source: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        return DoneTransfer(source.numel())

    def describe(self) -> str:
        return f"{self.name}: {self.budget} bytes that nothing is written to"

    def close(self) -> None:
        self.used = 0


def budgets(config: Config, machine: Machine) -> list[CountingPager]:
    """The configured tiers on that machine; `auto` resolves as it does in the runtime, on free memory as given."""
    pagers: list[CountingPager] = []
    for index, tier in enumerate(config.tiers):
        name: str = tier.kind
        if isinstance(tier, NvmeTier) and any(pager.kind == "nvme" for pager in pagers):
            name = f"nvme{index}"
        if tier.budget != AUTO:
            budget = tier.budget
        elif tier.kind == "device":
            free = machine.device_bytes - machine.context_bytes
            budget = 0 if config.tiers[index + 1 :] else int(free * TIER_SHARE["device"])
        else:
            room = machine.host_bytes if tier.kind == "host" else machine.disk_bytes
            budget = int(room * TIER_SHARE[tier.kind])
        pagers.append(CountingPager(tier.kind, budget, name))
    return pagers


def prompt_state(
    pagers: Sequence[CountingPager],
    profile: ModelProfile,
    chunks: Sequence[tuple[int, int]],
    config: Config,
    *,
    spare: bool = True,
) -> PromptState:
    """The prompt's pages over these tiers. Raises CapacityError as the runtime would.

    `spare`: whether there may be room to spare, which `auto` fills with attention outputs.
    """
    outputs = keep_outputs(config.capture.keep_attention, chunks[-1][1], DEVICE)
    return PromptState(
        PageStore(pagers, page_rows=config.pages.tokens),
        "plan",
        profile.layers,
        chunks=chunks,
        exact=config.gradient.prompt == "exact",
        accumulate_wide=config.gradient.accumulate == "float32",
        keep_outputs="never" if outputs == AUTO and not spare else outputs,
        block_tokens=block_rows(config.pages, DEVICE),
        lookahead=config.pages.lookahead,
        staging=StagingPool(torch.device("cpu")),
    )


@dataclass(kw_only=True)
class Traffic:
    """Bytes copied from tiers and to them, by kind of tier. What lies on the device is used in place."""

    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    def add(self, schedule: Sequence[Request]) -> None:
        """Count what a pass's stream would copy."""
        for request in schedule:
            for piece in request.segment.pieces(request.start, request.stop):
                kind = piece.pager.kind
                if kind == "device":
                    continue
                if request.access is not Access.FILL:
                    self.read[kind] = self.read.get(kind, 0) + piece.nbytes
                if request.access is not Access.READ:
                    self.written[kind] = self.written.get(kind, 0) + piece.nbytes

    @property
    def all_read(self) -> int:
        """Bytes over the link to the device."""
        return sum(self.read.values())

    @property
    def all_written(self) -> int:
        """Bytes over the link from the device."""
        return sum(self.written.values())
