"""The stress run itself: steps with faults, each tried again without, what is left compared and counted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from longstraw.api import Runtime
from longstraw.errors import CapacityError, RankFailedError
from longstraw.pagers.nvme import NvmePager
from longstraw.pagers.run_directory import leftovers
from longstraw.stress.attempt import attempt, replay
from longstraw.stress.checks import restore, still_held, touched
from longstraw.stress.comparison import Gradients, compare, compare_with_autograd
from longstraw.stress.faults import Armed, Fault, put_in
from longstraw.stress.growth import WARM_ERAS, Held, grown
from longstraw.stress.notes import make_notes
from longstraw.stress.options import StressOptions
from longstraw.stress.outcome import Outcome, judge, names
from longstraw.stress.ranks import Together
from longstraw.stress.result import StressResult
from longstraw.stress.workload import Group, build_model, largest_group, make_groups, make_settings
from longstraw.verify import clone_gradients, default_tolerance

STEPS_OF_AN_ERA = 12
"""Steps that one runtime lives for."""

Watch = Callable[[StressResult], None]


def run_stress(options: StressOptions, device: torch.device, watch: Watch = lambda result: None) -> StressResult:
    """Run until the time is over. Returns this rank's figures; `watch` is told them after each step.

    Under torchrun every rank calls it, and all stop together.
    """
    together = Together(device)
    try:
        return _Run(options, device, together, watch).go()
    finally:
        together.close()


class _Run:
    def __init__(self, options: StressOptions, device: torch.device, together: Together, watch: Watch) -> None:
        self.options = options
        self.device = device
        self.together = together
        self.watch = watch
        self.inner = build_model(options, device)
        self.model = together.wrap(self.inner)
        dtype = self.inner.dtype
        self.result = StressResult(
            rank=together.rank, tolerance=default_tolerance(dtype)[0], dtype=str(dtype).removeprefix("torch.")
        )
        # Each rank has faults of its own; what is done together is drawn from the other.
        self.mine = random.Random(f"{options.seed} faults {together.rank}")
        self.shared = random.Random(f"{options.seed} shared")
        self.eras: list[Held] = []

    def go(self) -> StressResult:
        began = time.monotonic()
        budgets = self.options.budgets or self._cut(self._need())
        step, era = 0, 0
        while not self.result.problems:
            with self._era(make_settings(self.options, era, budgets)) as runtime:
                for _ in range(STEPS_OF_AN_ERA):
                    over = self.together.first(self._over(began, step))
                    if over or any(self.together.gather(bool(self.result.problems))):
                        break
                    self._step(runtime, step)
                    step += 1
                    self.result.seconds = time.monotonic() - began
                    self.watch(self.result)
            era += 1
            self._check_growth()
            if self.together.first(self._over(began, step)):
                break
            if any(self.together.gather(bool(self.result.problems))):
                break
        self._check_scratch()
        if not self.result.problems:
            self._check_enough()
        self.result.notes = make_notes(self.result, self.options, eras=era)
        self.result.seconds = time.monotonic() - began
        return self.result

    def _over(self, began: float, step: int) -> bool:
        limit = self.options.steps
        return time.monotonic() - began >= self.options.seconds or (limit is not None and step >= limit)

    # Budgets

    def _need(self) -> int:
        """Bytes of pages that the largest group takes, from one transaction on it with room to spare."""
        with Runtime(self.model, tiers=[{"kind": "host"}], capture={"keep_attention": "never"}) as runtime:
            group = largest_group(self.options)
            with runtime.accumulate(), runtime.transaction(group.prompt) as txn:
                replay(txn, group)
        self.inner.zero_grad(set_to_none=True)
        return sum(txn.report.tier_bytes.values())

    def _cut(self, need: int) -> tuple[int, int, int]:
        """Three budgets that the largest group just fits: what is over goes into rounding to whole pages, and, where
        pages are small, into attention outputs that are kept."""
        return int(need * 0.3), int(need * 0.4), int(need * 0.37)

    @contextmanager
    def _era(self, settings: Mapping[str, Any]) -> Iterator[Runtime]:
        with Runtime(self.model, settings) as runtime:
            # The model's first short run has nowhere narrower to go: faults are for what comes after it.
            runtime._engine.adapter.profile()
            for pager in runtime._engine.store.pagers:
                self.result.budgets[pager.name] = max(pager.budget, self.result.budgets.get(pager.name, 0))
            yield runtime
            for pager in runtime._engine.store.pagers:
                inner = getattr(pager, "inner", pager)
                if isinstance(inner, NvmePager):
                    self.result.disk_written += inner.disk_written

    # One step

    def _step(self, runtime: Runtime, step: int) -> None:
        compared = self.shared.random() < self.options.parity_rate
        most = min(self.options.parity_tokens, self.options.prompt_tokens) if compared else self.options.prompt_tokens
        everyone = [make_groups(self.options, step, rank, most_prompt=most) for rank in range(self.together.world)]
        groups = everyone[self.together.rank]
        entry = self._entry(step)
        armed = None
        if self.mine.random() < self.options.fault_rate:
            fault = self.mine.choice(list(Fault))
            # A response alone, and a 32nd of a prompt, have somewhere to go.
            narrow = max(self.options.response_tokens, self.options.prompt_tokens // 32)
            with put_in(fault, self.inner, self.mine, narrow) as armed:
                error = attempt(runtime, groups, armed, self.result)
            self.result.drawn[fault.value] += 1
            self.result.faults[fault.value] += bool(armed.happened)
        else:
            error = attempt(runtime, groups, None, self.result)
        first = self.together.gather(Outcome.of(error, armed))
        failed = any(names(first))
        if failed and not self._ends_well_again(runtime, groups, entry, step, error, armed, first):
            return
        self.result.steps += 1
        self._check_idle(runtime, "after a step")
        # Every rank knows all prompts and all outcomes: all of them come to the same decision.
        altered = not failed and any(outcome.altered for outcome in first)
        longest = max(len(group.prompt) for given in everyone for group in given)
        if compared or (altered and self.options.parity_rate > 0 and longest <= self.options.parity_tokens):
            compare_with_autograd(self.inner, everyone, entry, step, self.result)
        elif altered:
            self._compare_repeat(runtime, groups, entry, step)
        self._update()

    def _ends_well_again(
        self,
        runtime: Runtime,
        groups: list[Group],
        entry: Gradients,
        step: int,
        error: BaseException | None,
        armed: Armed | None,
        first: list[Outcome],
    ) -> bool:
        """Run a step that failed again without a fault, and judge how it failed."""
        if error is not None:
            if isinstance(error, RankFailedError):
                self.result.failed_elsewhere += 1
            else:
                self.result.failed_cleanly[type(error).__name__] += 1
            self._check_undone(runtime, entry, f"after {type(error).__name__}")
        repeated = attempt(runtime, groups, None, self.result)
        again = self.together.gather(Outcome.of(repeated, None))
        wrong = judge(error, armed, first, again)
        if wrong is not None:
            self.result.problems.append(f"step {step}: {wrong}")
        if not any(names(again)):
            return True
        refused = any(outcome.refused for outcome in again)
        if refused and isinstance(repeated, CapacityError | RankFailedError):
            self.result.refused += 1
            self._check_undone(runtime, entry, "after a group that does not fit")
        else:
            self.result.problems.append(f"step {step} failed without a fault: {repeated!r}; all ranks: {names(again)}")
        return False

    def _entry(self, step: int) -> dict[str, Tensor | None]:
        """Gradients that are there before the step, as after an earlier backward: the same on every rank, or none."""
        self.inner.zero_grad(set_to_none=True)
        if self.shared.random() < 0.5:
            generator = torch.Generator().manual_seed(step)
            for parameter in self.inner.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 1e-2
                parameter.grad = noise.to(parameter)
        return clone_gradients(self.inner)

    # Checks

    def _check_idle(self, runtime: Runtime, when: str) -> None:
        self.result.problems += still_held(runtime, when)

    def _check_undone(self, runtime: Runtime, entry: Gradients, when: str) -> None:
        self.result.problems += still_held(runtime, when) + touched(self.inner, entry, when)

    def _compare_repeat(self, runtime: Runtime, groups: list[Group], entry: Gradients, step: int) -> None:
        """A step with altered bytes that plain autograd cannot judge: against the same step without the fault."""
        doubtful = clone_gradients(self.inner)
        restore(self.inner, entry)
        error = attempt(runtime, groups, None, self.result)
        outcomes = self.together.gather(Outcome.of(error, None))
        if any(names(outcomes)):
            self.result.problems.append(
                f"step {step} ended well with altered bytes, and without them failed: {error!r}; all ranks: "
                f"{names(outcomes)}"
            )
            return
        self._check_idle(runtime, "after a repeat")
        self.result.repeated += 1
        where = f"step {step}, in which bytes were altered unseen"
        compare(doubtful, clone_gradients(self.inner), where, self.result)

    def _check_enough(self) -> None:
        """A run that did next to nothing has not passed."""
        steps, refused = self.result.steps, self.result.refused
        if refused > steps:
            given = (
                "raise --budgets"
                if self.options.budgets
                else "set --budgets to more than was cut for the largest group"
            )
            self.result.problems.append(
                f"{refused} steps did not fit the budgets, and {steps} ended well: {given}, or use shorter prompts or "
                "fewer layers, so that most steps fit"
            )
        elif steps == 0:
            self.result.problems.append(
                "no step ended well in the time that there was: give it more, or shorter prompts"
            )

    def _check_growth(self) -> None:
        """No runtime is open: what is held is the model, gradients aside, and what has leaked."""
        self.inner.zero_grad(set_to_none=True)
        self.eras.append(Held.now(self.device))
        self.result.held(self.eras[min(len(self.eras), WARM_ERAS) - 1], self.eras[-1])
        self.result.problems += grown(self.eras)

    def _check_scratch(self) -> None:
        self.together.gather(None)  # nobody's tier is open any more
        mine = [left for left in leftovers(Path(self.options.scratch)) if f"-{psutil.Process().pid}-" in left.path.name]
        if mine:
            self.result.problems.append(f"left on disk: {', '.join(str(left.path) for left in mine)}")

    def _update(self) -> None:
        """A small step, so that weights are new each time; gradients are the same on every rank."""
        with torch.no_grad():
            for parameter in self.inner.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad / (1 + parameter.grad.norm())
