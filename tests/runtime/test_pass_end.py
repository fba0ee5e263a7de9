"""How a pass ends: both streams are closed, and the first error is the one that is raised."""

from __future__ import annotations

import pytest

from longstraw.errors import PageLostError
from longstraw.runtime.passes import ForwardPass, Purpose


class Stream:
    """A page stream whose write-back failed, known when it is closed."""

    def __init__(self, lost: str | None = None) -> None:
        self.closed = False
        self.bytes_read: dict[str, int] = {}
        self.bytes_written: dict[str, int] = {}
        self.stall_seconds = 0.0
        self.stalls: list[object] = []
        self._lost = lost

    def close(self) -> None:
        self.closed = True
        if self._lost is not None:
            raise PageLostError(self._lost)


def open_pass(*streams: Stream) -> ForwardPass:
    forward = ForwardPass(Purpose.PROBE, [3])
    forward._forward, forward._backward = streams  # type: ignore[assignment]
    return forward


def test_a_lost_page_is_raised_and_the_other_stream_is_closed_too() -> None:
    first, second = Stream("first"), Stream("second")
    with pytest.raises(PageLostError, match="first"):
        open_pass(first, second).__exit__(None, None, None)
    assert first.closed
    assert second.closed


def test_the_error_that_ended_the_pass_is_not_replaced() -> None:
    first, second = Stream("disk"), Stream()
    with (  # noqa: PT012
        pytest.raises(ValueError, match="the user's own") as raised,
        open_pass(first, second) as forward,
    ):
        forward._forward, forward._backward = first, second  # type: ignore[assignment]
        raise ValueError("the user's own")
    assert raised.value.__notes__ == ["while closing the pass: disk"]
    assert second.closed
