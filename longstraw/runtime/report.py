"""What a transaction did: seconds by phase, bytes by tier, peaks, retries and drift."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from longstraw.collectives import Tally
from longstraw.config.sizes import approximate_bytes
from longstraw.pagers.stalls import Stall
from longstraw.pagers.trace import Tracer, Track
from longstraw.runtime.passes import PassTraffic


@dataclass(kw_only=True)
class Report:
    """Figures of one transaction; complete when it is closed.

    Attributes:
        gradient: "exact" or "detached". A detached gradient leaves out what flows through the prompt: an approximation.
        prompt_tokens, response_tokens, branches: what was replayed.
        left_out: branches that were given to `replay` and not replayed, for its loop was left early.
        chunks, chunk_tokens, lanes, lane_tokens: how it was cut.
        kept_output_layers: layers whose attention outputs over the prompt were kept for the sweep.
        checkpoint_replay, checkpoint_sweep: whether activations were recomputed.
        seconds: wall time by phase: capture, score, count (how responses are routed), replay (lane
            forwards), backward, sweep, finalize.
        stall_seconds: time that compute waited for pages, by phase: the CUDA stream's own time, or the CPU's.
        stall_seconds_by_tier: the same, by the slowest tier that the pages came from.
        bytes_read, bytes_written: moved between tiers and compute, by tier; rows used in place are not counted.
        tier_bytes: pages reserved on each tier.
        passes: for each pass its phase, the second at which it was over, the peak of device memory since the pass
            before, and the bytes read and written by tier.
        peak_device_bytes: the most that torch had allocated on a CUDA device since the transaction began; 0 on a CPU.
        retries: lanes or sweeps that ran out of memory and were run again narrower.
        stale_steps: optimizer steps between capture and the last use of the state.
        sharding, reduce: the framework that holds the model, and when it averages gradients: "deferred" or "each_pass".
        gradient_bytes: of gradient that this rank holds until the step ends.
        collectives, collective_bytes: that carried weights and gradients, by kind; of whole tensors. What a step
            reduces as `accumulate()` ends is in the report of its last transaction, and only then.
        weights_to_device, gradients_to_host: bytes that crossed the host's link for offloaded parameters, beside those
            of pages.
        empty_passes: made for other ranks while this transaction was open.
        rank_wait_seconds: spent in agreements with other ranks, most of it waiting for the slowest.
        aux_loss: the routers' auxiliary loss of the group that was replayed last, as transformers computes it on one
            batch of the group's rows; None where `config.output_router_logits` is not set.
        aux_loss_scale: the gradient that the user's loss gave it: the coefficient. 0 if the loss left it out.
        aux_loss_prompt_weight: how often each prompt token counts in it: once a branch. In detached mode the prompt's
            share of the value is there, and of the gradient is not.
        drift_mean, drift_max: |change| of the replayed log-probs against the scored ones; None if nothing was scored.
    """

    gradient: str = "exact"
    prompt_tokens: int = 0
    response_tokens: int = 0
    branches: int = 0
    left_out: int = 0
    chunks: int = 0
    chunk_tokens: int = 0
    lanes: int = 0
    lane_tokens: int = 0
    kept_output_layers: int = 0
    checkpoint_replay: bool = False
    checkpoint_sweep: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    stall_seconds: dict[str, float] = field(default_factory=dict)
    stall_seconds_by_tier: dict[str, float] = field(default_factory=dict)
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    tier_bytes: dict[str, int] = field(default_factory=dict)
    passes: list[dict[str, Any]] = field(default_factory=list)
    peak_device_bytes: int = 0
    retries: int = 0
    stale_steps: int = 0
    sharding: str = ""
    reduce: str = ""
    gradient_bytes: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    collective_bytes: dict[str, int] = field(default_factory=dict)
    weights_to_device: int = 0
    gradients_to_host: int = 0
    empty_passes: int = 0
    rank_wait_seconds: float = 0.0
    aux_loss: float | None = None
    aux_loss_scale: float = 0.0
    aux_loss_prompt_weight: int = 0
    drift_mean: float | None = None
    drift_max: float | None = None

    def __post_init__(self) -> None:
        self._began = time.perf_counter()
        self._stalls: deque[tuple[str, Stall]] = deque()
        self._tracer: Tracer | None = None
        self._lap: Callable[[], int] = lambda: 0

    def __getstate__(self) -> dict[str, Any]:
        # Figures travel to other processes; what still watches this one does not.
        return self.to_dict()

    def __setstate__(self, figures: dict[str, Any]) -> None:
        self.__dict__.update(figures)
        self.__post_init__()

    def watch(self, tracer: Tracer | None, lap: Callable[[], int]) -> None:
        """Tell `tracer` of phases, and take each pass's peak of device memory from `lap`."""
        self._tracer, self._lap = tracer, lap

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        """Add the wall time of the block to `seconds[name]`; CUDA work is waited for."""
        _synchronize(device)
        start = time.perf_counter()
        span = None if self._tracer is None else self._tracer.begin(Track.PHASE, name)
        try:
            yield
        finally:
            _synchronize(device)
            if span is not None:
                span.end()
            self._count_stalls()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def add_traffic(self, phase: str, traffic: PassTraffic) -> None:
        """Count what a pass moved."""
        for total, part in ((self.bytes_read, traffic.read), (self.bytes_written, traffic.written)):
            for tier, count in part.items():
                total[tier] = total.get(tier, 0) + count
        self._stalls.extend((phase, stall) for stall in traffic.stalls)
        self._count_stalls()
        at = time.perf_counter() - self._began
        moved = {"read": dict(traffic.read), "written": dict(traffic.written)}
        self.passes.append({"phase": phase, "seconds": at, "peak_device_bytes": self._lap(), **moved})

    def count_collectives(self, tally: Tally) -> None:
        """Take over what the ranks sent one another."""
        self.collectives, self.collective_bytes = dict(tally.counts), dict(tally.bytes)
        self.weights_to_device, self.gradients_to_host = tally.weights_to_device, tally.gradients_to_host

    def _count_stalls(self) -> None:
        """Add the waits whose length is known by now. Never waits itself."""
        while self._stalls and self._stalls[0][1].known():
            phase, stall = self._stalls.popleft()
            seconds = stall.seconds()
            for total, key in ((self.stall_seconds, phase), (self.stall_seconds_by_tier, stall.tier)):
                total[key] = total.get(key, 0.0) + seconds

    def save(self, path: str | Path) -> None:
        """Write the figures as JSON, for `longstraw report`."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        pages = ", ".join(f"{tier} {approximate_bytes(count)}" for tier, count in self.tier_bytes.items())
        lines = [
            f"{self.gradient} gradient: {self.prompt_tokens} prompt tokens in {self.chunks} chunk(s), "
            f"{self.branches} branches of {self.response_tokens} tokens in {self.lanes} lane(s)",
            f"time: {phases or 'none'}",
            f"pages: {pages or 'none'}",
        ]
        if self.peak_device_bytes:
            lines.append(f"peak device memory: {approximate_bytes(self.peak_device_bytes)}")
        if self.left_out:
            lines.append(
                f"left out of the gradient: {self.left_out} more branch(es), as the loop over replay ended before them"
            )
        if self.collectives:
            sent = (
                f"{n} {kind} of {approximate_bytes(self.collective_bytes[kind])}"
                for kind, n in self.collectives.items()
            )
            lines.append(f"between ranks ({self.sharding}, {self.reduce}): {', '.join(sent)}")
        if self.weights_to_device or self.gradients_to_host:
            lines.append(
                f"over the host's link beside pages: weights {approximate_bytes(self.weights_to_device)}, gradients "
                f"{approximate_bytes(self.gradients_to_host)}"
            )
        if self.retries:
            lines.append(f"run again narrower after running out of memory: {self.retries} time(s)")
        if self.stale_steps:
            lines.append(f"state used {self.stale_steps} optimizer step(s) after its capture")
        if self.aux_loss is not None:
            lines.append(aux_loss_line(self.to_dict()))
        if self.drift_mean is not None:
            lines.append(f"log-probs against the scored ones: mean {self.drift_mean:.2g}, largest {self.drift_max:.2g}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def aux_loss_line(figures: Mapping[str, Any]) -> str:
    """What a report's figures say of the routers' auxiliary loss, in one line."""
    line = (
        f"routers' auxiliary loss: {figures['aux_loss']:.6g} with coefficient {figures['aux_loss_scale']:.3g}, each "
        f"prompt token counted {figures['aux_loss_prompt_weight']} time(s)"
    )
    if figures["aux_loss_scale"] == 0.0:
        return f"{line}; no loss asked for its gradient (add a multiple of lane.aux_loss)"
    if figures["gradient"] == "detached":
        return f"{line}; no gradient through the prompt's share"
    return line


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DriftMeter:
    """Compares replayed log-probs with those scored before, branch by branch, without waiting for the device."""

    def __init__(self) -> None:
        self._scored: dict[bytes, torch.Tensor] = {}
        self._sums: list[torch.Tensor] = []
        self._tops: list[torch.Tensor] = []
        self._tokens = 0

    def scored(self, response: torch.Tensor, logprobs: torch.Tensor) -> None:
        self._scored[_key(response)] = logprobs

    def replayed(self, response: torch.Tensor, logprobs: torch.Tensor) -> None:
        before = self._scored.get(_key(response))
        if before is not None:
            change = (logprobs.detach() - before).abs()
            self._sums.append(change.sum())
            self._tops.append(change.max())
            self._tokens += change.numel()

    def result(self) -> tuple[float, float] | None:
        """Mean and largest change in nats, or None if no scored branch was replayed."""
        if not self._tokens:
            return None
        return float(torch.stack(self._sums).sum()) / self._tokens, float(torch.stack(self._tops).max())


def _key(response: torch.Tensor) -> bytes:
    return response.cpu().numpy().tobytes()
