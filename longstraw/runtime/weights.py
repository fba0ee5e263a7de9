"""Which weights a state was captured under, and whether they still are the model's."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from longstraw.errors import StaleWeightsError
from longstraw.runtime.adapter import ModelAdapter
from longstraw.runtime.sharding import WeightPrint


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsVersion:
    """A fingerprint of a model's weights.

    Attributes:
        parameters: for each parameter its storage, in-place version and dtype; autograd's own counters, so that any
            in-place change shows (an optimizer's, a checkpoint's, `copy_`).
        state: the adapter's `state_key`.
        steps: optimizer steps seen so far that touch these parameters.
    """

    parameters: tuple[WeightPrint, ...]
    state: Hashable
    steps: int


class WeightsWatch:
    """Counts the optimizer steps on a model, and compares versions of its weights."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._steps = 0
        reference = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            watch = reference()
            if watch is not None and watch._touches(optimizer):
                watch._steps += 1

        handle = register_optimizer_step_post_hook(stepped)
        self._finalizer = weakref.finalize(self, handle.remove)

    def _touches(self, optimizer: torch.optim.Optimizer) -> bool:
        mine = {id(p) for _, p in self._adapter.sharding.parameters()}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    @property
    def steps(self) -> int:
        """Optimizer steps on the model so far."""
        return self._steps + self._adapter.sharding.steps

    def now(self) -> WeightsVersion:
        """The version of the weights at this moment."""
        return WeightsVersion(
            parameters=self._adapter.sharding.weights(),
            state=self._adapter.state_key(),
            steps=self.steps,
        )

    def check(self, captured: WeightsVersion, *, staleness: int, call: str) -> int:
        """How many optimizer steps old `captured` is.

        Raises:
            StaleWeightsError: they are more than `staleness` steps old, or changed by something else than a step.
        """
        now = self.now()
        steps = now.steps - captured.steps
        changed = _first_change(captured, now)
        if changed is None and steps == 0:
            return 0
        recast = _first_recast(captured, now)
        if recast is not None:
            raise StaleWeightsError(
                f"{call}: {recast} since the prompt was captured; capture again after casting weights"
            )
        if now.state != captured.state:
            raise StaleWeightsError(
                f"{call}: the prompt was captured under adapter state {captured.state!r}, the model now has "
                f"{now.state!r}; capture again after changing adapters"
            )
        if steps == 0:
            raise StaleWeightsError(
                f"{call}: {changed} changed since the prompt was captured, and not by an optimizer step; "
                "capture again after loading, casting or editing weights"
            )
        if steps > staleness:
            raise StaleWeightsError(
                f"{call}: {steps} optimizer step(s) since the prompt was captured, staleness allows {staleness}; "
                "capture again after a step, or set `staleness` and watch the drift in the report"
            )
        return steps


def _first_change(captured: WeightsVersion, now: WeightsVersion) -> str | None:
    if len(captured.parameters) != len(now.parameters):
        return "the set of parameters"
    for old, new in zip(captured.parameters, now.parameters, strict=True):
        if old != new:
            return f"parameter {new[0]}"
    return None


def _first_recast(captured: WeightsVersion, now: WeightsVersion) -> str | None:
    before = {name: dtype for name, _, _, dtype in captured.parameters}
    for name, _, _, dtype in now.parameters:
        if before.get(name, dtype) != dtype:
            return f"parameter {name} went from {before[name]} to {dtype}"
    return None
