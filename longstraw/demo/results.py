"""What the demo found: rewards, bytes, peaks and seconds, and the ordinary step beside them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One optimizer step.

    Attributes:
        rewards: one for each response, 0 to 1.
        answer: the best response's text.
        code: the right answer.
        seconds: wall time by phase: sampling, the transaction's own phases, and the optimizer.
        report: the transaction's report (bytes by tier, stalls, peaks), as plain values.
        start_bytes, peak_bytes: memory held when the transaction began, and the most held during it.
    """

    rewards: list[float]
    answer: str
    code: str
    seconds: dict[str, float]
    report: dict[str, Any]
    start_bytes: int
    peak_bytes: int

    @property
    def mean_reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One way to the gradient of a group: its wall time and memory."""

    seconds: float
    start_bytes: int
    peak_bytes: int

    @property
    def added_bytes(self) -> int:
        return self.peak_bytes - self.start_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The same group's gradient twice, under the same weights, in the same process.

    Attributes:
        step: which step's group, from 1.
        longstraw: the transaction: capture, score, replay, sweep, finalize.
        ordinary: one batch with the prompt repeated for each response, gradient checkpointing on; it scores
            nothing, so it has one phase less.
        worst_parameter, worst_relative: the largest relative difference of any parameter's gradient.
        parameters: how many were compared.
    """

    step: int
    longstraw: Side
    ordinary: Side
    worst_parameter: str
    worst_relative: float
    parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """Everything, for the tables and for `--json`.

    Attributes:
        device: where the model ran.
        comparison: None only if no group's rewards differed: there was no gradient to compare.
        memory_method: how peaks were measured.
        peak_bytes: the most memory held at any time, from loading the model on.
        seconds: wall time of the whole demo.
    """

    device: str
    options: dict[str, Any]
    config: dict[str, Any]
    steps: list[StepResult]
    comparison: Comparison | None
    memory_method: str
    peak_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = asdict(self)
        for step, plain in zip(self.steps, found["steps"], strict=True):
            plain["mean_reward"] = step.mean_reward
        return found
