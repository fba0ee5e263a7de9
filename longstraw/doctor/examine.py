"""The whole examination, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longstraw.doctor.disks import examine_disk
from longstraw.doctor.finding import Finding
from longstraw.doctor.gpus import examine_gpus
from longstraw.doctor.memory import examine_memory
from longstraw.doctor.software import examine_software


def examine(disks: Sequence[Path]) -> list[Finding]:
    """Every finding on this machine, and on the folders in `disks`."""
    found = [*examine_gpus(), *examine_memory(), *examine_software()]
    for path in disks:
        found += examine_disk(path)
    return found
