"""What a stress run is asked to do."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from longstraw.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StressOptions:
    """Lengths are in tokens, budgets in bytes.

    Attributes:
        seconds: how long to go on; the step that is running then is finished.
        steps: the most steps, or None for as many as there is time for.
        seed: of the model, the groups, the settings and the faults.
        prompt_tokens, response_tokens, group: the most of each that a group has.
        layers, hidden_size: the random model's.
        budgets: of the device, host and nvme tier, or None to cut what the largest group needs into three.
        scratch: folder of the nvme tier.
        fault_rate: share of the steps that a fault is put into.
        parity_rate: share of the steps whose gradients are compared with plain autograd.
        parity_tokens: the most prompt tokens of a step that is compared: plain autograd keeps its whole graph.
        dtype: of the model and its pages, or None for float64 on a CPU and float32 on a GPU, where a wrong term in a
            gradient stands far above rounding. bfloat16 goes through the fused kernels of a real run, and shows less.
    """

    seconds: float = 60.0
    steps: int | None = None
    seed: int = 0
    prompt_tokens: int = 192
    response_tokens: int = 24
    group: int = 4
    layers: int = 3
    hidden_size: int = 32
    budgets: tuple[int, int, int] | None = None
    scratch: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    fault_rate: float = 0.4
    parity_rate: float = 0.3
    parity_tokens: int = 4096
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("prompt_tokens", 16), ("response_tokens", 2), ("group", 1), ("layers", 2), ("hidden_size", 16),
            ("parity_tokens", 16),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} is too small; use {least} or more")
        if self.hidden_size % 16:
            raise ConfigError(f"--hidden-size {self.hidden_size}: use a multiple of 16")
        if not self.seconds > 0:
            raise ConfigError(f"--seconds {self.seconds}: use a time above 0")
        for name in ("fault_rate", "parity_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: use a share from 0 to 1")
        if not self.scratch.is_dir():
            raise ConfigError(f"--scratch {self.scratch} is no directory; create it, or name one that exists")
