"""The tiers of a configuration, made as a run would make them, and given back."""

from __future__ import annotations

import torch

from longstraw.config import Config
from longstraw.doctor.finding import Finding, good
from longstraw.runtime.tiers import build_store


def examine_tiers(config: Config) -> list[Finding]:
    """What each tier is on this machine: its budget in bytes, how it copies, its engine and why that one.

    Raises ConfigError for what a run would refuse.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    store = build_store(config, device)
    try:
        return [good("tiers", pager.describe()) for pager in store.pagers]
    finally:
        for pager in store.pagers:
            pager.close()
