"""GPU time by kernel, from torch's profiler: which kernels a stretch of work is made of, and how long none ran."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NAME_WIDTH = 120


class Timer:
    """Sections timed by CUDA events, without waiting for the device in between."""

    def __init__(self) -> None:
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    @contextmanager
    def section(self, name: str) -> Generator[None]:
        """Time what is enqueued inside."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        stop.record()
        self._events[name] = start, stop

    def seconds(self) -> dict[str, float]:
        """By section; waits for the device."""
        torch.cuda.synchronize()
        return {name: start.elapsed_time(stop) / 1e3 for name, (start, stop) in self._events.items()}


class KernelTimes:
    """Sections profiled one by one; the device is waited for at each end.

    Attributes:
        found: by section, microseconds: `span` from the first kernel's start to the last one's end, `busy` while some
            kernel ran, `copies` that ran beside them, and `kernels`, name -> [microseconds, launches], longest first.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    @contextmanager
    def section(self, name: str) -> Generator[None]:
        """Profile what is enqueued inside."""
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            yield
            torch.cuda.synchronize()
        self.found[name] = summary(
            [
                (event.name, event.time_range.start, event.time_range.end)
                for event in profiler.events()
                if event.device_type == DeviceType.CUDA
            ]
        )


def summary(events: list[tuple[str, float, float]]) -> dict[str, Any]:
    """What `KernelTimes.found` holds of one section, from (name, start, end) of each kernel and copy."""
    kernels: dict[str, list[float]] = {}
    busy = copies = 0.0
    first, last, covered = float("inf"), float("-inf"), float("-inf")
    for name, start, end in sorted(events, key=lambda event: event[1]):
        if name.startswith("Memcpy"):
            copies += end - start
            continue
        entry = kernels.setdefault(name[:NAME_WIDTH], [0.0, 0])
        entry[0] += end - start
        entry[1] += 1
        first, last = min(first, start), max(last, end)
        busy += max(end - max(start, covered), 0.0)
        covered = max(covered, end)
    return {
        "span": last - first if kernels else 0.0,
        "busy": busy,
        "copies": copies,
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1][0])),
    }
