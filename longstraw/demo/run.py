"""The demo's loop: sample a group, reward it, replay it through a transaction, step the optimizer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from longstraw import Runtime
from longstraw.demo.model import DemoModel, load_demo_model
from longstraw.demo.options import DemoOptions
from longstraw.demo.ordinary import ordinary_step
from longstraw.demo.peak import PeakMemory
from longstraw.demo.results import Comparison, DemoResult, Side, StepResult
from longstraw.demo.reward import reward
from longstraw.demo.sampling import sample_group
from longstraw.demo.text import Task, make_task
from longstraw.objectives import GroupSize, grpo_loss, zscore_advantages
from longstraw.verify.gradients import clone_gradients, compare_gradients


class Watcher(Protocol):
    """Is told how far the demo is."""

    def phase(self, text: str, total: int | None = None) -> AbstractContextManager[Callable[[], None]]: ...

    def step_done(self, number: int, of: int, step: StepResult) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One prompt's responses with what they earned."""

    task: Task
    responses: list[Tensor]
    answers: list[str]
    rewards: list[float]
    advantages: Tensor
    size: GroupSize


def run_demo(
    options: DemoOptions, watcher: Watcher, *, device: torch.device, scratch: Path | None = None
) -> DemoResult:
    """Run it. Pages that overflow go to a file under `scratch`, or under the system's temporary directory.

    Raises LongstrawError if something that the demo needs is missing, and ConfigError if the prompt is too
    short or too long.
    """
    began = time.perf_counter()
    with PeakMemory(device) as loading, watcher.phase("loading SmolLM2-135M-Instruct"):
        demo = load_demo_model(device)
    with tempfile.TemporaryDirectory(prefix="longstraw-demo-", dir=scratch) as folder:
        config = options.config(Path(folder))
        with Runtime(demo.model, config) as runtime:
            trainer = _Trainer(demo, runtime, options, watcher)
            steps = [trainer.step(number) for number in range(1, options.steps + 1)]
    peaks = [loading.peak_bytes, *trainer.peaks]
    return DemoResult(
        device=str(device),
        options=asdict(options),
        config=config.to_dict(),
        steps=steps,
        comparison=trainer.comparison,
        memory_method=loading.method,
        peak_bytes=max(peaks),
        seconds=time.perf_counter() - began,
    )


class _Trainer:
    def __init__(self, demo: DemoModel, runtime: Runtime, options: DemoOptions, watcher: Watcher) -> None:
        self._demo, self._runtime, self._options, self._watcher = demo, runtime, options, watcher
        self._optimizer = torch.optim.AdamW(demo.model.parameters(), lr=options.learning_rate, weight_decay=0.0)
        self._generator = torch.Generator(device=demo.device).manual_seed(options.seed)
        self._task = make_task(demo.tokenizer, options.prompt_tokens, seed=options.seed)
        self.comparison: Comparison | None = None
        self.peaks: list[int] = []

    def step(self, number: int) -> StepResult:
        """One optimizer step; the first whose group has a gradient is also taken the ordinary way."""
        seconds: dict[str, float] = {}
        with self._measured("sampling", seconds):
            group = self._sample(number)
        began = time.perf_counter()
        with (
            PeakMemory(self._demo.device) as peak,
            self._runtime.transaction(group.task.prompt_ids) as transaction,
        ):
            old = transaction.score(group.responses)
            for lane in transaction.replay(group.responses):
                indices = list(lane.indices)
                lane.backward(_loss(group, indices, lane.logprobs, [old[i] for i in indices]))
        side = self._side(began, peak)
        seconds |= transaction.report.seconds
        if self.comparison is None and bool(group.advantages.any()):
            self.comparison = self._compare(number, group, side)
        with self._measured("optimizer", seconds):
            torch.nn.utils.clip_grad_norm_(self._demo.model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
        best = max(range(len(group.rewards)), key=group.rewards.__getitem__)
        step = StepResult(
            rewards=group.rewards,
            answer=group.answers[best],
            code=group.task.code,
            seconds=seconds,
            report=transaction.report.to_dict(),
            start_bytes=side.start_bytes,
            peak_bytes=side.peak_bytes,
        )
        self._watcher.step_done(number, self._options.steps, step)
        return step

    def _sample(self, number: int) -> Group:
        options, demo = self._options, self._demo
        task = self._task
        label = f"step {number} of {options.steps}: sampling {options.group} responses"
        with self._watcher.phase(label, options.response_tokens) as advance:
            responses = sample_group(
                demo.model,
                task.prompt_ids.to(demo.device),
                group=options.group,
                max_tokens=options.response_tokens,
                temperature=options.temperature,
                eos_token_id=demo.tokenizer.eos_token_id,
                generator=self._generator,
                on_token=advance,
            )
        answers = [demo.tokenizer.decode(r, skip_special_tokens=True).strip() for r in responses]
        rewards = [
            reward(
                answer,
                task.code,
                tokens=len(response),
                max_tokens=options.response_tokens,
                ended=int(response[-1]) == demo.tokenizer.eos_token_id,
            )
            for answer, response in zip(answers, responses, strict=True)
        ]
        return Group(
            task=task,
            responses=responses,
            answers=answers,
            rewards=rewards,
            advantages=zscore_advantages(torch.tensor(rewards)),
            size=GroupSize.of(responses, max_tokens=options.response_tokens),
        )

    def _compare(self, number: int, group: Group, longstraw: Side) -> Comparison:
        model = self._demo.model
        ours = clone_gradients(model)
        self._optimizer.zero_grad()

        def loss(logprobs: list[Tensor]) -> Tensor:
            # The weights are those that sampled, so the first ratio is 1.
            return _loss(group, list(range(len(logprobs))), logprobs, [lp.detach() for lp in logprobs])

        with self._watcher.phase("the ordinary step on the same group"):
            began = time.perf_counter()
            with PeakMemory(self._demo.device) as peak:
                ordinary_step(
                    model,
                    group.task.prompt_ids.to(self._demo.device),
                    group.responses,
                    loss,
                    temperature=self._options.temperature,
                )
            ordinary = self._side(began, peak)
        differences = compare_gradients(ours, clone_gradients(model))
        for name, parameter in model.named_parameters():
            parameter.grad = ours[name]
        return Comparison(
            step=number,
            longstraw=longstraw,
            ordinary=ordinary,
            worst_parameter=differences[0].name,
            worst_relative=differences[0].relative,
            parameters=len(differences),
        )

    def _side(self, began: float, peak: PeakMemory) -> Side:
        self.peaks.append(peak.peak_bytes)
        seconds = time.perf_counter() - began
        return Side(seconds=seconds, start_bytes=peak.start_bytes, peak_bytes=peak.peak_bytes)

    @contextmanager
    def _measured(self, name: str, seconds: dict[str, float]) -> Iterator[None]:
        began = time.perf_counter()
        with PeakMemory(self._demo.device) as peak:
            yield
        seconds[name] = time.perf_counter() - began
        self.peaks.append(peak.peak_bytes)


def _loss(group: Group, indices: list[int], logprobs: list[Tensor], old: list[Tensor]) -> Tensor:
    return grpo_loss(logprobs, old, group.advantages[indices], size=group.size).loss
