"""What a transaction did: seconds by phase, bytes by tier, peaks, retries and drift."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from longstraw.runtime.passes import PassTraffic


@dataclass(kw_only=True)
class Report:
    """Figures of one transaction; complete when it is closed.

    Attributes:
        gradient: "exact" or "detached". A detached gradient leaves out what flows through the prompt: an approximation.
        prompt_tokens, response_tokens, branches: what was replayed.
        chunks, chunk_tokens, lanes, lane_tokens: how it was cut.
        kept_output_layers: layers whose attention outputs over the prompt were kept for the sweep.
        checkpoint_replay, checkpoint_sweep: whether activations were recomputed.
        seconds: wall time by phase: capture, score, replay (lane forwards), backward, sweep, finalize.
        stall_seconds: time that compute waited for pages, by phase.
        bytes_read, bytes_written: moved between tiers and compute, by tier; rows used in place are not counted.
        tier_bytes: pages reserved on each tier.
        peak_device_bytes: the most that torch had allocated on a CUDA device since the transaction began; 0 on a CPU.
        retries: lanes or sweeps that ran out of memory and were run again narrower.
        stale_steps: optimizer steps between capture and the last use of the state.
        drift_mean, drift_max: |change| of the replayed log-probs against the scored ones; None if nothing was scored.
    """

    gradient: str = "exact"
    prompt_tokens: int = 0
    response_tokens: int = 0
    branches: int = 0
    chunks: int = 0
    chunk_tokens: int = 0
    lanes: int = 0
    lane_tokens: int = 0
    kept_output_layers: int = 0
    checkpoint_replay: bool = False
    checkpoint_sweep: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    stall_seconds: dict[str, float] = field(default_factory=dict)
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    tier_bytes: dict[str, int] = field(default_factory=dict)
    peak_device_bytes: int = 0
    retries: int = 0
    stale_steps: int = 0
    drift_mean: float | None = None
    drift_max: float | None = None

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        """Add the wall time of the block to `seconds[name]`; CUDA work is waited for."""
        _synchronize(device)
        start = time.perf_counter()
        try:
            yield
        finally:
            _synchronize(device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def add_traffic(self, phase: str, traffic: PassTraffic) -> None:
        """Count what a pass moved."""
        for total, part in ((self.bytes_read, traffic.read), (self.bytes_written, traffic.written)):
            for tier, count in part.items():
                total[tier] = total.get(tier, 0) + count
        self.stall_seconds[phase] = self.stall_seconds.get(phase, 0.0) + traffic.stall_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


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
