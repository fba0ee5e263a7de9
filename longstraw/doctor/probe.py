"""Measures links and disks, and leaves the record that `auto` settings read."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from longstraw.doctor.links import LinkRates, measure_links
from longstraw.pagers.engines import EngineSettings, Rates, engines_here, measure
from longstraw.pagers.engines.record import VERSION, read_record, write_record
from longstraw.pagers.spool import SpoolFile

DISK_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRates:
    """One folder: each engine's rates at the settings that were used, and why the others have none."""

    path: Path
    direct: bool
    settings: EngineSettings
    engines: dict[str, Rates]
    refused: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """What was measured on this machine, when."""

    date: str
    links: list[LinkRates]
    disks: list[DiskRates]

    def to_dict(self) -> dict[str, Any]:
        """The record, as JSON holds it. Rates are in bytes a second."""
        return {
            "version": VERSION,
            "machine": platform.node(),
            "date": self.date,
            "links": [asdict(link) for link in self.links],
            "disks": {
                str(disk.path.resolve()): {
                    "direct": disk.direct,
                    "settings": asdict(disk.settings),
                    "engines": {name: asdict(rates) for name, rates in disk.engines.items()},
                    "refused": disk.refused,
                }
                for disk in self.disks
            },
        }

    def save(self) -> Path:
        """Write the record to where `auto` settings look for it, and return that file's path.

        Links and folders that were not measured now stay as this machine's last record has them. Raises ConfigError if
        what lies there is no record.
        """
        record, last = self.to_dict(), read_record()
        if last is not None:
            record["links"] = record["links"] or last["links"]
            record["disks"] = last["disks"] | record["disks"]
        return write_record(record)


def probe(
    disks: Sequence[Path], settings: EngineSettings, *, seconds: float = 2.0, disk_bytes: int = DISK_BYTES
) -> ProbeResult:
    """Measure the links of every GPU, and every engine on each folder, `seconds` each way.

    Raises ConfigError for a folder that no file can be made in, CapacityError if the disk has not `disk_bytes`.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return ProbeResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        links=measure_links(),
        disks=[_probe_disk(path, settings, device, seconds, disk_bytes) for path in disks],
    )


def _probe_disk(path: Path, settings: EngineSettings, device: torch.device, seconds: float, nbytes: int) -> DiskRates:
    file = SpoolFile(path)
    try:
        file.grow(nbytes)
        made, refused = engines_here(file, settings, device)
        found = {}
        for name, engine in made.items():
            found[name] = measure(engine, settings, nbytes, seconds)
            engine.close()
        return DiskRates(path=path, direct=file.direct, settings=settings, engines=found, refused=refused)
    finally:
        file.close()
