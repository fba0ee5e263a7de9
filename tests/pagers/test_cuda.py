"""The tiers and streams on a CUDA device: page-locked arenas, side streams, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longstraw.pagers import DevicePager, HostPager, NvmePager, PageStream, Request, StagingPool
from longstraw.pagers import arena as arena_module
from longstraw.pagers.arena import HostArena
from longstraw.resident import Access, Field, PageStore, Reservation, State, StateKind

pytestmark = pytest.mark.gpu

ROWS, PAGE = 8192, 128
KV = State(StateKind.TOKEN, 0, "kv", (Field("k", (8, 64)), Field("v", (8, 64))), "float32")
LAYOUTS = {
    "device": (1 << 30, 0, 0),
    "host": (0, 1 << 30, 0),
    "nvme": (0, 0, 1 << 30),
    "straddle": (8 << 20, 9 << 20, 1 << 30),
}


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=LAYOUTS)
def store(request: pytest.FixtureRequest, tmp_path: Path, cuda: torch.device) -> Iterator[PageStore]:
    device, host, nvme = LAYOUTS[request.param]
    pagers = [DevicePager(device, cuda), HostPager(host, cuda), NvmePager(tmp_path, nvme, cuda)]
    store = PageStore(pagers, PAGE)
    yield store
    store.release("me", force=True)
    for pager in pagers:
        pager.close()


def test_arena_is_page_locked(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "REGISTER_BYTES", 1 << 20)
    arena = HostArena((3 << 20) + 4096, cuda)
    assert arena.memory.is_pinned()
    assert arena.memory[-4096:].is_pinned()
    assert arena.memory.numel() == (3 << 20) + 4096
    arena.close()
    assert not arena.memory.is_pinned()


@pytest.mark.parametrize("lookahead", [0, 2])
def test_passes_agree_with_a_tensor(store: PageStore, cuda: torch.device, lookahead: int) -> None:
    """Slow kernels write the slots, so that a copy that does not wait for them takes wrong bytes."""
    (segment,) = store.reserve("me", [Reservation(KV, ROWS)])
    truth = torch.randn(ROWS, KV.row_elements, device=cuda, generator=torch.Generator(cuda).manual_seed(0))
    busy = torch.randn(2048, 2048, device=cuda)
    pool = StagingPool(cuda)
    blocks = [(at, min(at + 1000, ROWS)) for at in range(0, ROWS, 1000)]

    def stream(access: Access, order: list[tuple[int, int]]) -> PageStream:
        schedule = [Request(segment, start, stop, access) for start, stop in order]
        return PageStream(store, schedule, lookahead=lookahead, device=cuda, staging=pool)

    with stream(Access.FILL, blocks) as out:
        for start, stop in blocks:
            with out.next(segment, start, stop) as rows:
                rows.fill_(float("nan"))
                for _ in range(20):
                    busy @ busy
                rows.copy_(truth[start:stop])
    for _ in range(3):
        with stream(Access.UPDATE, blocks[::-1]) as out:
            for start, stop in blocks[::-1]:
                with out.next(segment, start, stop) as rows:
                    for _ in range(20):
                        busy @ busy
                    rows.add_(1)
        truth += 1
    wrong = torch.zeros((), dtype=torch.int64, device=cuda)
    with stream(Access.READ, blocks) as out:
        for start, stop in blocks:
            with out.next(segment, start, stop) as rows:
                wrong += rows.ne(truth[start:stop]).sum()
    assert wrong.item() == 0
    assert pool.peak <= (lookahead + 1) * 1000 * KV.row_bytes


def test_copies_cross_registered_slices(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "REGISTER_BYTES", 1 << 20)
    monkeypatch.setattr("longstraw.pagers.host.REGISTER_BYTES", 1 << 20)
    pager = HostPager(16 << 20, cuda)
    first, extent = pager.allocate(4096), pager.allocate(8 << 20)
    pager.free(first)
    source = torch.randint(256, (5 << 20,), dtype=torch.uint8, device=cuda)
    target = torch.empty_like(source)
    torch.cuda.synchronize()
    written = pager.write(extent, 77, source)
    pager.read(extent, 77, target, (written,)).wait()
    assert torch.equal(source, target)
    pager.close()


def test_memory_is_freed_while_copies_are_on_their_way(cuda: torch.device) -> None:
    """A stream's own slots go back to the allocator at once; new tensors in them must not disturb the
    write."""
    pager = HostPager(1 << 30, cuda)
    store = PageStore([pager], PAGE)
    (segment,) = store.reserve("me", [Reservation(KV, ROWS)])
    for value in range(5):
        with (
            PageStream(store, [Request(segment, 0, ROWS, Access.FILL)], device=cuda) as out,
            out.next(segment, 0, ROWS) as rows,
        ):
            rows.fill_(value)
        trash = [torch.full((ROWS, KV.row_elements), -1.0, device=cuda) for _ in range(3)]
        with (
            PageStream(store, [Request(segment, 0, ROWS, Access.READ)], device=cuda) as back,
            back.next(segment, 0, ROWS) as rows,
        ):
            assert rows.eq(value).all().item()
        del trash
    store.release("me")
    pager.close()
