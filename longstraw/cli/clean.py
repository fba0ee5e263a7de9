"""`longstraw clean`: deletes what dead runs left on disks, and nothing of a run that lives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longstraw.errors import ConfigError


def clean(
    disks: Annotated[list[Path], typer.Argument(help="Folders that nvme tiers used.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is there.")] = False,
) -> None:
    """Delete the files that your dead runs left in these folders.

    A run is dead when nobody holds the lease of its directory. A run's file mostly has no name from the start, so
    that there is nothing to clean; this is for filesystems where that is not possible, and for crashes at the wrong
    moment.
    """
    from longstraw.pagers.run_directory import leftovers, reclaim
    from longstraw.resident.placement import format_bytes

    for path in disks:
        if not path.is_dir():
            raise ConfigError(f"{path} is no directory; name the tiers[].path that your runs used")
    for path in disks:
        gone = [] if dry_run else reclaim(path)
        for left in gone:
            typer.echo(f"{left.path}: deleted, {format_bytes(left.nbytes)}")
        there = leftovers(path)
        for left in there:
            state = {True: "its run lives", False: "its run is dead", None: "whether its run lives cannot be told"}
            typer.echo(f"{left.path}: left alone, {format_bytes(left.nbytes)}: {state[left.alive]}")
        if not gone and not there:
            typer.echo(f"{path}: nothing there")
