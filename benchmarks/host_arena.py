"""A host arena: its resident size, registration on one thread and on several, and copies each way.

    python -m benchmarks.host_arena --size 33GiB

Needs a GPU. `resident_error` is how far the process's growth is from the size that was asked for. `to_device` and
`from_device` are in bytes a second, over all of the arena, in blocks of `--block` bytes through two slots.
"""

from __future__ import annotations

import argparse
import time

import psutil
import torch

from benchmarks.common import Record
from longstraw.config import parse_bytes
from longstraw.doctor import measure_links
from longstraw.pagers.arena import REGISTER_BYTES, WORKERS, HostArena
from longstraw.pagers.host import HostPager
from longstraw.pagers.numa import choose_node


def register(size: int, device: torch.device, workers: int, record: Record) -> None:
    """Make an arena and give it back."""
    node = choose_node("auto", device)
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    arena = HostArena(size, device, node=node.node, workers=workers)
    seconds = time.perf_counter() - began
    grown = psutil.Process().memory_info().rss - before
    assert arena.memory.is_pinned()
    record.add(
        "host arena",
        size=size,
        workers=workers,
        seconds=seconds,
        rate=size / seconds,
        resident=grown,
        resident_error=grown / size - 1,
        through=arena.registered_with,
        slice=REGISTER_BYTES,
        numa=str(node.node),
        why=node.why,
    )
    arena.close()


def copies(size: int, block: int, device: torch.device, record: Record) -> None:
    """The host tier's own copies over a whole extent, each way, and both at once."""
    pager = HostPager(size, device, numa=choose_node("auto", device))
    half = size // 2 // block * block
    first, second = pager.allocate(half), pager.allocate(half)
    slots = [torch.zeros(block, dtype=torch.uint8, device=device) for _ in range(4)]

    def run(*, into: bool, out: bool) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        last = []
        for index, at in enumerate(range(0, half, block)):
            if into:
                last.append(pager.read(first, at, slots[index % 2]))
            if out:
                last.append(pager.write(second, at, slots[2 + index % 2]))
        for transfer in last[-2:]:
            transfer.result()
        return half * (into + out) / (time.perf_counter() - began)

    run(into=True, out=True)
    link = measure_links()[0]
    found = {
        "to_device": run(into=True, out=False),
        "from_device": run(into=False, out=True),
        "both": run(into=True, out=True),
    }
    shares = {
        "to_device_share": found["to_device"] / link.to_device,
        "from_device_share": found["from_device"] / link.from_device,
        "both_share": found["both"] / link.both,
    }
    record.add("host tier copies", size=size, block=block, **found, **shares)
    pager.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_bytes, default="33GiB")
    parser.add_argument("--block", type=parse_bytes, default="64MiB")
    parser.add_argument("--out")
    given = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    record = Record(given.out)
    for workers in (WORKERS, 1):
        register(given.size, device, workers, record)
    copies(given.size, given.block, device, record)


if __name__ == "__main__":
    main()
