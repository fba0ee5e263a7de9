"""What a machine does a second, and how much it holds: defaults are figures seen on one H200, a JSON replaces them."""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longstraw.errors import ConfigError

RANKS_ASSUMED = 340e9
"""Bytes a second between GPUs where nobody gave a figure: three quarters of what NVLink 4 carries each way. Assumed,
not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One GPU and its share of a host. Bytes, bytes a second, and floating-point operations a second.

    Attributes:
        name: for people.
        device_bytes: of the GPU's memory.
        context_bytes: of it that CUDA, its libraries and fragments take.
        host_bytes: that the process may take of host memory.
        disk_bytes: that are free on the disk of the nvme tiers.
        matrix: matrix products in half precision.
        attention_forward, attention_backward: the fused attention, by head dim. In between, the nearest one counts.
        attention_queries: the backward of keys whose own gradient nobody wants, by the head dims that it is made for.
        latent_forward, latent_backward: attention of latents, whole or selected, and the index that selects.
        recurrent: recurrences, by the torch rule.
        fused_recurrent: gated delta rules, by flash-linear-attention.
        memory: device memory, both ways together.
        h2d, d2h, both: the link, each way alone, and both ways at once.
        disk_read, disk_write: the disk.
        ranks: what a GPU sends to other GPUs, and receives from them, at the same time, in a large collective.
        pin: locking host memory, once for each arena.
    """

    name: str = "one H200, host PCIe 5 x16"
    device_bytes: int = 150_110_000_000
    context_bytes: int = 1_000_000_000
    host_bytes: int = 128 << 30
    disk_bytes: int = 1 << 40
    matrix: float = 650e12
    attention_forward: dict[int, float] = field(default_factory=lambda: {64: 600e12, 128: 650e12, 256: 660e12})
    attention_backward: dict[int, float] = field(default_factory=lambda: {64: 450e12, 128: 550e12, 256: 400e12})
    attention_queries: dict[int, float] = field(default_factory=lambda: {128: 675e12, 256: 540e12})
    latent_forward: float = 45e12
    latent_backward: float = 150e12
    recurrent: float = 2.5e12
    fused_recurrent: float = 25e12
    memory: float = 3.6e12
    h2d: float = 55e9
    d2h: float = 55e9
    both: float = 89e9
    disk_read: float = 1.6e9
    disk_write: float = 1.6e9
    pin: float = 1.3e9
    ranks: float = RANKS_ASSUMED

    @staticmethod
    def attention_rate(rates: dict[int, float], head_dim: int) -> float:
        """The rate at the nearest head dim."""
        return rates[min(rates, key=lambda known: abs(known - head_dim))]

    @classmethod
    def load(cls, path: Path) -> Machine:
        """The defaults with the figures of a JSON object on top, or with those of a record of `longstraw probe`.

        Raises ConfigError for what is no such object, an unknown key, or a figure that is not above 0.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: no JSON that can be read ({error})") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected a JSON object of rates, got a {type(values).__name__}")
        if "links" in values and "disks" in values:
            values = _probed(values)
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{key: _checked(path, key, value, known) for key, value in values.items()})


def _probed(record: dict[str, Any]) -> dict[str, Any]:
    """The rates in a record of `longstraw probe`: its first GPU alone, and the fastest engine of its first disk."""
    rates: dict[str, Any] = {"name": f"{record['machine']}, probed {record['date']}"}
    alone = [link for link in record["links"] if len(link["devices"]) == 1]
    if alone:
        rates |= {"h2d": alone[0]["to_device"], "d2h": alone[0]["from_device"], "both": alone[0]["both"]}
    disk: dict[str, Any] = next(iter(record["disks"].values()), {"engines": {}})
    engines = list(disk["engines"].values())
    if engines:
        best = max(engines, key=lambda engine: float(min(engine["read"], engine["write"])))
        rates |= {"disk_read": best["read"], "disk_write": best["write"]}
    return rates


def _checked(path: Path, key: str, value: Any, known: set[str]) -> Any:
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        raise ConfigError(f"{path}: unknown rate {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if key == "name":
        return str(value)
    if key in ("attention_forward", "attention_backward", "attention_queries"):
        if not isinstance(value, dict) or not value or not all(str(dim).isdigit() for dim in value):
            raise ConfigError(f'{path}: {key}: expected {{"128": 6.5e14, ...}}, rates by head dim, got {value!r}')
        return {int(dim): _positive(path, f"{key}.{dim}", rate) for dim, rate in value.items()}
    number = _positive(path, key, value)
    return int(number) if key.endswith("_bytes") else number


def _positive(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{path}: {key}: expected a number above 0, got {value!r}")
    return float(value)
