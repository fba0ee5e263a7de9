"""The whole examination, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longstraw.config import Config, NvmeTier
from longstraw.doctor.disks import examine_disk
from longstraw.doctor.finding import Finding
from longstraw.doctor.gpus import examine_gpus
from longstraw.doctor.memory import examine_memory
from longstraw.doctor.software import examine_software
from longstraw.doctor.tiers import examine_tiers


def examine(disks: Sequence[Path], config: Config | None = None) -> list[Finding]:
    """Every finding on this machine, on the folders in `disks`, and on the tiers of `config` and their folders.

    Raises ConfigError for a configuration that a run would refuse.
    """
    tiers = [] if config is None else examine_tiers(config)
    named = [] if config is None else [tier.path for tier in config.tiers if isinstance(tier, NvmeTier)]
    found = [*examine_gpus(), *examine_memory(), *examine_software(), *tiers]
    for path in dict.fromkeys([*disks, *named]):
        found += examine_disk(path)
    return found
