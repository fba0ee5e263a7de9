"""The store and the leases, over tiers of plain bytes: ownership, holes, conflicts, losses, leaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from longstraw.errors import CapacityError, PageLostError, PageStateError
from longstraw.pagers.protocol import Extent
from longstraw.resident import Access, Field, PageState, PageStore, Reservation, Segment, State, StateKind
from longstraw.resident.placement import HolesError

KV = State(StateKind.TOKEN, 0, "kv", (Field("x", (8,)),), "uint8")


class Later:
    """A transfer that ends when the test says so."""

    def __init__(self, work: Callable[[], None], after: tuple[Later, ...]) -> None:
        self.nbytes = 0
        self._work, self._after = work, after
        self._done = False
        self.error: Exception | None = None

    def result(self) -> int:
        for other in self._after:
            other.result()
        if not self._done:
            self._done = True
            self._work()
        if self.error:
            raise self.error
        return 0

    def wait(self) -> None:
        self.result()

    def order(self, stream: object) -> None:
        self.result()

    def done(self) -> bool:
        return self._done


class BytesPager:
    """A tier in a bytearray. Without `direct` its rows must be copied, and copies end when they are waited
    for."""

    kind = "host"
    device = None

    def __init__(self, name: str, budget: int, *, direct: bool) -> None:
        self.name, self.budget, self.direct = name, budget, direct
        self.used = self.peak = self._next = 0
        self.memory: dict[int, bytearray] = {}
        self.made: list[Later] = []
        self.fail: Exception | None = None
        self.fail_allocate: Exception | None = None

    def grow_to(self, nbytes: int) -> None:
        pass

    def largest_free(self) -> int:
        return self.budget - self.used

    def allocate(self, nbytes: int) -> Extent:
        if self.fail_allocate:
            raise self.fail_allocate
        self._next += 1
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        self.memory[self._next] = bytearray(nbytes)
        return Extent(self.name, self._next, nbytes)

    def free(self, extent: Extent) -> None:
        assert all(later.done() for later in self.made), "freed under a copy"
        del self.memory[extent.offset]
        self.used -= extent.nbytes

    def view(self, extent: Extent, offset: int, nbytes: int) -> memoryview | None:
        return memoryview(self.memory[extent.offset])[offset : offset + nbytes] if self.direct else None

    def read(self, extent: Extent, offset: int, target: memoryview, after: tuple[Later, ...] = ()) -> Later:
        def work() -> None:
            target[:] = self.memory[extent.offset][offset : offset + len(target)]

        return self._later(work, after)

    def write(self, extent: Extent, offset: int, source: memoryview, after: tuple[Later, ...] = ()) -> Later:
        def work() -> None:
            self.memory[extent.offset][offset : offset + len(source)] = source

        return self._later(work, after)

    def _later(self, work: Callable[[], None], after: tuple[Later, ...]) -> Later:
        later = Later(work, tuple(after))
        later.error, self.fail = self.fail, None
        self.made.append(later)
        return later


def two_tiers(page_rows: int = 10) -> tuple[PageStore, BytesPager, BytesPager]:
    near, far = BytesPager("near", 4096, direct=True), BytesPager("far", 1 << 20, direct=False)
    return PageStore([near, far], page_rows), near, far


def fill(store: PageStore, segment: Segment, start: int, stop: int, value: int) -> None:
    lease = store.lease(segment, start, stop, Access.FILL)
    lease.open()
    lease.hold()
    slot = bytearray([value] * lease.nbytes)
    lease.finish(memoryview(slot))


def read(store: PageStore, segment: Segment, start: int, stop: int) -> bytes:
    lease = store.lease(segment, start, stop, Access.READ)
    lease.open()
    slot = memoryview(bytearray(lease.nbytes))
    lease.bring(slot)
    assert {page.state for page in lease.pages} <= {PageState.MOVING, PageState.LEASED, PageState.FILLING}
    lease.hold()
    data = bytes(slot)
    lease.finish()
    return data


@pytest.fixture
def far() -> tuple[PageStore, Segment, BytesPager]:
    """A store of one tier that copies, and a segment of 35 rows in pages of 10."""
    pager = BytesPager("far", 1 << 20, direct=False)
    store = PageStore([pager], 10)
    return store, store.reserve("me", [Reservation(KV, 35)])[0], pager


def states(segment: Segment) -> list[PageState]:
    segment.settle(block=True)
    return [page.state for page in segment.pages]


R, F, L = PageState.RESIDENT, PageState.FREE, PageState.LOST


def test_reserve_release_leaves_nothing() -> None:
    store, near, far = two_tiers()
    kv, grad = store.reserve("me", [Reservation(KV, 1000, 1), Reservation(KV, 35, 0)])
    assert kv.tier_bytes() == {"far": 8192}
    assert grad.tier_bytes() == {"near": 4096}
    assert store.pages_in_use() == 104
    assert store.usage()["near"] == {"used": 4096, "budget": 4096, "peak": 4096}
    store.release("me")
    store.release("me")
    assert store.pages_in_use() == 0
    assert (near.used, far.used, near.memory, far.memory) == (0, 0, {}, {})
    with pytest.raises(PageStateError, match="released"):
        fill(store, kv, 0, 1, 1)
    with pytest.raises(PageStateError, match="released"):
        store.void(kv)


def test_failed_reservation_leaves_nothing() -> None:
    store, near, far = two_tiers()
    with pytest.raises(CapacityError):
        store.reserve("me", [Reservation(KV, 100), Reservation(KV, 1 << 20)])
    far.fail_allocate = CapacityError("no room after all")
    with pytest.raises(CapacityError, match="after all"):
        store.reserve("me", [Reservation(KV, 2000)])
    assert (near.used, far.used, store.pages_in_use()) == (0, 0, 0)


def test_a_tier_in_fragments_gives_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pager = BytesPager("far", 1 << 20, direct=False)
    store = PageStore([pager], 100)
    monkeypatch.setattr(pager, "largest_free", lambda: 4096)
    (segment,) = store.reserve("me", [Reservation(KV, 1234)])
    assert [(run.start, run.stop) for run in segment.runs] == [(0, 500), (500, 1000), (1000, 1234)]
    fill(store, segment, 0, 1234, 7)
    assert read(store, segment, 490, 1010) == bytes([7] * 520 * 8)


def test_what_is_scattered_goes_to_the_next_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The near tier has two pages free, but not side by side where the third extent is asked for."""
    store, near, far = two_tiers(page_rows=512)
    near.budget = 5 * 4096
    allocate = near.allocate

    def allocate_or_not(nbytes: int) -> Extent:
        if near.used + nbytes > 2 * 4096:
            raise HolesError("in one piece")
        return allocate(nbytes)

    monkeypatch.setattr(near, "allocate", allocate_or_not)
    segments = store.reserve("me", [Reservation(KV, 512) for _ in range(4)])
    assert [segment.tier_bytes() for segment in segments] == [{"near": 4096}, {"near": 4096}, *[{"far": 4096}] * 2]
    store.release("me")
    assert (near.used, far.used) == (0, 0)
    far.budget = 4096
    with pytest.raises(HolesError, match="in one piece"):
        store.reserve("me", [Reservation(KV, 512) for _ in range(4)])
    assert (near.used, far.used, store.pages_in_use()) == (0, 0, 0)


def test_partial_pages_fill_further_without_holes(far: tuple[PageStore, Segment, BytesPager]) -> None:
    store, segment, _ = far
    with pytest.raises(PageStateError, match="hole"):
        fill(store, segment, 3, 5, 1)
    fill(store, segment, 0, 13, 1)
    assert states(segment) == [R, R, F, F]
    assert segment.filled == 13
    with pytest.raises(PageStateError, match="filled up to row 13 only"):
        read(store, segment, 0, 14)
    with pytest.raises(PageStateError, match="hole"):
        fill(store, segment, 14, 20, 2)
    fill(store, segment, 13, 35, 2)
    assert read(store, segment, 0, 35) == bytes([1] * 13 * 8 + [2] * 22 * 8)


def test_rows_outside_are_refused(far: tuple[PageStore, Segment, BytesPager]) -> None:
    store, segment, _ = far
    for start, stop in ((-1, 3), (5, 5), (30, 36)):
        with pytest.raises(PageStateError, match="has rows 0:35"):
            fill(store, segment, start, stop, 1)


def test_read_waits_for_the_write_on_its_way(far: tuple[PageStore, Segment, BytesPager]) -> None:
    store, segment, pager = far
    fill(store, segment, 0, 35, 9)
    assert not pager.made[0].done()
    assert [page.state for page in segment.pages] == [PageState.MOVING] * 4
    assert read(store, segment, 5, 25) == bytes([9] * 160)
    assert states(segment) == [R] * 4


def test_two_writes_of_the_same_rows_land_in_order(far: tuple[PageStore, Segment, BytesPager]) -> None:
    store, segment, pager = far
    fill(store, segment, 0, 35, 1)
    fill(store, segment, 0, 35, 2)
    pager.made[1].result()  # the later one comes to its turn first
    assert read(store, segment, 0, 35) == bytes([2] * 280)


def test_writers_exclude_and_readers_share(far: tuple[PageStore, Segment, BytesPager]) -> None:
    store, segment, _ = far
    fill(store, segment, 0, 15, 1)
    reader = store.lease(segment, 0, 12, Access.READ)
    with reader:
        assert read(store, segment, 5, 15) == bytes([1] * 80)
        with pytest.raises(PageStateError, match="in use by an open lease"):
            store.lease(segment, 11, 14, Access.UPDATE).open()
        with pytest.raises(PageStateError, match="in use by an open lease"):
            fill(store, segment, 0, 5, 2)
        assert segment.pages[1].state is PageState.LEASED
        fill(store, segment, 15, 20, 3)  # other rows of a page that is read
    assert read(store, segment, 15, 20) == bytes([3] * 40)


def test_update_changes_its_rows_only(far: tuple[PageStore, Segment, BytesPager]) -> None:
    store, segment, _ = far
    fill(store, segment, 0, 35, 1)
    lease = store.lease(segment, 8, 12, Access.UPDATE)
    lease.open()
    slot = memoryview(bytearray(lease.nbytes))
    lease.bring(slot)
    lease.hold()
    for i in range(len(slot)):
        slot[i] += 4
    lease.finish(slot)
    assert read(store, segment, 0, 35) == bytes([1] * 64 + [5] * 32 + [1] * 184)


@pytest.mark.parametrize("access", list(Access))
def test_exception_inside(far: tuple[PageStore, Segment, BytesPager], access: Access) -> None:
    store, segment, _ = far
    fill(store, segment, 0, 15, 1)
    start = 15 if access is Access.FILL else 5
    with pytest.raises(KeyError), store.lease(segment, start, start + 10, access):
        raise KeyError
    expected = {Access.READ: [R, R, F, F], Access.FILL: [R, R, F, F], Access.UPDATE: [L, L, F, F]}
    assert states(segment) == expected[access]
    if access is Access.UPDATE:
        with pytest.raises(PageLostError, match="an exception ended the update"):
            read(store, segment, 0, 5)
    else:
        assert segment.filled == 15
    store.release("me")
    assert store.pages_in_use() == 0


def test_abandoned_refill_uncounts_its_rows(far: tuple[PageStore, Segment, BytesPager]) -> None:
    store, segment, _ = far
    fill(store, segment, 0, 25, 1)
    lease = store.lease(segment, 0, 12, Access.FILL)
    lease.open()
    lease.hold()
    lease.abandon()
    assert [page.filled for page in segment.pages] == [0, 0, 5, 0]
    assert states(segment) == [F, F, R, F]


def test_failed_read_loses_the_pages(far: tuple[PageStore, Segment, BytesPager]) -> None:
    store, segment, pager = far
    fill(store, segment, 0, 35, 1)
    segment.settle(block=True)
    pager.fail = OSError(5, "no such luck")
    with pytest.raises(PageLostError, match="no such luck") as error:
        read(store, segment, 5, 25)
    assert isinstance(error.value.__cause__, OSError)
    assert states(segment) == [L, L, L, R]
    with pytest.raises(PageLostError, match="no such luck"):
        fill(store, segment, 0, 10, 1)
    store.void(segment)
    assert states(segment) == [F] * 4
    assert [page.generation for page in segment.pages] == [1] * 4
    fill(store, segment, 0, 35, 2)
    assert read(store, segment, 0, 35) == bytes([2] * 280)


@pytest.mark.parametrize("ended", [False, True], ids=["on its way", "ended"])
def test_failed_write_back_is_met_by_the_next_lease(far: tuple[PageStore, Segment, BytesPager], ended: bool) -> None:
    store, segment, pager = far
    fill(store, segment, 0, 10, 1)
    pager.fail = OSError(28, "full")
    fill(store, segment, 10, 20, 1)
    if ended:
        with pytest.raises(OSError, match="full"):
            pager.made[1].result()
    with pytest.raises(PageLostError, match="full"):
        read(store, segment, 12, 14)
    assert states(segment) == [R, L, F, F]
    assert read(store, segment, 0, 10) == bytes([1] * 80)


def test_release_and_void_refuse_under_a_lease(far: tuple[PageStore, Segment, BytesPager]) -> None:
    store, segment, pager = far
    fill(store, segment, 0, 35, 1)
    lease = store.lease(segment, 0, 35, Access.READ)
    lease.open()
    lease.bring(memoryview(bytearray(lease.nbytes)))
    with pytest.raises(PageStateError, match="a lease is open"):
        store.release("me")
    with pytest.raises(PageStateError, match="a lease is open"):
        store.void(segment)
    assert store.pages_in_use() == 4
    store.release("me", force=True)  # the pager asserts that no copy is on its way
    assert (store.pages_in_use(), pager.used) == (0, 0)
    with pytest.raises(PageStateError, match="released by force"):
        lease.hold()
    lease.finish()
    lease.abandon()


def test_counters(far: tuple[PageStore, Segment, BytesPager]) -> None:
    store, segment, _ = far
    fill(store, segment, 0, 35, 1)
    read(store, segment, 0, 10)
    assert (store.bytes_written, store.bytes_read) == ({"far": 280}, {"far": 80})
    assert (store.writes, store.reads) == ({"far": 1}, {"far": 1})


def test_store_refuses_its_arguments() -> None:
    pager = BytesPager("x", 0, direct=True)
    with pytest.raises(ValueError, match="different names"):
        PageStore([pager, pager])
    with pytest.raises(ValueError, match="page_rows"):
        PageStore([pager], 0)
