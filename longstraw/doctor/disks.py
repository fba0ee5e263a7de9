"""A folder that a tier may use: its filesystem, direct I/O, sector, room, and what dead runs left there."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import psutil
import torch

from longstraw.doctor.finding import Finding, bad, good, note
from longstraw.errors import CapacityError, ConfigError
from longstraw.pagers.engines import EngineSettings, engines_here
from longstraw.pagers.run_directory import leftovers
from longstraw.pagers.spool import SECTOR, SpoolFile
from longstraw.resident.placement import format_bytes

_MEMORY = ("tmpfs", "ramfs")
_NETWORK = ("nfs", "nfs4", "cifs", "fuse.sshfs", "9p")


def examine_disk(path: Path) -> list[Finding]:
    """Findings on one folder. A file is made in it, and is gone again."""
    area = f"disk {path}"
    if not path.is_dir():
        return [bad(area, "is no directory", "create it, or name one that exists")]
    found = [_filesystem(area, path), *_left(area, path)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            file = SpoolFile(path)
        except (ConfigError, CapacityError) as refusal:
            text = str(refusal).removeprefix("tiers[i].path: ")
            return [*found, bad(area, text, "name a folder that you may write to")]
    try:
        found.append(_direct(area, file))
        texts = [str(warning.message) for warning in caught]
        found += [note(area, text, "use a local disk (ext4, xfs)") for text in texts if "stays" in text]
        made, refused = engines_here(file, EngineSettings(), torch.device("cpu"))
        found.append(good(area, f"engines that work here: {', '.join(made)}"))
        for name, why in refused.items():
            found.append(note(area, f"engine {name}: {why}", "leave it: posix works everywhere"))
        for engine in made.values():
            engine.close()
    finally:
        file.close()
    return found


def _filesystem(area: str, path: Path) -> Finding:
    where = path.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if where.is_relative_to(m.mountpoint)]
    kind = max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else "unknown"
    text = f"{kind}, {format_bytes(shutil.disk_usage(path).free)} free, sector {_sector(path)}"
    if kind in _MEMORY:
        return bad(area, f"{text}: this is memory, not a disk", "name a folder on a disk")
    if kind in _NETWORK:
        return note(area, f"{text}: a network filesystem", "name a folder on a local disk")
    return good(area, text)


def _sector(path: Path) -> str:
    device = os.stat(path).st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for place in (folder, folder.parent):  # a partition's queue is its disk's
        size = place / "queue" / "logical_block_size"
        if size.exists():
            return f"{size.read_text().strip()} bytes"
    return "unknown"


def _direct(area: str, file: SpoolFile) -> Finding:
    if file.direct:
        return good(area, f"direct I/O works, in units of {SECTOR} bytes")
    return note(
        area, "refuses direct I/O: pages pass through the page cache", "use a filesystem with O_DIRECT (ext4, xfs)"
    )


def _left(area: str, path: Path) -> list[Finding]:
    found = []
    for left in leftovers(path):
        if left.alive is False:
            found.append(
                note(area, f"{left.path.name}: {format_bytes(left.nbytes)} of a dead run", f"longstraw clean {path}")
            )
        elif left.alive is None:
            text = f"{left.path.name}: whether its run lives cannot be told"
            found.append(note(area, text, "delete it if it does not"))
        else:
            found.append(good(area, f"{left.path.name}: a run that lives has {format_bytes(left.nbytes)}"))
    return found
