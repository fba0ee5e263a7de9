"""What can be asked of the demo, and the small tiers that it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw.config import Config
from longstraw.errors import ConfigError

_LEAST = {"steps": 1, "prompt_tokens": 128, "group": 2, "response_tokens": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """Lengths are in tokens.

    Attributes:
        steps: optimizer steps, each on a group sampled anew from the one prompt, so that rewards compare.
        prompt_tokens: length of the prompt.
        group: responses in each step.
        response_tokens: the most that a response may have.
        temperature: of sampling and of the log-probs.
        learning_rate: AdamW's.
        seed: of the text, the fact in it, and sampling.
        device_tier, host_tier: budgets; small, so that pages overflow to the disk.
    """

    steps: int = 4
    prompt_tokens: int = 1024
    group: int = 6
    response_tokens: int = 20
    temperature: float = 1.0
    learning_rate: float = 2e-5
    seed: int = 0
    device_tier: str = "16MiB"
    host_tier: str = "32MiB"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} {getattr(self, name)} is too small; use at least {least}")

    def config(self, scratch: Path) -> Config:
        """The runtime's settings: three tiers, the last a file under `scratch`."""
        tiers: list[dict[str, Any]] = [
            {"kind": "device", "budget": self.device_tier},
            {"kind": "host", "budget": self.host_tier},
            {"kind": "nvme", "path": scratch, "budget": "64GiB"},
        ]
        return Config.load(
            capture={"chunk_tokens": 256},
            pages={"tokens": 128, "block_tokens": 512},
            replay={"temperature": self.temperature},
            tiers=tiers,
        )
