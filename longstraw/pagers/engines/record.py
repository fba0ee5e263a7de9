"""The record that `longstraw probe` leaves, and what `auto` settings read from it."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from longstraw.errors import ConfigError

VERSION = 1


def record_path() -> Path:
    """`longstraw/probe.json` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "longstraw" / "probe.json"


def read_record() -> dict[str, Any] | None:
    """What was recorded on this machine, as JSON holds it. None without record.

    A record of another version of the format, or of another machine (a home folder may be shared), counts as none.
    Raises ConfigError if the file is no JSON.
    """
    path = record_path()
    if not path.exists():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise ConfigError(f"{path} is no record of `longstraw probe` ({cause}); delete it, and probe again") from cause
    if record.get("version") != VERSION or record.get("machine") != platform.node():
        return None
    return record


def recorded_rates(disk: Path) -> dict[str, float] | None:
    """For each engine that was probed on `disk` on this machine: the slower way's bytes a second. None without record.

    Raises ConfigError as `read_record`.
    """
    record = read_record()
    found = None if record is None else record["disks"].get(str(disk.resolve()))
    if found is None:
        return None
    return {name: min(rates["read"], rates["write"]) for name, rates in found["engines"].items()}


def write_record(record: dict[str, Any]) -> Path:
    """Leave the record where `read_record` looks for it, at once: who reads meanwhile finds the last one."""
    path = record_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
    return path
