"""`longstraw doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longstraw.cli.outputs import json_option

_STYLE = {"good": "green", "note": "yellow", "bad": "bold red"}


def doctor(
    disks: Annotated[list[Path] | None, typer.Argument(help="Folders that nvme tiers may use.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML of settings: make and describe its tiers.")] = None,
    json_out: Annotated[Path | None, json_option("Also write the findings here.")] = None,
) -> None:
    """Examine GPUs, links, NUMA nodes, memory limits, disks and versions; say what to do about each finding.

    Exit status 1 if something here will fail, 2 if a run would refuse the settings.
    """
    from longstraw.config import Config
    from longstraw.doctor import Level, examine

    found = examine(disks or [], None if config is None else Config.load(config))
    if json_out is not None:
        rows = [{"area": f.area, "level": f.level.value, "text": f.text, "fix": f.fix} for f in found]
        json_out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    table = Table(show_lines=False)
    for column in ("area", "", "finding", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in found:
        level = finding.level.value
        table.add_row(finding.area, f"[{_STYLE[level]}]{level}[/]", escape(finding.text), escape(finding.fix))
    console = Console(highlight=False)
    console.print(table)
    failing = sum(finding.level is Level.BAD for finding in found)
    if failing:
        console.print(f"{failing} of these will fail", style="bold red")
        raise typer.Exit(1)
