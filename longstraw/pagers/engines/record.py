"""The record that `longstraw probe` leaves, and what `auto` settings read from it."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

VERSION = 1


def record_path() -> Path:
    """`longstraw/probe.json` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "longstraw" / "probe.json"


def recorded_rates(disk: Path) -> dict[str, float] | None:
    """For each engine that was probed on `disk` on this machine: the slower way's bytes a second. None without record.

    A record of another version of the format, or of another machine (a home folder may be shared), counts as none.
    """
    path = record_path()
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record.get("version") != VERSION or record.get("machine") != platform.node():
        return None
    found = record["disks"].get(str(disk.resolve()))
    if found is None:
        return None
    return {name: min(rates["read"], rates["write"]) for name, rates in found["engines"].items()}
