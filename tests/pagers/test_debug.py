"""Debug mode: memory that holds nothing is NaN, copies are delayed, and a lease that does not wait is found out."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from longstraw.errors import ConfigError, PageLostError
from longstraw.pagers import DevicePager, HostPager, NvmePager, PageStream, Request, StagingPool, debug
from longstraw.pagers.debug import Delay, DelayedPager
from longstraw.resident import Access, Field, PageStore, Reservation, Segment, State, StateKind
from longstraw.resident.lease import Lease

CPU = torch.device("cpu")
ROWS, PAGE = 300, 16
KV = State(StateKind.TOKEN, 0, "kv", (Field("k", (4, 8)),), "float32")
HOLD = Lease.hold


@pytest.fixture
def debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSTRAW_DEBUG", "1")


def make_store(path: Path, device: torch.device, budgets: tuple[int, int, int]) -> PageStore:
    inner = [
        DevicePager(budgets[0], device), HostPager(budgets[1], device), NvmePager(path, budgets[2], device)
    ]  # fmt: skip
    return PageStore([DelayedPager(p, seed) for seed, p in enumerate(inner)], PAGE, poison=debug.poison)


@pytest.fixture
def on_disk(tmp_path: Path, debugging: None) -> Iterator[PageStore]:
    store = make_store(tmp_path, CPU, (0, 0, 1 << 24))
    yield store
    store.release("me", force=True)
    for pager in store.pagers:
        pager.close()


def passes(store: PageStore, device: torch.device, seed: int) -> torch.Tensor:
    """Fill, update twice in reverse, read: blocks of random sizes. The rows as they were read."""
    (segment,) = store.reserve("me", [Reservation(KV, ROWS)])
    rng = random.Random(seed)
    cuts = sorted({0, ROWS, *(rng.randrange(ROWS) for _ in range(6))})
    blocks = list(pairwise(cuts))
    truth = torch.randn(ROWS, KV.row_elements, generator=torch.Generator().manual_seed(0)).to(device)
    pool = StagingPool(device)

    def stream(access: Access, order: list[tuple[int, int]]) -> PageStream:
        schedule = [Request(segment, *block, access) for block in order]
        return PageStream(store, schedule, lookahead=rng.randint(1, 3), device=device, staging=pool)

    with stream(Access.FILL, blocks) as out:
        for start, stop in blocks:
            with out.next(segment, start, stop) as rows:
                rows.copy_(truth[start:stop])
    for _ in range(2):
        with stream(Access.UPDATE, blocks[::-1]) as out:
            for start, stop in blocks[::-1]:
                with out.next(segment, start, stop) as rows:
                    rows.mul_(1.25).add_(1)
    found = torch.empty_like(truth)
    with stream(Access.READ, blocks) as out:
        for start, stop in blocks:
            with out.next(segment, start, stop) as rows:
                found[start:stop] = rows
    if device.type == "cuda":
        torch.cuda.synchronize()
    store.release("me")
    return found


def expected() -> torch.Tensor:
    truth = torch.randn(ROWS, KV.row_elements, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        truth.mul_(1.25).add_(1)
    return truth


def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, on in {"1": True, "0": False, "": False}.items():
        monkeypatch.setenv("LONGSTRAW_DEBUG", value)
        assert debug.enabled() is on
    monkeypatch.setenv("LONGSTRAW_DEBUG", "yes")
    with pytest.raises(ConfigError, match="LONGSTRAW_DEBUG=yes"):
        debug.enabled()


def test_random_delays_never_change_a_bit(on_disk: PageStore) -> None:
    for seed in range(20):
        assert torch.equal(passes(on_disk, CPU, seed), expected())


@pytest.mark.slow
def test_200_runs_give_the_same_bits(on_disk: PageStore) -> None:
    for seed in range(200):
        assert torch.equal(passes(on_disk, CPU, seed), expected())


def hold_without_waiting(lease: Lease) -> None:
    """The guard taken away: a lease that hands its rows out before they have come."""
    reads, lease._reads = lease._reads, ()
    HOLD(lease)
    lease._reads = reads


def count_delays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many delays were put in."""
    counted, lock, real = [0], threading.Lock(), Delay.order

    def order(self: Delay, stream: torch.cuda.Stream | None) -> None:
        with lock:
            counted[0] += 1
        real(self, stream)

    monkeypatch.setattr(Delay, "order", order)
    return counted


def test_without_the_wait_wrong_bytes_are_seen(on_disk: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    delays = count_delays(monkeypatch)
    monkeypatch.setattr(Lease, "hold", hold_without_waiting)
    wrong = sum(not torch.equal(passes(on_disk, CPU, seed), expected()) for seed in range(5))
    assert wrong == 5
    for pager in on_disk.pagers:
        pager.close()  # ends the reads that nobody has waited for
    assert delays[0] >= sum(on_disk.reads.values()) + sum(on_disk.writes.values()) > 100


@pytest.mark.parametrize("tier", [0, 1, 2])
def test_poison(tmp_path: Path, debugging: None, tier: int) -> None:
    budgets = tuple(1 << 24 if i == tier else 0 for i in range(3))
    store = make_store(tmp_path, CPU, budgets)  # type: ignore[arg-type]
    (segment,) = store.reserve("me", [Reservation(KV, ROWS)])
    assert content(segment).isnan().all(), "new pages"
    with store.lease(segment, 0, ROWS, Access.FILL) if tier < 2 else _stream(store, segment) as out:
        rows = out.view().view(torch.float32) if tier < 2 else out
        rows.fill_(3)
    assert content(segment).eq(3).all()
    store.void(segment)
    assert content(segment).isnan().all(), "voided pages"
    if tier < 2:
        run = segment.runs[0]
        view = run.pager.view(run.extent, 0, run.extent.nbytes)
        assert view is not None
        view.fill_(1)
        store.release("me")
        assert view.eq(debug.POISON).all(), "freed pages"
    store.release("me")
    for pager in store.pagers:
        pager.close()


def test_a_disk_that_does_not_take_the_nan(on_disk: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        with pytest.raises(PageLostError, match=r"nvme: unused pages .*LONGSTRAW_DEBUG=1.*Input/output error"):
            on_disk.reserve("me", [Reservation(KV, ROWS)])
    assert on_disk.pages_in_use() == 0
    assert all(pager.used == 0 for pager in on_disk.pagers)
    assert content(on_disk.reserve("me", [Reservation(KV, ROWS)])[0]).isnan().all()


def _stream(store: PageStore, segment: Segment):  # type: ignore[no-untyped-def]
    return PageStream(store, [Request(segment, 0, ROWS, Access.FILL)], device=CPU).next(segment, 0, ROWS)


def content(segment: Segment) -> torch.Tensor:
    """What lies in the tier, past every rule."""
    segment.settle(block=True)
    (run,) = segment.runs
    target = torch.empty(ROWS * KV.row_bytes, dtype=torch.uint8)
    run.pager.read(run.extent, 0, target).result()
    return target.view(torch.float32)


def test_slots_are_handed_out_as_nan(debugging: None) -> None:
    pool = StagingPool(CPU)
    slot = pool.acquire(4096)
    assert slot.buffer.view(torch.float32).isnan().all()
    slot.buffer.fill_(0)
    pool.give_back(slot, ())
    assert pool.acquire(4096).buffer.view(torch.float32).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("budgets", [(0, 1 << 24, 0), (0, 0, 1 << 24), (20_000, 20_000, 1 << 24)])
def test_on_a_gpu_200_runs_give_the_same_bits_and_without_the_wait_none_does(
    tmp_path: Path, debugging: None, monkeypatch: pytest.MonkeyPatch, budgets: tuple[int, int, int]
) -> None:
    cuda = torch.device("cuda", torch.cuda.current_device())
    store, delays = make_store(tmp_path, cuda, budgets), count_delays(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "hold", hold_without_waiting)
        wrong = sum(not torch.equal(passes(store, cuda, seed).cpu(), expected()) for seed in range(5))
    assert wrong >= 4, "the delays are too short to show a missing wait"
    before, copies = delays[0], sum(store.reads.values()) + sum(store.writes.values())
    for seed in range(200):
        assert torch.equal(passes(store, cuda, seed).cpu(), expected())
    copies = sum(store.reads.values()) + sum(store.writes.values()) - copies
    assert delays[0] - before >= copies > 200 * 20
    for pager in store.pagers:
        pager.close()
