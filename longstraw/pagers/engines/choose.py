"""Makes the engine that `tiers[i].engine` names, or for `auto` the fastest of those that can work here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from longstraw.config import AUTO
from longstraw.errors import CapacityError, ConfigError
from longstraw.pagers.engines import deepspeed
from longstraw.pagers.engines.deepspeed import DeepSpeedEngine
from longstraw.pagers.engines.kvikio import KvikioEngine
from longstraw.pagers.engines.measure import measure
from longstraw.pagers.engines.posix import PosixEngine
from longstraw.pagers.engines.protocol import DiskEngine, EngineSettings
from longstraw.pagers.engines.record import recorded_rates
from longstraw.pagers.spool import SpoolFile

EngineName = Literal["auto", "posix", "deepspeed", "kvikio"]
PROBE_SECONDS = 0.15
PROBE_BYTES = 64 << 20
_WORTH = 1.1
"""What another engine has to be faster by to be taken instead of posix, which checks every call by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """An engine, and why it is this one."""

    engine: DiskEngine
    why: str


def choose_engine(
    wish: EngineName, file: SpoolFile, settings: EngineSettings, device: torch.device, *, checksum: bool
) -> Chosen:
    """The engine for a file.

    `auto` takes posix unless another is a tenth faster, by the record of `longstraw probe` for this disk or, without
    one, by a probe of a third of a second each; it looks only at those that can work without compiling anything.

    Raises ConfigError if the one that is named cannot work here, with the reason, and CapacityError if it cannot have
    its buffers.
    """
    # The configuration refuses what would leave this False.
    assert checksum or wish != "deepspeed", "deepspeed's failed writes would pass unseen"
    if wish == AUTO:
        return _fastest(file, settings, device, checksum)
    return Chosen(engine=make_engine(wish, file, settings, device), why="as asked")


def make_engine(wish: EngineName, file: SpoolFile, settings: EngineSettings, device: torch.device) -> DiskEngine:
    """The engine of that name. Raises ConfigError if it cannot work here."""
    if wish == "deepspeed":
        return DeepSpeedEngine(file, settings, device)
    if wish == "kvikio":
        return KvikioEngine(file, settings, device)
    return PosixEngine(file, device)


def engines_here(
    file: SpoolFile, settings: EngineSettings, device: torch.device, *, checksum: bool = True
) -> tuple[dict[str, DiskEngine], dict[str, str]]:
    """Every engine that works here without compiling, by name, and why the others do not."""
    made: dict[str, DiskEngine] = {"posix": PosixEngine(file, device)}
    refused: dict[str, str] = {}
    others: dict[str, Callable[[], DiskEngine]] = {"kvikio": lambda: KvikioEngine(file, settings, device)}
    if not checksum:
        refused["deepspeed"] = "without checksums its failed writes would pass"
    elif not deepspeed.is_built():
        refused["deepspeed"] = "its async_io is not built; engine: deepspeed builds it"
    else:
        others["deepspeed"] = lambda: DeepSpeedEngine(file, settings, device)
    for name, make in others.items():
        try:
            made[name] = make()
        except (ConfigError, CapacityError) as refusal:
            refused[name] = str(refusal).removeprefix("tiers[i].engine: ")
    return made, refused


def _fastest(file: SpoolFile, settings: EngineSettings, device: torch.device, checksum: bool) -> Chosen:
    made, refused = engines_here(file, settings, device, checksum=checksum)
    without = [f"no {name}: {reason}" for name, reason in refused.items()]
    if len(made) == 1:
        return Chosen(engine=made["posix"], why="; ".join(without))
    rates, source = recorded_rates(file.path), "by the record of `longstraw probe`"
    if rates is None or not made.keys() <= rates.keys():
        file.grow(PROBE_BYTES)
        rates, source = {name: measure(e, settings, PROBE_BYTES, PROBE_SECONDS).worse for name, e in made.items()}, (
            "by a short probe"
        )
    best = _best({name: rates[name] for name in made})
    for name, engine in made.items():
        if name != best:
            engine.close()
    figures = ", ".join(f"{name} {rates[name] / 1e9:.2f} GB/s" for name in made)
    return Chosen(engine=made[best], why="; ".join([f"{source}: {figures}", *without]))


def _best(rates: Mapping[str, float]) -> str:
    best = max(rates, key=rates.__getitem__)
    return best if rates[best] > _WORTH * rates["posix"] else "posix"
