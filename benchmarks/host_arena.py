"""A host arena: its resident size, registration on one thread and on several, and copies each way.

    python -m benchmarks.host_arena --size 33GiB

Needs a GPU. First the arena is made and given back three times: with the workers that a run has (the first time, which
also meets memory that the machine has not used yet), with one, and with the workers again. `resident_error` is how far
the mapping's resident size (/proc/self/smaps) is from what was asked for, `process_error` the same of the whole
process's growth; `page_locked` says whether CUDA holds the first and the last byte of every slice.

Then the host tier's own copies over all of the arena, in blocks of `--block` bytes through two slots a way, in bytes a
second: to the device, from it, both at once. `share` is against the same loop on plain memory of cudaHostAlloc, timed
between ours, `of_link` against `--link` bytes a second each way. Medians of `--rounds`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from benchmarks.common import Record
from longstraw.config import parse_bytes
from longstraw.pagers.arena import REGISTER_BYTES, WORKERS, HostArena
from longstraw.pagers.host import HostPager
from longstraw.pagers.numa import choose_node

PLAIN_BYTES = 2 << 30
"""Of cudaHostAlloc, each way. torch's pinned allocator would round more up to a power of two."""
WAYS = {"to_device": (True, False), "from_device": (False, True), "both": (True, True)}


def resident_bytes(start: int, size: int) -> int:
    """Bytes of the process's memory at [start, start + size) that are resident."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low < start + size and start < high
        elif inside and first == "Rss:":
            found += int(line.split()[1]) << 10
    return found


def register(size: int, device: torch.device, workers: int, record: Record) -> None:
    """Make an arena and give it back."""
    node = choose_node("auto", device)
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    arena = HostArena(size, device, node=node.node, workers=workers)
    seconds = time.perf_counter() - began
    grown = psutil.Process().memory_info().rss - before
    resident = resident_bytes(arena.memory.data_ptr(), size)
    slices = [arena.memory[at : at + REGISTER_BYTES] for at in range(0, size, REGISTER_BYTES)]
    locked = all(end.is_pinned() for part in slices for end in (part[:1], part[-1:]))
    began = time.perf_counter()
    arena.close()
    record.add(
        "host arena",
        size=size,
        workers=workers,
        seconds=seconds,
        rate=size / seconds,
        resident=resident,
        resident_error=resident / size - 1,
        process_error=grown / size - 1,
        page_locked=locked,
        unregister_seconds=time.perf_counter() - began,
        through=arena.registered_with,
        slice=REGISTER_BYTES,
        numa=str(node.node),
        why=node.why,
    )


def copies(size: int, block: int, rounds: int, link: float, device: torch.device, record: Record) -> None:
    """The host tier's copies over a whole extent each way and both at once, beside plain page-locked memory's."""
    pager = HostPager(size, device, numa=choose_node("auto", device))
    half = size // 2 // block * block
    first, second = pager.allocate(half), pager.allocate(half)
    slots = [torch.zeros(block, dtype=torch.uint8, device=device) for _ in range(4)]
    into, out = torch.cuda.Stream(device), torch.cuda.Stream(device)
    plain = [torch.zeros(PLAIN_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def ours(down: bool, up: bool) -> float:
        def go() -> None:
            for index, at in enumerate(range(0, half, block)):
                if down:
                    pager.read(first, at, slots[index % 2])
                if up:
                    pager.write(second, at, slots[2 + index % 2])

        return half * (down + up) / timed(go)

    def ceiling(down: bool, up: bool) -> float:
        span = PLAIN_BYTES // block * block

        def go() -> None:
            for index, at in enumerate(range(0, half, block)):
                low = at % span
                if down:
                    with torch.cuda.stream(into):
                        slots[index % 2].copy_(plain[0][low : low + block], non_blocking=True)
                if up:
                    with torch.cuda.stream(out):
                        plain[1][low : low + block].copy_(slots[2 + index % 2], non_blocking=True)

        return half * (down + up) / timed(go)

    for way, which in WAYS.items():
        ours(*which), ceiling(*which)
        found: dict[str, list[float]] = {"ours": [], "plain": []}
        for _ in range(rounds):
            found["plain"].append(ceiling(*which))
            found["ours"].append(ours(*which))
        rate, most = statistics.median(found["ours"]), statistics.median(found["plain"])
        record.add(
            "host tier copies", way=way, size=size, block=block, rate=rate, plain=most, share=rate / most,
            of_link=rate / (link * sum(which)),
        )  # fmt: skip
    pager.close()


def timed(go: Callable[[], None]) -> float:
    """Seconds of the copies that `go` issues."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    go()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_bytes, default="33GiB")
    parser.add_argument("--block", type=parse_bytes, default="64MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--link", type=float, default=55e9)
    parser.add_argument("--out")
    given = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    record = Record(given.out)
    for workers in (WORKERS, 1, WORKERS):
        register(given.size, device, workers, record)
    copies(given.size, given.block, given.rounds, given.link, device, record)


if __name__ == "__main__":
    main()
