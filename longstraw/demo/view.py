"""Shows the demo on a terminal: a bar while it works, then its tables. Off a terminal only the tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from longstraw.config.sizes import approximate_bytes
from longstraw.demo.results import Comparison, DemoResult, StepResult

# Phases in the order in which they happen, as the transaction's report names them.
_PHASES = ("sampling", "capture", "score", "replay", "backward", "sweep", "finalize", "optimizer")


class TerminalWatcher:
    """Bars and a line for each step, on standard error; nothing if that is no terminal."""

    def __init__(self) -> None:
        # This very stream: while the model loads, sys.stderr is another.
        self._console = Console(file=sys.stderr, highlight=False)

    @contextmanager
    def phase(self, text: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """A bar of `total` parts, or a spinner; yields what to call when a part is done."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        # transient: the runtime shows lines of its own, and a bar left behind would stand between them.
        with Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        ) as progress:
            task = progress.add_task(text, total=total)
            yield lambda: progress.advance(task)

    def step_done(self, number: int, of: int, step: StepResult) -> None:
        if self._console.is_terminal:
            self._console.print(
                f"step {number} of {of}: mean reward {step.mean_reward:.2f}, "
                f"{sum(step.seconds.values()):.0f} s, code {step.code}, best answer {step.answer[:60]!r}",
                markup=False,
            )


def show(result: DemoResult, console: Console) -> None:
    """The tables."""
    options = result.options
    console.print(
        f"SmolLM2-135M-Instruct on {result.device}: {options['steps']} steps of GRPO with AdamW, "
        f"a prompt of {options['prompt_tokens']} tokens, {options['group']} responses of at most "
        f"{options['response_tokens']}"
    )
    for table in (_steps(result), _phases(result), _tiers(result)):
        console.print(table)
    if result.comparison is None:
        console.print(
            "No group's rewards differed, so there was no gradient to compare; try another --seed.",
            style="yellow",
        )
    else:
        console.print(_comparison(result.comparison))
    console.print(
        f"the whole demo: {result.seconds:.0f} s, peak memory {approximate_bytes(result.peak_bytes)} "
        f"({result.memory_method})"
    )


def _table(title: str, *columns: str, caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _steps(result: DemoResult) -> Table:
    table = _table("each step", "step", "mean reward", "best", "seconds", "peak memory")
    for number, step in enumerate(result.steps, start=1):
        table.add_row(
            str(number),
            f"{step.mean_reward:.3f}",
            f"{max(step.rewards):.2f}",
            f"{sum(step.seconds.values()):.1f}",
            approximate_bytes(step.peak_bytes),
        )
    return table


def _phases(result: DemoResult) -> Table:
    table = _table("each phase, seconds of a step", "phase", "mean", "largest", "waiting for pages")
    for phase in _PHASES:
        seconds = [step.seconds.get(phase, 0.0) for step in result.steps]
        waits = [step.report["stall_seconds"].get(phase) for step in result.steps]
        waited = [wait for wait in waits if wait is not None]
        table.add_row(
            phase,
            f"{sum(seconds) / len(seconds):.2f}",
            f"{max(seconds):.2f}",
            f"{sum(waited) / len(waited):.2f}" if waited else "",
        )
    return table


def _tiers(result: DemoResult) -> Table:
    table = _table(
        "each tier, in the last step",
        "tier",
        "budget",
        "pages held",
        "read",
        "written",
        caption="Pages that can be used where they lie are not read or written.",
    )
    report = result.steps[-1].report
    for tier in result.config["tiers"]:
        kind = tier["kind"]
        moved = (report["bytes_read"], report["bytes_written"])
        counts = (report["tier_bytes"].get(kind, 0), *(part.get(kind, 0) for part in moved))
        table.add_row(kind, str(tier["budget"]), *(approximate_bytes(count) for count in counts))
    return table


def _comparison(comparison: Comparison) -> Table:
    ours, theirs = comparison.longstraw, comparison.ordinary
    table = _table(
        f"the gradient of step {comparison.step}, taken twice in this process",
        "",
        "Longstraw",
        "ordinary step",
        caption=f"Largest relative difference of a gradient, over {comparison.parameters} parameters: "
        f"{comparison.worst_relative:.1e} ({comparison.worst_parameter})",
    )
    table.add_row("seconds", f"{ours.seconds:.1f}", f"{theirs.seconds:.1f}")
    for label, counts in (
        ("peak memory", (ours.peak_bytes, theirs.peak_bytes)),
        ("  held before the step", (ours.start_bytes, theirs.start_bytes)),
        ("  added by the step", (ours.added_bytes, theirs.added_bytes)),
    ):
        table.add_row(label, *(approximate_bytes(count) for count in counts))
    return table
