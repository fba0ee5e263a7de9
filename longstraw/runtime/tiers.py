"""The configured tiers, made: budgets that are `auto` resolved to bytes, one pager each."""

from __future__ import annotations

import shutil

import torch

from longstraw.config import AUTO, Config, NvmeTier, Tier
from longstraw.errors import ConfigError
from longstraw.pagers.device import DevicePager
from longstraw.pagers.host import HostPager
from longstraw.pagers.nvme import NvmePager
from longstraw.pagers.protocol import Pager
from longstraw.resident.store import PageStore
from longstraw.runtime.memory import free_device_bytes, free_host_bytes

_SHARE = {"device": 0.4, "host": 0.7, "nvme": 0.8}
"""What `budget: auto` takes of the bytes that are free when the runtime is made."""


def build_store(config: Config, device: torch.device) -> PageStore:
    """One pager for each of `config.tiers`, in a store.

    Raises ConfigError for a path that cannot hold a tier, with the key.
    """
    pagers: list[Pager] = []
    for index, tier in enumerate(config.tiers):
        if isinstance(tier, NvmeTier) and not tier.path.is_dir():
            raise ConfigError(f"tiers[{index}].path: {tier.path} is no directory; create it, or name one that exists")
        budget = resolve_budget(tier, config.tiers[index + 1 :], device)
        if isinstance(tier, NvmeTier):
            # Several disks may be given: their tiers are told apart by number.
            name = "nvme" if sum(pager.kind == "nvme" for pager in pagers) == 0 else f"nvme{index}"
            pagers.append(NvmePager(tier.path, budget, device, checksum=tier.checksum, name=name))
        elif tier.kind == "host":
            pagers.append(HostPager(budget, device))
        else:
            pagers.append(DevicePager(budget, device))
    return PageStore(pagers, page_rows=config.pages.tokens)


def resolve_budget(tier: Tier, slower: tuple[Tier, ...], device: torch.device) -> int:
    """The tier's budget in bytes.

    `auto` gives the device tier nothing where a slower tier can hold the pages, so that device memory does not grow
    with the prompt, and else 40% of what is free; the host tier 70% of free memory (the container's limit counts),
    the nvme tier 80% of the free disk.
    """
    if tier.budget != AUTO:
        return tier.budget
    if isinstance(tier, NvmeTier):
        return int(shutil.disk_usage(tier.path).free * _SHARE["nvme"])
    if tier.kind == "host":
        return int(free_host_bytes() * _SHARE["host"])
    return 0 if slower else int(free_device_bytes(device) * _SHARE["device"])
