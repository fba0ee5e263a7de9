"""The future of one copy, in three kinds: done already, on a CUDA stream, on worker threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

import torch


class Transfer(Protocol):
    """One copy of `nbytes` bytes on its way.

    `wait` orders the consumer (the current CUDA stream, or the calling thread) after it. `order` does the
    same for another stream. Both raise the copy's error where it is known by then; `result` blocks the host
    until the copy has ended and raises its error, `done` never blocks and never raises.
    """

    nbytes: int

    def wait(self) -> None: ...

    def order(self, stream: torch.cuda.Stream | None) -> None: ...

    def done(self) -> bool: ...

    def result(self) -> int: ...


class DoneTransfer:
    """A copy that ended before it was returned."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def wait(self) -> None:
        """Nothing to wait for."""

    def order(self, stream: torch.cuda.Stream | None) -> None:
        """Nothing to order."""

    def done(self) -> bool:
        return True

    def result(self) -> int:
        return self.nbytes


class EventTransfer:
    """A copy on a CUDA stream, ended when the event recorded behind it has happened."""

    __slots__ = ("_device", "_event", "nbytes")

    def __init__(self, nbytes: int, event: torch.cuda.Event, device: torch.device) -> None:
        self.nbytes = nbytes
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def order(self, stream: torch.cuda.Stream | None) -> None:
        if stream is None:
            self._event.synchronize()
        else:
            stream.wait_event(self._event)

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def result(self) -> int:
        self._event.synchronize()
        return self.nbytes


class ThreadTransfer:
    """A copy that worker threads make in parts. When a part's future is done its bytes are in place, on CUDA
    too."""

    __slots__ = ("_parts", "nbytes")

    def __init__(self, nbytes: int, parts: Sequence[Future[None]]) -> None:
        self.nbytes = nbytes
        self._parts = tuple(parts)

    def wait(self) -> None:
        self.result()

    def order(self, stream: torch.cuda.Stream | None) -> None:
        self.result()

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def result(self) -> int:
        failure: BaseException | None = None
        # Every part ends before the error is raised: none may still touch the buffers.
        for part in self._parts:
            failure = part.exception() or failure
        if failure is not None:
            raise failure
        return self.nbytes


class Ended:
    """Only the end of another copy, well or not: what a buffer waits for before it is overwritten.

    A failure is raised where the copy's own bytes are asked for, not to whoever gets the buffer next.
    """

    __slots__ = ("_transfer", "nbytes")

    def __init__(self, transfer: Transfer) -> None:
        self.nbytes = 0
        self._transfer = transfer

    def wait(self) -> None:
        with suppress(Exception):
            self._transfer.wait()

    def order(self, stream: torch.cuda.Stream | None) -> None:
        with suppress(Exception):
            self._transfer.order(stream)

    def done(self) -> bool:
        return self._transfer.done()

    def result(self) -> int:
        with suppress(Exception):
            self._transfer.result()
        return 0


def record(device: torch.device) -> Transfer:
    """A mark behind all work that the consumer has issued so far on `device` (its current stream on CUDA)."""
    if device.type != "cuda":
        return DoneTransfer(0)
    return record_on(torch.cuda.current_stream(device), 0)


def record_on(stream: torch.cuda.Stream, nbytes: int) -> Transfer:
    """A copy of `nbytes` that ends with the work issued so far on `stream`."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return EventTransfer(nbytes, event, stream.device)


def side_streams(device: torch.device) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]:
    """One stream for copies to the device and one for copies from it; none on a CPU."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
