"""`longstraw stress`: random transactions near the tiers' limits, with faults, for a given time, and a verdict."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from longstraw.cli.outputs import json_option
from longstraw.errors import ConfigError

if TYPE_CHECKING:
    from longstraw.stress import StressResult


def stress(
    seconds: Annotated[float, typer.Option(help="How long to go on.")] = 60.0,
    steps: Annotated[int | None, typer.Option(help="The most steps.", show_default="as many as fit", min=1)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; of several ranks each has a GPU.")] = "cpu",
    scratch: Annotated[Path | None, typer.Option(help="Folder of the nvme tier.", show_default="temporary")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model, groups, settings and faults.")] = 0,
    prompt_tokens: Annotated[int, typer.Option(help="The longest prompt.")] = 192,
    response_tokens: Annotated[int, typer.Option(help="The longest response.")] = 24,
    group: Annotated[int, typer.Option(help="The most responses of a group.")] = 4,
    layers: Annotated[int, typer.Option(help="Layers of the random model.")] = 3,
    hidden_size: Annotated[int, typer.Option(help="Width of the random model.")] = 32,
    budgets: Annotated[
        str | None,
        typer.Option(help="Of device, host and disk: 2GiB,8GiB,16GiB.", show_default="cut to the largest group"),
    ] = None,
    fault_rate: Annotated[float, typer.Option(help="Share of the steps that a fault is put into.")] = 0.4,
    parity_rate: Annotated[float, typer.Option(help="Share of the steps compared with plain autograd.")] = 0.3,
    parity_tokens: Annotated[int, typer.Option(help="Longest prompt of a step that is compared.")] = 4096,
    dtype: Annotated[
        str | None,
        typer.Option(help="float64, float32 or bfloat16.", show_default="float64 on a CPU, float32 on a GPU"),
    ] = None,
    json_out: Annotated[
        Path | None, json_option("Also write the figures here, each rank its own, anew after every step.")
    ] = None,
) -> None:
    """Run random groups with random faults through real transactions, and compare gradients now and then.

    Under torchrun all ranks train one model in DDP. Exit status 1 if a page, byte, slot or file leaked, a gradient was
    wrong or touched by a failed step, a fault ended in another error than its own, or most steps did not fit.
    """
    from longstraw.cli.device import parse_device, parse_dtype
    from longstraw.stress import StressOptions, StressResult, run_stress

    ranks, local = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("LOCAL_RANK")
    where = parse_device(f"cuda:{local}" if device == "cuda" and local is not None else device)
    options = StressOptions(
        seconds=seconds,
        steps=steps,
        seed=seed,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        group=group,
        layers=layers,
        hidden_size=hidden_size,
        budgets=_parse_budgets(budgets),
        fault_rate=fault_rate,
        parity_rate=parity_rate,
        parity_tokens=parity_tokens,
        dtype=None if dtype is None else parse_dtype(dtype),
        **({} if scratch is None else {"scratch": scratch}),
    )
    if where.type == "cuda":
        import torch

        torch.cuda.set_device(where)

    rank, so_far = int(os.environ.get("RANK", "0")), StressResult()

    def keep(*, finished: bool, error: str | None = None) -> None:
        if json_out is not None:
            path = json_out if ranks == 1 else json_out.with_name(f"{json_out.stem}.{rank}{json_out.suffix}")
            verdict = {"passed": so_far.passed if finished else None, "finished": finished, "error": error}
            _replace(path, json.dumps(so_far.to_dict() | {"rank": rank} | verdict, indent=2) + "\n")

    # What an earlier run left there is not this one's.
    keep(finished=False)
    with _progress(seconds, show=rank == 0 and sys.stderr.isatty()) as tell:

        def watch(result: StressResult) -> None:
            nonlocal so_far
            so_far = result
            keep(finished=False)
            tell(result)

        try:
            so_far = result = run_stress(options, where, watch)
        except BaseException as error:
            keep(finished=False, error=repr(error))
            raise
    keep(finished=True)
    _show(result, ranks)
    for note in result.notes:
        Console(highlight=False).print(f"note: {note}", style="yellow", soft_wrap=True)
    if not result.passed:
        raise typer.Exit(1)


@contextmanager
def _progress(seconds: float, *, show: bool) -> Iterator[Callable[[StressResult], None]]:
    """What rewrites one line of standard error after each step, where it is to show."""

    def tell(result: StressResult) -> None:
        if show:
            time = f"{result.seconds:.0f} of {seconds:.0f} s"
            line = f"{time}: {result.steps} steps, {sum(result.faults.values())} faults, {result.compared} compared"
            sys.stderr.write(f"\r\033[K{line}")
            sys.stderr.flush()

    try:
        yield tell
    finally:
        if show:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _replace(path: Path, text: str) -> None:
    """Write a file that is whole at any moment."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(text, encoding="utf-8")
    half.replace(path)


def _parse_budgets(text: str | None) -> tuple[int, int, int] | None:
    from longstraw.config import parse_bytes

    if text is None:
        return None
    parts, wanted = text.split(","), "write three sizes, of the device, host and nvme tiers, such as 2GiB,8GiB,16GiB"
    if len(parts) != 3:
        raise ConfigError(f"--budgets {text}: {wanted}")
    try:
        device, host, disk = map(parse_bytes, parts)
    except ValueError as error:
        raise ConfigError(f"--budgets {text}: {error}; {wanted}") from None
    return device, host, disk


def _show(result: StressResult, ranks: int) -> None:
    from longstraw.config.sizes import approximate_bytes

    console = Console(highlight=False)
    table = Table(title=f"stress, {result.seconds:.0f} s" + (f", rank {result.rank} of {ranks}" if ranks > 1 else ""))
    table.add_column("figure")
    table.add_column("value", overflow="fold")
    table.add_row("steps, transactions", f"{result.steps}, {result.transactions}")
    for tier, budget in result.budgets.items():
        moved = f"read {approximate_bytes(result.read[tier])}, written {approximate_bytes(result.written[tier])}"
        share = result.fullest.get(tier, 0.0)
        most = f"{approximate_bytes(result.peaks[tier])}, budgets to {approximate_bytes(budget)}, {share:.0%} full"
        table.add_row(f"tier {tier}", f"{moved}; at most {most}")
    table.add_row("written to the disk (wear)", approximate_bytes(result.disk_written))
    table.add_row("faults that happened", ", ".join(f"{n} {name}" for name, n in result.faults.items() if n) or "none")
    table.add_row("ended by a clear error, then run again", _counts(result.failed_cleanly))
    if result.failed_elsewhere:
        table.add_row("ended because another rank failed, then run again", str(result.failed_elsewhere))
    table.add_row("did not fit the budgets, and said so", str(result.refused))
    table.add_row("lanes run again narrower", str(result.retries))
    table.add_row("stalled for pages", f"{result.stall_seconds:.1f} s")
    sizes = [approximate_bytes(count) for count in result.resident_bytes]
    counts = f"open files {_warm_last(result.files)}, threads {_warm_last(result.threads)}"
    table.add_row("process between runtimes, warm and at the end", f"{_warm_last(sizes)}; {counts}")
    if result.device_bytes[1]:
        held = [approximate_bytes(count) for count in result.device_bytes]
        table.add_row("CUDA memory between runtimes, warm and at the end", _warm_last(held))
    table.add_row(
        f"steps compared with plain autograd, {result.dtype}",
        f"{result.compared}, worst {result.worst_error:.1e} {result.worst_parameter} (may be {result.tolerance:.0e})",
    )
    if result.repeated:
        table.add_row("steps with altered bytes, compared with their repeat", str(result.repeated))
    console.print(table)
    for problem in result.problems:
        console.print(f"PROBLEM: {problem}", style="bold red", soft_wrap=True)
    if result.passed:
        console.print("passed: nothing leaked, nothing wrong", style="bold green")
    else:
        console.print(f"FAILED: {len(result.problems)} problems", style="bold red")


def _warm_last(pair: Sequence[object]) -> str:
    return " and ".join(map(str, pair))


def _counts(counter: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.items()) or "none"
