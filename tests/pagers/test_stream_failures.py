"""Streams that fail or are left: pages are LOST where they must be, and nothing stays leased or reserved."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from longstraw.errors import PageLostError, PageStateError
from longstraw.pagers import PageStream, StagingPool
from longstraw.resident import Access, PageState, PageStore, Segment
from tests.pagers.streams import (
    CPU,
    FILL,
    PAGE,
    READ,
    ROWS,
    UPDATE,
    cut,
    fill,
    noise,
    read_rows,
    requests,
    reserve,
    same_bits,
    states,
)


def _spoil(out: torch.Tensor, access: Access) -> None:
    if access is not READ:
        out.fill_(1)
    raise KeyError("mine")


def _fill_then_fail(stream: PageStream, segment: Segment) -> None:
    with stream:
        with stream.next(segment, 0, 9):
            pass
        raise KeyError("first")


@pytest.mark.parametrize("access", list(Access))
def test_exception_inside(store: PageStore, access: Access) -> None:
    segment, rows = reserve(store), noise(ROWS)
    fill(store, segment, rows)
    ranges, pool = [(100, 150), (200, 300), (400, 500)], StagingPool(CPU)
    stream = PageStream(store, requests(segment, ranges, access), device=CPU, staging=pool)
    with pytest.raises(KeyError, match="mine"), stream.next(segment, 100, 150) as out:
        _spoil(out, access)
    stream.close()
    touched, beside = segment.pages[100 // PAGE], segment.pages[0]
    segment.settle(block=True)
    if access is UPDATE:
        assert touched.state is PageState.LOST
    elif access is FILL:
        assert (touched.state, touched.filled) == (PageState.RESIDENT, 100 % PAGE)
    else:
        assert states(segment) == {PageState.RESIDENT}
    assert beside.state is PageState.RESIDENT
    assert len(segment.leases) == 0
    pool.trim()
    assert pool.bytes == 0
    store.void(segment)
    fill(store, segment, rows)  # the same memory is as good as new
    assert same_bits(read_rows(store, segment, ROWS), rows)


def test_failed_read_and_write(on_disk: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    segment, rows = reserve(on_disk), noise(ROWS)
    fill(on_disk, segment, rows)

    def fail(fd: int, data: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "bad block")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        stream = PageStream(on_disk, requests(segment, [(0, 100), (100, 200)], READ), device=CPU)
        with pytest.raises(PageLostError, match="bad block"), stream.next(segment, 0, 100):
            pass
        stream.close()
    assert [page.state for page in segment.pages[:7]] == [PageState.LOST] * 7
    assert segment.pages[20].state is PageState.RESIDENT
    on_disk.void(segment)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        # Of a page that was written back, or that a write of before has lost by then.
        with pytest.raises(PageLostError, match=r"(a write-back failed|is lost).*bad block"):
            fill(on_disk, segment, rows)
    on_disk.void(segment)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        stream = PageStream(on_disk, requests(segment, [(0, 9)], FILL), device=CPU)
        with pytest.raises(KeyError) as error:
            _fill_then_fail(stream, segment)
    assert "bad block" in error.value.__notes__[0]
    on_disk.void(segment)
    fill(on_disk, segment, rows)


def test_no_memory_for_a_slot(on_disk: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = reserve(on_disk)
    fill(on_disk, segment, noise(ROWS))
    stream = PageStream(on_disk, requests(segment, cut(100), READ), lookahead=0, device=CPU)

    def refuse(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(torch.OutOfMemoryError), stream.next(segment, 0, 100):
        pass
    stream.close()
    assert segment.leases == []
    assert states(segment) == {PageState.RESIDENT}


def test_closing_with_look_ahead_on_its_way(on_disk: PageStore) -> None:
    segment = reserve(on_disk)
    fill(on_disk, segment, noise(ROWS))
    stream = PageStream(on_disk, requests(segment, cut(100), UPDATE), lookahead=4, device=CPU)
    assert len(segment.leases) == 4
    stream.close()
    assert segment.leases == []
    assert states(segment) == {PageState.RESIDENT}


def test_forced_release_under_an_open_request(on_disk: PageStore) -> None:
    segment = reserve(on_disk)
    fill(on_disk, segment, noise(ROWS))
    stream = PageStream(on_disk, requests(segment, cut(100), UPDATE), device=CPU)
    with stream.next(segment, 0, 100):
        on_disk.release("me", force=True)
    with pytest.raises(PageStateError, match="released"), stream.next(segment, 100, 200):
        pass
    stream.close()
    assert on_disk.pages_in_use() == 0
