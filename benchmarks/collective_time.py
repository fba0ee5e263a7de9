"""The share of a GPU's time that NCCL's kernels take, from torch's profiler: all of it, and what nothing hides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTime:
    """GPU time of one profiled stretch, in seconds.

    Attributes:
        wall: from the first event on the GPU to the end of the last.
        busy: in which some kernel that is not a collective ran (copies are not counted).
        collectives: in which some collective ran, waiting for the other rank included.
        exposed: the part of `collectives` in which no other kernel ran.
        by_name: seconds of NCCL's kernels by their names, summed.
    """

    wall: float
    busy: float
    collectives: float
    exposed: float
    by_name: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, and the shares of the wall time."""
        return {
            "wall": self.wall, "busy": self.busy, "collectives": self.collectives, "exposed": self.exposed,
            "share": self.collectives / self.wall, "exposed_share": self.exposed / self.wall, "by_name": self.by_name,
        }  # fmt: skip


def measure(function: Callable[[], object]) -> CollectiveTime:
    """Profile one call of `function` on this process's GPU. Only the GPU's events are recorded: they cost little."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    results = profiler.profiler
    assert results is not None and results.kineto_results is not None
    return account(
        (event.name(), event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9)
        for event in results.kineto_results.events()
        # Ranges that the frameworks name are shown on the GPU's timeline as well.
        if event.device_type().name == "CUDA" and not event.is_user_annotation()
    )


def account(events: Iterable[tuple[str, float, float]]) -> CollectiveTime:
    """Sort the GPU's events, each a name with its start and end in seconds."""
    collectives: list[Span] = []
    others: list[Span] = []
    everything: list[Span] = []
    by_name: dict[str, float] = defaultdict(float)
    for name, start, end in events:
        everything.append((start, end))
        if name.startswith("ncclDevKernel"):
            collectives.append((start, end))
            by_name[name.partition("(")[0]] += end - start
        elif not name.startswith(("Memcpy", "Memset", "nccl:")):
            others.append((start, end))
    if not everything:
        raise RuntimeError("the profiler recorded nothing on the GPU; is CUPTI there, and free of another profiler?")
    together, compute = length(collectives), length(others)
    return CollectiveTime(
        wall=max(end for _, end in everything) - min(start for start, _ in everything),
        busy=compute,
        collectives=together,
        exposed=length([*collectives, *others]) - compute,
        by_name=dict(by_name),
    )


def length(spans: Iterable[Span]) -> float:
    """Of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
