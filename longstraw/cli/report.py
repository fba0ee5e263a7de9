"""`longstraw report`: the figures of a transaction as tables, and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from longstraw.cli.outputs import in_a_folder
from longstraw.config.sizes import approximate_bytes
from longstraw.errors import ConfigError
from longstraw.runtime.report import aux_loss_line

_NEEDED = ("seconds", "stall_seconds", "stall_seconds_by_tier", "bytes_read", "bytes_written", "tier_bytes", "passes")


def report(
    run: Annotated[Path, typer.Argument(help="JSON that txn.report.save wrote.", exists=True, dir_okay=False)],
    plot: Annotated[
        Path | None, typer.Option(help="Draw it here: a .svg or .html file.", callback=in_a_folder)
    ] = None,
) -> None:
    """Show what a transaction did: seconds and waits by phase, bytes by tier, and with --plot a picture over time."""
    figures = read_report(run)
    if plot is not None and plot.suffix not in (".svg", ".html"):
        raise ConfigError(f"--plot {plot}: name a .svg or a .html file")
    _print(figures)
    if plot is None:
        return
    from longstraw.plot import transaction_svg

    picture = transaction_svg(figures)
    if plot.suffix == ".html":
        picture = f'<!doctype html>\n<meta charset="utf-8">\n<title>{run.name}</title>\n{picture}'
    plot.write_text(picture, encoding="utf-8")
    Console(highlight=False, soft_wrap=True).print(f"drawn: {plot}", markup=False)


def read_report(path: Path) -> dict[str, Any]:
    """The figures in a file, alone or under the key "report". Raises ConfigError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: no JSON that can be read ({error}); write it with txn.report.save(path)") from error
    if isinstance(found, dict) and isinstance(found.get("report"), dict):
        found = found["report"]
    missing = [key for key in _NEEDED if not isinstance(found, dict) or key not in found]
    if missing:
        raise ConfigError(
            f"{path}: no report of this version, {missing[0]!r} is missing; write it with txn.report.save"
        )
    return dict(found)


def _print(figures: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    checkpointed = [name for name in ("replay", "sweep") if figures[f"checkpoint_{name}"]]
    console.print(
        f"{figures['gradient']} gradient: prompt {figures['prompt_tokens']:,} in {figures['chunks']} chunks, "
        f"{figures['branches']} responses of {figures['response_tokens']:,} tokens in {figures['lanes']} lanes; "
        f"attention outputs of {figures['kept_output_layers']} layers kept; "
        f"{' and '.join(checkpointed) or 'nothing'} checkpointed; {figures['retries']} retries"
    )
    if figures.get("left_out"):
        console.print(f"{figures['left_out']} more responses were given to replay and left out: its loop ended early")
    whole = sum(figures["seconds"].values()) or 1.0
    table = Table(title="time", title_justify="left")
    for name in ("phase", "seconds", "share", "waits for pages"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase, seconds in figures["seconds"].items():
        waits = figures["stall_seconds"].get(phase)
        table.add_row(phase, f"{seconds:.2f}", f"{seconds / whole:.0%}", "" if waits is None else f"{waits:.2f}")
    table.add_section()
    table.add_row("all", f"{whole:.2f}", "100%", f"{sum(figures['stall_seconds'].values()):.2f}")
    console.print(table)
    tiers = Table(title="tiers", title_justify="left")
    for name in ("tier", "pages", "read", "written", "waits for it"):
        tiers.add_column(name, justify="left" if name == "tier" else "right")
    names = sorted({*figures["tier_bytes"], *figures["bytes_read"], *figures["bytes_written"]})
    for tier in names:
        moved = (approximate_bytes(figures[key].get(tier, 0)) for key in ("tier_bytes", "bytes_read", "bytes_written"))
        tiers.add_row(tier, *moved, f"{figures['stall_seconds_by_tier'].get(tier, 0.0):.2f} s")
    console.print(tiers)
    for kind, count in figures.get("collectives", {}).items():
        nbytes = approximate_bytes(figures["collective_bytes"][kind])
        console.print(f"between ranks ({figures['sharding']}, {figures['reduce']}): {count:,} {kind}, {nbytes} in all")
    if figures.get("weights_to_device") or figures.get("gradients_to_host"):
        link = (approximate_bytes(figures[key]) for key in ("weights_to_device", "gradients_to_host"))
        console.print("over the host's link beside pages: {} of weights, {} of gradients".format(*link))
    if figures["peak_device_bytes"]:
        console.print(f"peak of device memory: {approximate_bytes(figures['peak_device_bytes'])}")
    if figures.get("aux_loss") is not None:
        console.print(aux_loss_line(figures))
    if figures["drift_mean"] is not None:
        console.print(f"drift of replayed log-probs: mean {figures['drift_mean']:.1e}, max {figures['drift_max']:.1e}")
