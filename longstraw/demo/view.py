"""Shows the demo on a terminal: a bar while it works, then its tables. Off a terminal only the tables."""

from __future__ import annotations

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
        self._console = Console(stderr=True, highlight=False)

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
        f"SmolLM2-135M-Instruct on {options['device']}: {options['steps']} steps of GRPO with AdamW, "
        f"prompts of {options['prompt_tokens']} tokens, {options['group']} responses of at most "
        f"{options['response_tokens']}"
    )
    console.print(_steps(result))
    console.print(_tiers(result))
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


def _steps(result: DemoResult) -> Table:
    table = Table(title="each step: reward, seconds by phase, peak memory")
    phases = [p for p in _PHASES if any(p in step.seconds for step in result.steps)]
    for name in ("step", "mean reward", "best", *phases, "peak memory"):
        table.add_column(name, justify="right")
    for number, step in enumerate(result.steps, start=1):
        table.add_row(
            str(number),
            f"{step.mean_reward:.3f}",
            f"{max(step.rewards):.2f}",
            *(f"{step.seconds.get(phase, 0.0):.1f}" for phase in phases),
            approximate_bytes(step.peak_bytes),
        )
    return table


def _tiers(result: DemoResult) -> Table:
    table = Table(title="each tier, in one step: pages held, and bytes moved to and from the compute device")
    for name in ("tier", "budget", "held", "read", "written"):
        table.add_column(name, justify="right" if name != "tier" else "left")
    report = result.steps[-1].report
    budgets = {tier["kind"]: str(tier["budget"]) for tier in result.config["tiers"]}
    for tier, held in report["tier_bytes"].items():
        table.add_row(
            tier,
            budgets.get(tier, ""),
            approximate_bytes(held),
            approximate_bytes(report["bytes_read"].get(tier, 0)),
            approximate_bytes(report["bytes_written"].get(tier, 0)),
        )
    table.caption = "rows of a tier that can be used where they lie are not moved"
    return table


def _comparison(comparison: Comparison) -> Table:
    table = Table(title=f"the same gradient, taken twice (group of step {comparison.step}, same process)")
    table.add_column("")
    table.add_column("Longstraw", justify="right")
    table.add_column("ordinary step", justify="right")
    ours, theirs = comparison.longstraw, comparison.ordinary
    table.add_row("seconds", f"{ours.seconds:.1f}", f"{theirs.seconds:.1f}")
    table.add_row("peak memory", approximate_bytes(ours.peak_bytes), approximate_bytes(theirs.peak_bytes))
    table.add_row(
        "  of which the step added",
        approximate_bytes(ours.added_bytes),
        approximate_bytes(theirs.added_bytes),
    )
    table.caption = (
        f"largest relative gradient difference of {comparison.parameters} parameters: "
        f"{comparison.worst_relative:.1e} ({comparison.worst_parameter})"
    )
    return table
