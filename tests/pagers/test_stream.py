"""Streams: rows come back bit for bit from every tier, in any announced order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from longstraw.errors import PageStateError, StreamOrderError
from longstraw.pagers import DevicePager, NvmePager, PageStream, Request, StagingPool, Transfer
from longstraw.pagers import Extent as Extent
from longstraw.resident import Access, Field, PageState, PageStore, State, StateKind
from tests.pagers.streams import (
    CPU,
    FILL,
    KV,
    LAYOUTS,
    PAGE,
    READ,
    ROW_BYTES,
    ROWS,
    UPDATE,
    build,
    cut,
    fill,
    noise,
    read_rows,
    requests,
    reserve,
    same_bits,
    states,
)


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5])
@pytest.mark.parametrize("step", [7, 64, 333, ROWS])
def test_bits_come_back_in_either_order(store: PageStore, step: int, lookahead: int) -> None:
    segment, rows = reserve(store), noise(ROWS)
    fill(store, segment, rows, step)
    for ranges in (cut(step), cut(step)[::-1]):
        schedule = requests(segment, ranges, READ)
        with PageStream(store, schedule, lookahead=lookahead, device=CPU) as stream:
            for start, stop in ranges:
                with stream.next(segment, start, stop) as out:
                    assert same_bits(out, rows[start:stop])
        assert states(segment) == {PageState.RESIDENT}


@pytest.mark.parametrize("seed", range(4))
def test_random_reads(store: PageStore, seed: int) -> None:
    segment, rows, rng = reserve(store), noise(ROWS), random.Random(seed)
    fill(store, segment, rows, rng.randrange(1, ROWS))
    ranges = [(a, b) for a, b in ((rng.randrange(ROWS), rng.randrange(1, ROWS + 1)) for _ in range(60)) if a < b]
    with PageStream(store, requests(segment, ranges, READ), lookahead=3, device=CPU) as stream:
        for start, stop in ranges:
            with stream.next(segment, start, stop) as out:
                assert same_bits(out, rows[start:stop])


@pytest.mark.parametrize("seed", range(6))
def test_random_passes_agree_with_a_tensor(store: PageStore, seed: int) -> None:
    """Fills, updates and reads of two segments in any order that has no holes, some of them nested."""
    rng = random.Random(seed)
    state = State(StateKind.TOKEN, 0, "kv_grad", (Field("x", (9,)),), "float64")
    segments = [reserve(store, state, 400) for _ in range(2)]
    truth = [torch.zeros(400, 9, dtype=torch.float64) for _ in segments]
    filled = [0, 0]
    schedule: list[tuple[int, Request]] = []
    for _ in range(150):
        which = rng.randrange(2)
        if filled[which] == 0 or (filled[which] < 400 and rng.random() < 0.3):
            start, access = filled[which], FILL
            stop = filled[which] = min(400, start + rng.randrange(1, 90))
        else:
            access = rng.choice((READ, UPDATE, UPDATE, FILL))
            start = rng.randrange(filled[which])
            stop = min(filled[which], start + rng.randrange(1, 200))
        schedule.append((which, Request(segments[which], start, stop, access)))
    pool = StagingPool(CPU)
    announced = [request for _, request in schedule]
    with PageStream(store, announced, lookahead=rng.randrange(4), device=CPU, staging=pool) as stream:
        at = 0
        while at < len(schedule):
            nested = schedule[at : at + rng.choice((1, 2))]
            if len(nested) == 2 and nested[0][1].collides(nested[1][1]):
                nested = nested[:1]
            open_entries = [stream.next(r.segment, r.start, r.stop) for _, r in nested[:1]]
            tensors = [open_entries[0].__enter__()]
            for _, r in nested[1:]:
                open_entries.append(stream.next(r.segment, r.start, r.stop))
                tensors.append(open_entries[-1].__enter__())
            for (which, request), out in zip(nested, tensors, strict=True):
                mine = truth[which][request.start : request.stop]
                new = torch.full_like(mine, rng.random())
                if request.access is FILL:
                    out.copy_(new)
                    mine.copy_(new)
                else:
                    assert torch.equal(out, mine), request
                    if request.access is UPDATE:
                        out.add_(new)
                        mine.add_(new)
            for entry in reversed(open_entries):
                entry.__exit__(None, None, None)
            at += len(nested)
    for which, segment in enumerate(segments):
        assert torch.equal(read_rows(store, segment, filled[which]), truth[which][: filled[which]])
        assert segment.filled == filled[which]


def test_addressable_rows_are_used_where_they_lie(tmp_path: Path) -> None:
    for store in build(tmp_path, *LAYOUTS["host"]):
        segment = reserve(store)
        fill(store, segment, noise(ROWS))
        pool = StagingPool(CPU)
        schedule = [Request(segment, 100, 900, UPDATE), Request(segment, 100, 900, READ)]
        with PageStream(store, schedule, device=CPU, staging=pool) as stream:
            with stream.next(segment, 100, 900) as out:
                first = out.data_ptr()
                out.fill_(3)
            with stream.next(segment, 100, 900) as out:
                assert out.data_ptr() == first
                assert out.eq(3).all()
        assert pool.peak == 0
        assert sum(stream.bytes_read.values()) == sum(stream.bytes_written.values()) == 0


def test_bytes_are_counted_by_tier(straddling: PageStore) -> None:
    segment = reserve(straddling)
    fill(straddling, segment, noise(ROWS), ROWS)
    stream = PageStream(straddling, [Request(segment, 0, ROWS, READ)], device=CPU)
    with stream, stream.next(segment, 0, ROWS):
        pass
    rows = {run.pager.name: (run.stop - run.start) * ROW_BYTES for run in segment.runs}
    assert len(rows) == 3
    assert stream.bytes_read == rows == straddling.bytes_written


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
def test_slots_do_not_grow_with_the_schedule(on_disk: PageStore, lookahead: int) -> None:
    segment, pool = reserve(on_disk), StagingPool(CPU)
    fill(on_disk, segment, noise(ROWS))
    for _ in range(3):
        ranges = cut(30)
        schedule = requests(segment, ranges, UPDATE)
        with PageStream(on_disk, schedule, lookahead=lookahead, device=CPU, staging=pool) as stream:
            for start, stop in ranges:
                with stream.next(segment, start, stop) as out:
                    out.add_(1)
    assert pool.peak <= (lookahead + 1) * 30 * ROW_BYTES
    pool.trim()
    assert pool.bytes == 0


class Recorder:
    """Counts the reads that a pager has been asked for."""

    def __init__(self, pager: NvmePager, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[int] = []
        real = pager.read

        def read(extent: Extent, offset: int, target: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
            self.reads.append(offset // ROW_BYTES)
            return real(extent, offset, target, after)

        monkeypatch.setattr(pager, "read", read)


def test_looks_ahead_as_far_as_asked(on_disk: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = reserve(on_disk)
    fill(on_disk, segment, noise(ROWS))
    seen = Recorder(on_disk.pagers[2], monkeypatch)  # type: ignore[arg-type]
    ranges = cut(100)
    with PageStream(on_disk, requests(segment, ranges, READ), lookahead=2, device=CPU) as stream:
        assert seen.reads == [0, 100]
        with stream.next(segment, 0, 100):
            assert seen.reads == [0, 100, 200]
        with stream.next(segment, 100, 200):
            assert seen.reads == [0, 100, 200, 300]
    assert states(segment) == {PageState.RESIDENT}


@pytest.mark.parametrize("writer", [UPDATE, FILL])
def test_a_read_waits_for_the_writer_before_it(
    on_disk: PageStore, monkeypatch: pytest.MonkeyPatch, writer: Access
) -> None:
    segment = reserve(on_disk)
    fill(on_disk, segment, noise(ROWS))
    schedule = [
        Request(segment, 0, 100, writer),
        Request(segment, 50, 150, READ),
        Request(segment, 200, 300, READ),
    ]
    seen = Recorder(on_disk.pagers[2], monkeypatch)  # type: ignore[arg-type]
    with PageStream(on_disk, schedule, lookahead=3, device=CPU) as stream:
        with stream.next(segment, 0, 100) as out:
            out.fill_(2)
            assert 50 not in seen.reads
        assert seen.reads[-2:] == [50, 200]
        with stream.next(segment, 50, 150) as out:
            assert out[:50].eq(2).all()


def test_without_that_guard_the_fill_meets_an_early_read(on_disk: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = reserve(on_disk)
    fill(on_disk, segment, noise(ROWS))
    monkeypatch.setattr(Request, "collides", lambda self, other: False)
    schedule = [Request(segment, 0, 100, FILL), Request(segment, 50, 150, READ)]
    stream = PageStream(on_disk, schedule, device=CPU)
    with pytest.raises(PageStateError, match="in use by an open lease"), stream.next(segment, 0, 100):
        pass
    stream.close()


def test_rows_filled_by_another_stream_are_brought_once_they_are_there(on_disk: PageStore) -> None:
    segment, rows = reserve(on_disk), noise(ROWS)
    reads = requests(segment, cut(100), READ)
    with PageStream(on_disk, reads, device=CPU) as reader:
        for start, stop in cut(100):
            writer = PageStream(on_disk, requests(segment, [(start, stop)], FILL), device=CPU)
            with writer, writer.next(segment, start, stop) as out:
                out.copy_(rows[start:stop])
            with reader.next(segment, start, stop) as out:
                assert same_bits(out, rows[start:stop])


def test_wrong_order_names_both(store: PageStore) -> None:
    segment, other = reserve(store, rows=64), reserve(store, rows=64)
    fill(store, segment, noise(64))
    stream = PageStream(store, requests(segment, [(0, 32), (32, 64)], READ), device=CPU)
    with pytest.raises(StreamOrderError, match=r"rows 32:64 of kv.*request 0 of the schedule is READ rows 0:32"):
        stream.next(segment, 32, 64)
    with pytest.raises(StreamOrderError, match="rows 0:32"):
        stream.next(other, 0, 32)
    entry = stream.next(segment, 0, 32)
    with entry:
        pass
    with pytest.raises(StreamOrderError, match="late or twice"), entry:
        pass
    with stream.next(segment, 32, 64):
        pass
    with pytest.raises(StreamOrderError, match="2 requests are all done"):
        stream.next(segment, 0, 32)
    stream.close()
    stream.close()
    with pytest.raises(StreamOrderError, match="closed"):
        stream.next(segment, 0, 32)


def test_tensors_carry_no_graph_and_serve_autograd(on_disk: PageStore) -> None:
    segment, weight = reserve(on_disk), torch.ones(KV.row_elements, dtype=torch.bfloat16, requires_grad=True)
    with torch.inference_mode():
        pool = StagingPool(CPU)
        schedule = [Request(segment, 0, 100, FILL), Request(segment, 0, 100, READ)]
        stream = PageStream(on_disk, schedule, device=CPU, staging=pool)
        with stream.next(segment, 0, 100) as out:
            out.fill_(2)
    with stream.next(segment, 0, 100) as out:
        assert not out.requires_grad
        (weight * out).sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(200).all()
    stream.close()
    graphed = PageStream(on_disk, [Request(segment, 0, 100, FILL)] * 2, device=CPU, staging=pool)
    for _ in range(2):
        entry = graphed.next(segment, 0, 100)
        with torch.no_grad():
            out = entry.__enter__()
        out.copy_(weight.expand(100, -1))  # autograd refuses this on a view that was made without grad
        entry.__exit__(None, None, None)
    graphed.close()


def test_negative_lookahead() -> None:
    store = PageStore([DevicePager(0, CPU)], PAGE)
    with pytest.raises(ValueError, match="lookahead"):
        PageStream(store, [], lookahead=-1, device=CPU)
