"""`longstraw probe`: how fast this machine's links and disks are, and a record for `auto` settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from longstraw.cli.outputs import json_option
from longstraw.errors import ConfigError

if TYPE_CHECKING:
    from longstraw.doctor import ProbeResult


def probe(
    disks: Annotated[list[Path] | None, typer.Argument(help="Folders that nvme tiers may use.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for each engine, each way.", min=0.05)] = 2.0,
    size: Annotated[str, typer.Option(help="Bytes of the file that is written and read.")] = "1GiB",
    block: Annotated[str, typer.Option(help="Bytes of one operation, as tiers[].block.")] = "4MiB",
    threads: Annotated[int, typer.Option(help="Operations at once, as tiers[].threads.", min=1)] = 4,
    json_out: Annotated[Path | None, json_option("Also write the record here.")] = None,
    keep: Annotated[bool, typer.Option(help="Add this to the record that auto settings read.")] = True,
) -> None:
    """Measure host-to-device and device-to-host copies of every GPU, and every engine on each folder."""
    from longstraw.config import parse_bytes
    from longstraw.doctor import probe as run_probe
    from longstraw.pagers.engines import EngineSettings

    for disk in disks or []:
        if not disk.is_dir():
            raise ConfigError(f"{disk} is no directory; create it, or name one that exists")
    try:
        nbytes, block_bytes = parse_bytes(size), parse_bytes(block)
    except ValueError as error:
        raise ConfigError(f"--size or --block: {error}") from None
    if block_bytes < 64 << 10 or block_bytes % (64 << 10) or nbytes < block_bytes * threads:
        raise ConfigError(
            f"--block {block} --size {size}: use blocks of a multiple of 64KiB, and a size of at least {threads} blocks"
        )
    settings = EngineSettings(threads=threads, block=block_bytes)
    result = run_probe(disks or [], settings, seconds=seconds, disk_bytes=nbytes)
    if json_out is not None:
        json_out.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    console = Console(highlight=False)
    _show(result, console)
    if keep:
        console.print(f"record for auto settings: {result.save()}", soft_wrap=True)


def _show(result: ProbeResult, console: Console) -> None:
    table = Table(title="GB/s (10^9 bytes)")
    for column in ("what", "to device or write", "from device or read", "both at once", "CPU s/GB (write, read)"):
        table.add_column(column, justify="left" if column == "what" else "right", overflow="fold")
    for link in result.links:
        name = f"cuda:{link.devices[0]}" if len(link.devices) == 1 else f"{len(link.devices)} GPUs at once"
        rates = (f"{rate / 1e9:.1f}" for rate in (link.to_device, link.from_device, link.both))
        table.add_row(name, *rates, "")
    for disk in result.disks:
        for name, found in disk.engines.items():
            table.add_row(
                f"{disk.path} {name}",
                f"{found.write / 1e9:.2f}",
                f"{found.read / 1e9:.2f}",
                "",
                f"{found.write_cpu:.2f}, {found.read_cpu:.2f}",
            )
    console.print(table)
    if not result.links:
        console.print("no GPU: no links were measured")
    for disk in result.disks:
        for name, why in disk.refused.items():
            console.print(f"{disk.path}: not {name}: {why}", markup=False, soft_wrap=True)
