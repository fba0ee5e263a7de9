"""Memory that the machine has and its kernel does not count yet, and memory that may be added while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SYSTEM = Path("/sys")
_HOT_ADD = {
    "bus/virtio/drivers/virtio_mem/virtio*": "virtio-mem",
    "bus/vmbus/drivers/hv_balloon/*-*": "Hyper-V's dynamic memory",
}
_OVERHEAD = 0.03
"""Of a range, the kernel's own bookkeeping and what firmware keeps: it never becomes free."""
_ORDINARY = 1 / 8
"""A larger share that is not counted is no overhead."""


def uncounted_bytes(total: int, folder: Path | None = None) -> int:
    """Bytes that are online and that the kernel's total, `total`, leaves out: it counts them as they are first used.

    Virtual machines that start fast do so. 0 where the kernel does not list its blocks of memory. `folder` lists those
    of one NUMA node, else of the machine.
    """
    size = SYSTEM / "devices/system/memory/block_size_bytes"
    if not size.exists():
        return 0
    block = int(size.read_text(), 16)
    blocks = list((folder or size.parent).glob("memory[0-9]*"))
    if not _unusual(blocks, block, total):
        return 0
    online = [one for one in blocks if (one / "state").read_text().strip() == "online"]
    if not _unusual(online, block, total):
        return 0
    return int(len(online) * block * (1 - _OVERHEAD)) - total


def _unusual(blocks: Sequence[Path], block: int, total: int) -> bool:
    return len(blocks) * block * (1 - _ORDINARY) > total


def hot_add() -> str | None:
    """What may add memory to this machine while it runs, or None."""
    for pattern, name in _HOT_ADD.items():
        if any(SYSTEM.glob(pattern)):
            return name
    return None
