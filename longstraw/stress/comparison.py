"""Whether a step's gradient is right: against plain autograd, or against the same step again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from longstraw.stress.reference import make_reference
from longstraw.stress.result import StressResult
from longstraw.stress.workload import Group
from longstraw.verify import clone_gradients, compare_gradients, plain_gradients

Gradients = Mapping[str, Tensor | None]


def compare_with_autograd(
    model: Any, everyone: Sequence[Sequence[Group]], entry: Gradients, step: int, result: StressResult
) -> None:
    """The model's gradients against plain autograd on the groups of every rank, averaged over ranks, on top of `entry`,
    which was there before."""
    reference = make_reference(model)
    for groups in everyone:
        for group in groups:
            prompt = group.prompt.to(model.device)
            plain_gradients(reference, prompt, [r.to(model.device) for r in group.responses], group.loss)
    expected: dict[str, Tensor | None] = {}
    for name, gradient in clone_gradients(reference).items():
        assert gradient is not None
        mean, before = gradient / len(everyone), entry[name]
        expected[name] = mean if before is None else mean + before
    result.compared += 1
    name, off = compare(clone_gradients(model), expected, f"step {step}", result)
    if off >= result.worst_error:
        result.worst_error, result.worst_parameter = off, name


def compare(ours: Gradients, expected: Gradients, where: str, result: StressResult) -> tuple[str, float]:
    """The parameter that differs most, and its relative error; a problem of `result` if that is more than may be."""
    worst = compare_gradients(ours, expected)[0]
    if not worst.relative <= result.tolerance:
        result.problems.append(
            f"{where}: the gradient of {worst.name} is off by {worst.relative:.1e}, more than "
            f"{result.tolerance:.0e} {worst.note}"
        )
    return worst.name, worst.relative
