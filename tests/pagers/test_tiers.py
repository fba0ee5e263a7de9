"""What the tiers have in common: budgets, bytes back bit for bit, growth, closing; and the host tier's
arenas."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from longstraw.errors import CapacityError
from longstraw.pagers import DevicePager, HostPager, NvmePager, Pager
from longstraw.pagers.arena import HostArena
from longstraw.resident import Field, PageStore, Reservation, State, StateKind

CPU = torch.device("cpu")
UNIT = 4096
Make = Callable[[int], Pager]


@pytest.fixture(params=["device", "host", "nvme", "nvme unchecked"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[Pager] = []

    def one(budget: int) -> Pager:
        pager: Pager
        if request.param == "device":
            pager = DevicePager(budget, CPU)
        elif request.param == "host":
            pager = HostPager(budget, CPU)
        else:
            pager = NvmePager(tmp_path, budget, CPU, checksum=request.param == "nvme")
        made.append(pager)
        return pager

    yield one
    for pager in made:
        pager.close()
        pager.close()


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_bytes_come_back(make: Make) -> None:
    pager = make(1 << 22)
    extents = [pager.allocate(200 * UNIT) for _ in range(3)]
    sources = [noise(200 * UNIT - 17, seed) for seed in range(3)]
    writes = [pager.write(extent, 5, source) for extent, source in zip(extents, sources, strict=True)]
    assert [write.result() for write in writes] == [200 * UNIT - 17] * 3
    for extent, source in zip(extents, sources, strict=True):
        target = torch.empty(1000, dtype=torch.uint8)
        transfer = pager.read(extent, 5 + 333, target)
        transfer.wait()
        assert transfer.done()
        assert transfer.nbytes == 1000
        assert torch.equal(target, source[333:1333])


def test_budget_and_peak(make: Make) -> None:
    pager = make(4 * UNIT)
    pager.grow_to(4 * UNIT)
    first, second = pager.allocate(UNIT), pager.allocate(3 * UNIT)
    with pytest.raises(CapacityError, match=r"tiers\[i\].budget"):
        pager.allocate(UNIT)
    pager.free(first)
    pager.free(second)
    assert (pager.used, pager.peak) == (0, 4 * UNIT)
    assert pager.largest_free() >= 3 * UNIT
    pager.allocate(2 * UNIT)


def test_growth_beyond_the_budget_is_refused(make: Make) -> None:
    pager = make(4 * UNIT)
    if pager.kind == "device":
        pytest.skip("the device tier grows extent by extent")
    with pytest.raises(CapacityError, match="budget"):
        pager.grow_to(5 * UNIT)


def test_view_is_the_memory_itself(make: Make) -> None:
    pager = make(1 << 20)
    extent = pager.allocate(2 * UNIT)
    view = pager.view(extent, 100, 50)
    if pager.kind == "nvme":
        assert view is None
        return
    assert view is not None
    view.fill_(7)
    target = torch.empty(50, dtype=torch.uint8)
    pager.read(extent, 100, target).wait()
    assert target.eq(7).all()


def test_describe_names_tier_and_budget(make: Make) -> None:
    pager = make(3 << 20)
    assert pager.describe().startswith(f"{pager.name}: 3.00 MiB")


def test_host_arenas_have_exact_sizes_and_stay() -> None:
    pager = HostPager(10 * UNIT, CPU)
    pager.grow_to(3 * UNIT)
    first = pager.allocate(3 * UNIT)
    pager.grow_to(5 * UNIT)
    assert [arena.memory.numel() for arena in pager._arenas.values()] == [3 * UNIT, 2 * UNIT]
    pager.free(first)
    pager.grow_to(5 * UNIT)
    assert len(pager._arenas) == 2
    assert all(arena.memory.data_ptr() % UNIT == 0 for arena in pager._arenas.values())


def test_a_reservation_grows_the_host_tier_once() -> None:
    pager = HostPager(16 * UNIT, CPU)
    store = PageStore([pager], 16)
    state = State(StateKind.TOKEN, 0, "kv", (Field("k", (64,)),), "float32")
    store.reserve("me", [Reservation(state, 40) for _ in range(3)])
    assert [arena.memory.numel() for arena in pager._arenas.values()] == [9 * UNIT]
    store.release("me")
    pager.close()


def test_host_gives_empty_arenas_back_for_one_large_extent() -> None:
    pager = HostPager(4 * UNIT, CPU)
    pager.grow_to(2 * UNIT)
    held = pager.allocate(2 * UNIT)
    pager.grow_to(4 * UNIT)
    pager.free(held)
    assert pager.largest_free() == 2 * UNIT
    extent = pager.allocate(3 * UNIT)
    pager.write(extent, 0, noise(3 * UNIT)).wait()
    assert len(pager._arenas) == 1


def test_host_memory_that_the_machine_has_not() -> None:
    with pytest.raises(CapacityError, match=r"tiers\[i\].budget"):
        HostArena(1 << 60, CPU)


@pytest.mark.parametrize("kind", ["host", "nvme"])
def test_holes_of_a_tier_do_not_refuse_what_the_next_has(tmp_path: Path, kind: str) -> None:
    """Prompts of many lengths, one after another and side by side, until a tier is full of small holes."""
    near: Pager = HostPager(64 << 12, CPU) if kind == "host" else NvmePager(tmp_path, 64 << 12, CPU)
    store = PageStore([near, NvmePager(tmp_path, 1 << 24, CPU, name="last")], 300)
    state = State(StateKind.TOKEN, 0, "kv", (Field("k", (5,)),), "float32")
    rng = random.Random(0)
    held: list[str] = []
    for index in range(200):
        store.reserve(str(index), [Reservation(state, rng.randint(1, 3000)) for _ in range(rng.randint(1, 3))])
        held.append(str(index))
        while len(held) > 3:
            store.release(held.pop(rng.randrange(len(held))))
    for owner in held:
        store.release(owner)
    assert [pager.used for pager in store.pagers] == [0, 0]
    assert near.peak > 0.9 * near.budget
    for pager in store.pagers:
        pager.close()
