"""The configured tiers, made: budgets that are `auto` resolved to bytes, one pager each."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from longstraw.config import AUTO, Config, DeviceTier, HostTier, NvmeTier, Tier
from longstraw.errors import ConfigError
from longstraw.pagers import debug
from longstraw.pagers.debug import DelayedPager
from longstraw.pagers.device import DevicePager
from longstraw.pagers.engines import EngineSettings
from longstraw.pagers.host import HostPager
from longstraw.pagers.installed import hot_add
from longstraw.pagers.limits import machine_bytes, total_host_bytes
from longstraw.pagers.numa import choose_node
from longstraw.pagers.nvme import NvmePager
from longstraw.pagers.protocol import Pager
from longstraw.resident.placement import format_bytes
from longstraw.resident.store import PageStore
from longstraw.runtime.memory import free_device_bytes, free_host_bytes

TIER_SHARE = {"device": 0.4, "host": 0.7, "nvme": 0.8}
"""What `budget: auto` takes of the bytes that are free when the runtime is made."""


def build_store(config: Config, device: torch.device) -> PageStore:
    """One pager for each of `config.tiers`, in a store.

    Raises ConfigError for a path that cannot hold a tier, or a budget that can never be had, with the key.
    """
    pagers: list[Pager] = []
    for index, tier in enumerate(config.tiers):
        if isinstance(tier, NvmeTier) and not tier.path.is_dir():
            raise ConfigError(f"tiers[{index}].path: {tier.path} is no directory; create it, or name one that exists")
        budget = resolve_budget(tier, config.tiers[index + 1 :], device)
        _check_possible(tier, index, budget, device)
        if isinstance(tier, NvmeTier):
            # Several disks may be given: their tiers are told apart by number.
            name = "nvme" if sum(pager.kind == "nvme" for pager in pagers) == 0 else f"nvme{index}"
            pagers.append(_nvme(tier, index, budget, device, name))
        elif isinstance(tier, HostTier):
            pagers.append(_host(tier, index, budget, device))
        else:
            pagers.append(DevicePager(budget, device))
    if debug.enabled():
        return PageStore([DelayedPager(pager) for pager in pagers], page_rows=config.pages.tokens, poison=debug.poison)
    return PageStore(pagers, page_rows=config.pages.tokens)


def _nvme(tier: NvmeTier, index: int, budget: int, device: torch.device, name: str) -> Pager:
    settings = EngineSettings(threads=tier.threads, block=tier.block, queue_depth=tier.queue_depth)
    with _named(index):
        return NvmePager(
            tier.path, budget, device, checksum=tier.checksum, name=name, engine=tier.engine, settings=settings
        )


def _host(tier: HostTier, index: int, budget: int, device: torch.device) -> Pager:
    if tier.pinned is True and device.type != "cuda":
        raise ConfigError(
            f"tiers[{index}].pinned: true, but the device is {device}, where host pages are used in place and never "
            "copied; set it to auto"
        )
    with _named(index):
        return HostPager(budget, device, pinned=tier.pinned is not False, numa=choose_node(tier.numa, device))


@contextmanager
def _named(index: int) -> Iterator[None]:
    """Errors raised within name the tier by its place: a pager does not know it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("tiers[i]", f"tiers[{index}]")) from error


def _check_possible(tier: Tier, index: int, budget: int, device: torch.device) -> None:
    """Raise ConfigError for a budget above what there is when everything is free. What is not free now is told when
    pages are reserved, which may be later. Of memory that may still be added nobody knows how much it can be: then it
    is a RuntimeWarning."""
    if isinstance(tier, NvmeTier):
        most, what = shutil.disk_usage(tier.path).total, f"the filesystem of {tier.path}"
    elif isinstance(tier, HostTier) or device.type != "cuda":
        most, what = total_host_bytes(), "this machine, or its container's limit,"
    else:
        most, what = torch.cuda.get_device_properties(device).total_memory, f"{device}"
    if budget <= most:
        return
    hosts = isinstance(tier, HostTier) or (isinstance(tier, DeviceTier) and device.type != "cuda")
    source = hot_add() if hosts and most == machine_bytes() else None
    if source is None:
        raise ConfigError(
            f"tiers[{index}].budget: {format_bytes(budget)} can never be had: {what} has {format_bytes(most)} in all; "
            "lower it, or write auto"
        )
    warnings.warn(
        f"tiers[{index}].budget: {format_bytes(budget)} is more than the {format_bytes(most)} that this machine has; "
        f"{source} may add to it while it runs. A prompt that needs more than there is then is refused",
        RuntimeWarning,
        stacklevel=3,
    )


def resolve_budget(tier: Tier, slower: tuple[Tier, ...], device: torch.device) -> int:
    """The tier's budget in bytes.

    `auto` gives the device tier nothing where a slower tier can hold the pages, so that device memory does not grow
    with the prompt, and else 40% of what is free; the host tier 70% of free memory (the container's limit counts),
    the nvme tier 80% of the free disk.
    """
    if tier.budget != AUTO:
        return tier.budget
    if isinstance(tier, NvmeTier):
        return int(shutil.disk_usage(tier.path).free * TIER_SHARE["nvme"])
    if tier.kind == "host":
        return int(free_host_bytes() * TIER_SHARE["host"])
    return 0 if slower else int(free_device_bytes(device) * TIER_SHARE["device"])
