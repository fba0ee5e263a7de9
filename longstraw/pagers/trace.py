"""What a trace is told of: spans of time on tracks. Nothing is measured where there is no tracer."""

from __future__ import annotations

import enum
from typing import Any, Protocol

import torch


class Track(enum.Enum):
    """Rows of a trace, from top to bottom."""

    PHASE = "phases"
    PASS = "passes"
    LAYER = "layers"
    STALL = "stalls"
    TO_DEVICE = "copies to the device"
    FROM_DEVICE = "copies from the device"
    DISK = "disk"


class Span(Protocol):
    """Something that has begun."""

    def end(self) -> None:
        """It ends now; on a stream, when the work issued so far has ended."""


class Tracer(Protocol):
    """Takes spans down. Safe to call from several threads; never waits for a device."""

    def begin(self, track: Track, name: str, **details: Any) -> Span:
        """A span of the calling thread's own time."""

    def begin_on(self, stream: torch.cuda.Stream | None, track: Track, name: str, **details: Any) -> Span:
        """A span of a stream's time; of the calling thread's without a stream."""

    def waited(self, start: torch.cuda.Event, stop: torch.cuda.Event, track: Track, name: str) -> None:
        """A span between two recorded events that keep time."""

    def waited_host(self, seconds: float, track: Track, name: str) -> None:
        """A span of the host's time that ends now."""
