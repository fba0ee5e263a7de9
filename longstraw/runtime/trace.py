"""The trace of a run as Chrome's JSON, which Perfetto reads: phases, passes, layers, copies, disk and stalls."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from longstraw.collectives import Ranks
from longstraw.config import Config
from longstraw.errors import ConfigError
from longstraw.pagers.debug import DelayedPager
from longstraw.pagers.host import HostPager
from longstraw.pagers.nvme import NvmePager
from longstraw.pagers.trace import Track
from longstraw.resident.store import PageStore

_Event = dict[str, Any]


def build_tracer(config: Config, store: PageStore, device: torch.device, ranks: Ranks | None) -> Recorder | None:
    """The recorder that `trace` asks for, told of by the store's tiers; None without."""
    if config.trace is None:
        return None
    recorder = Recorder(config.trace, device, None if ranks is None else ranks.rank)
    for pager in store.pagers:
        inner = pager.inner if isinstance(pager, DelayedPager) else pager
        if isinstance(inner, HostPager | NvmePager):
            inner.tracer = recorder
    return recorder


class Recorder:
    """`Tracer` that writes a file. Streams' times come from CUDA events, which are read when a transaction is over.

    The file is whole after each transaction: an array of complete ("X") events in microseconds since the recorder was
    made, one process a rank, one thread a track (Trace Event Format, JSON array form).

    Args:
        path: of the file, which is replaced. With ranks, each but the first has its number in the name.
        device: that computes.
        rank: of this process; None for a single one.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, device: torch.device, rank: int | None = None) -> None:
        self.path = path if not rank else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        self._device = device
        self._rank = rank or 0
        self._lock = threading.Lock()
        self._done: list[_Event] = []
        self._streamed: list[tuple[_Event, torch.cuda.Event, torch.cuda.Event]] = []
        self._threads: dict[str, int] = {}
        self._anchor: tuple[torch.cuda.Event, float] | None = None
        self._zero = perf_counter()
        name = f"rank {rank}" if rank is not None else "longstraw"
        first = {"ph": "M", "name": "process_name", "pid": self._rank, "tid": 0, "args": {"name": name}}
        try:
            self.path.write_text(f"[\n{json.dumps(first)}\n]", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"trace: {self.path} cannot be written ({error}); name a file in a folder of yours"
            ) from error
        for track in Track:
            self._thread(track.value)

    def start(self) -> None:
        """A transaction begins: the two clocks are read together, so that streams' times can be told on the host's.

        Waits for the device; not to be called inside a pass.
        """
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        event.record(torch.cuda.current_stream(self._device))
        event.synchronize()
        self._anchor = (event, perf_counter() - self._zero)

    def begin(self, track: Track, name: str, **details: Any) -> HostSpan:
        thread = threading.current_thread()
        # Several workers have the disk at once, and spans on one row must not overlap.
        row = f"{track.value} {thread.name}" if track is Track.DISK else track.value
        return HostSpan(self, self._event(row, name, details))

    def begin_on(
        self, stream: torch.cuda.Stream | None, track: Track, name: str, **details: Any
    ) -> HostSpan | StreamSpan:
        if stream is None:
            return HostSpan(self, self._event(track.value, name, details))
        return StreamSpan(self, self._event(track.value, name, details), stream)

    def waited(self, start: torch.cuda.Event, stop: torch.cuda.Event, track: Track, name: str) -> None:
        self._streamed.append((self._event(track.value, name, {}), start, stop))

    def waited_host(self, seconds: float, track: Track, name: str) -> None:
        now = perf_counter()
        self.add_host(self._event(track.value, name, {}), now - seconds, now)

    def add_host(self, event: _Event, start: float, stop: float) -> None:
        """A span ended, in seconds of `perf_counter`."""
        start -= self._zero
        self._done.append(event | {"ts": start * 1e6, "dur": (stop - self._zero - start) * 1e6})

    def add_streamed(self, event: _Event, start: torch.cuda.Event, stop: torch.cuda.Event) -> None:
        """A span whose end has been issued."""
        self._streamed.append((event, start, stop))

    def finish(self) -> None:
        """A transaction is over: add its spans to the file. Waits for the device."""
        if self._streamed:
            torch.cuda.synchronize(self._device)
            assert self._anchor is not None, "the recorder was not started"
            zero, at = self._anchor
            for event, start, stop in self._streamed:
                began = at + zero.elapsed_time(start) / 1e3  # type: ignore[no-untyped-call]
                length = start.elapsed_time(stop) / 1e3  # type: ignore[no-untyped-call]
                self._done.append(event | {"ts": began * 1e6, "dur": length * 1e6})
            self._streamed.clear()
        with self._lock:
            done, self._done = self._done, []
        if not done:
            return
        with self.path.open("r+b") as file:
            file.seek(-2, 2)  # the array's end
            file.write(b"".join(b",\n" + json.dumps(event).encode() for event in done) + b"\n]")

    def _event(self, row: str, name: str, details: dict[str, Any]) -> _Event:
        event = {"ph": "X", "name": name, "pid": self._rank, "tid": self._thread(row)}
        return event | {"args": details} if details else event

    def _thread(self, row: str) -> int:
        with self._lock:
            number = self._threads.get(row)
            if number is None:
                number = self._threads[row] = len(self._threads) + 1
                common = {"ph": "M", "pid": self._rank, "tid": number}
                self._done.append(common | {"name": "thread_name", "args": {"name": row}})
                self._done.append(common | {"name": "thread_sort_index", "args": {"sort_index": number}})
        return number


class HostSpan:
    """A span of the host's time."""

    __slots__ = ("_event", "_recorder", "_start")

    def __init__(self, recorder: Recorder, event: _Event) -> None:
        self._recorder, self._event = recorder, event
        self._start = perf_counter()

    def end(self) -> None:
        self._recorder.add_host(self._event, self._start, perf_counter())


class StreamSpan:
    """A span of a stream's time, from the work issued so far to the work issued by its end."""

    __slots__ = ("_event", "_recorder", "_start", "_stream")

    def __init__(self, recorder: Recorder, event: _Event, stream: torch.cuda.Stream) -> None:
        self._recorder, self._event, self._stream = recorder, event, stream
        self._start = _mark(stream)

    def end(self) -> None:
        self._recorder.add_streamed(self._event, self._start, _mark(self._stream))


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
