"""How long compute waited for rows, and for which tier: by CUDA's own clock where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch

_NOTHING = 10e-6
"""Two readings of a clock with no wait between them are still some microseconds apart."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait for rows of the tier `tier`. With events, the compute stream's; else `host` seconds of the host's."""

    tier: str
    host: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def known(self) -> bool:
        """Whether `seconds` can be told without waiting."""
        return self.events is None or bool(self.events[1].query())  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        """The length of the wait; only once it is `known`."""
        found = self.host
        if self.events is not None:
            found = float(self.events[0].elapsed_time(self.events[1])) / 1e3  # type: ignore[no-untyped-call]
        return found if found > _NOTHING else 0.0


class StallClock:
    """Measures one wait: made before it, `stop` after it."""

    __slots__ = ("_began", "_device", "_event")

    def __init__(self, device: torch.device, *, copied: bool) -> None:
        self._device = device
        # Rows used where they lie are never waited for on the device.
        self._event = self._mark() if copied and device.type == "cuda" else None
        self._began = perf_counter()

    def stop(self, tier: str) -> Stall:
        """The wait, blamed on `tier`."""
        host = perf_counter() - self._began
        # Time that the host waits, the stream's events see as well.
        return Stall(tier, host, None if self._event is None else (self._event, self._mark()))

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
