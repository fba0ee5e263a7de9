"""Stores of three tiers, and segments of random bits that streams write and read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from longstraw.pagers import DevicePager, HostPager, NvmePager, PageStream, Request
from longstraw.resident import Access, Field, PageState, PageStore, Reservation, Segment, State, StateKind

CPU = torch.device("cpu")
ROWS, PAGE = 1000, 16
KV = State(StateKind.TOKEN, 0, "kv", (Field("k", (2, 16)), Field("v", (2, 17))), "bfloat16")
ROW_BYTES = KV.row_bytes
READ, FILL, UPDATE = Access.READ, Access.FILL, Access.UPDATE
# Budgets by tier; "straddle" cuts a segment twice.
LAYOUTS = {
    "device": (1 << 20, 0, 0),
    "host": (0, 1 << 20, 0),
    "nvme": (0, 0, 1 << 20),
    "straddle": (32 << 10, 48 << 10, 1 << 20),
}


def build(path: Path, device: int, host: int, nvme: int) -> Iterator[PageStore]:
    pagers = [DevicePager(device, CPU), HostPager(host, CPU), NvmePager(path, nvme, CPU)]
    store = PageStore(pagers, PAGE)
    yield store
    store.release("me", force=True)
    assert store.pages_in_use() == 0
    assert all(tier["used"] == 0 for tier in store.usage().values())
    for pager in pagers:
        pager.close()


def reserve(store: PageStore, state: State = KV, rows: int = ROWS) -> Segment:
    (segment,) = store.reserve("me", [Reservation(state, rows)])
    return segment


def noise(rows: int, seed: int = 0) -> torch.Tensor:
    """Rows of random bits: NaNs of every kind are among them, which a conversion would change."""
    bits = torch.randint(-(1 << 15), 1 << 15, (rows, KV.row_elements), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.int16).view(torch.bfloat16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def requests(segment: Segment, ranges: Sequence[tuple[int, int]], access: Access) -> list[Request]:
    return [Request(segment, start, stop, access) for start, stop in ranges]


def cut(step: int, rows: int = ROWS) -> list[tuple[int, int]]:
    return [(at, min(at + step, rows)) for at in range(0, rows, step)]


def fill(store: PageStore, segment: Segment, rows: torch.Tensor, step: int = 300) -> None:
    schedule = requests(segment, cut(step, rows.shape[0]), FILL)
    with PageStream(store, schedule, device=CPU) as stream:
        for request in schedule:
            with stream.next(segment, request.start, request.stop) as out:
                assert out.shape == (request.stop - request.start, KV.row_elements)
                out.copy_(rows[request.start : request.stop])


def read_rows(store: PageStore, segment: Segment, rows: int) -> torch.Tensor:
    stream = PageStream(store, [Request(segment, 0, rows, READ)], device=CPU)
    with stream, stream.next(segment, 0, rows) as out:
        return out.clone()


def states(segment: Segment) -> set[PageState]:
    segment.settle(block=True)
    return {page.state for page in segment.pages}
