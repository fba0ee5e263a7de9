"""What tests of failing transactions share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.faults import watched_streams


@pytest.fixture
def no_stream_stays_open() -> Iterator[None]:
    """Every stream that the test opened is closed behind it, and there was one."""
    with watched_streams() as streams:
        yield
    assert streams
    assert all(stream._closed for stream in streams)
