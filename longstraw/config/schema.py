"""Every key of the configuration: its type, its default, and what it may not be together with another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from longstraw.config import source as sources
from longstraw.config.problems import config_error_from
from longstraw.config.sizes import format_bytes, parse_bytes

Auto = Literal["auto"]
AUTO: Auto = "auto"


def _whole_number(value: object, *, least: int, auto: bool) -> object:
    if auto and value == AUTO:
        return value
    # bool is an int to Python, and `tokens: yes` is a mistake.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        choice = "'auto' or " if auto else ""
        raise ValueError(f"expected {choice}a whole number of at least {least}, got {value!r}")
    return value


def _positive_or_auto(value: object) -> object:
    return _whole_number(value, least=1, auto=True)


def _positive(value: object) -> object:
    return _whole_number(value, least=1, auto=False)


def _not_negative(value: object) -> object:
    return _whole_number(value, least=0, auto=False)


def _temperature(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"expected a finite number above 0, got {value!r}")
    return float(value)


def _bool(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")
    return value


def _bool_or_auto(value: object) -> object:
    if value != AUTO and not isinstance(value, bool):
        raise ValueError(f"expected 'auto', true or false, got {value!r}")
    return value


def _file_or_null(value: object) -> object:
    if value is not None and (not isinstance(value, str | Path) or not str(value)):
        raise ValueError(f"expected a file to write, or null, got {value!r}")
    return value


def _budget(value: object) -> object:
    return value if value == AUTO else parse_bytes(value)


_UNIT = 64 << 10


def _block(value: object) -> object:
    size = parse_bytes(value)
    if size < _UNIT or size % _UNIT:
        raise ValueError(f"{value!r} is no multiple of 64KiB, the bytes under one checksum; use such as 4MiB")
    return size


def _node(value: object) -> object:
    # YAML 1.1 reads a bare `off` as false.
    if value is False:
        return "off"
    if value in (AUTO, "off"):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected 'auto', 'off' or the number of a NUMA node, got {value!r}")
    return value


PositiveOrAuto = Annotated[int | Auto, BeforeValidator(_positive_or_auto)]
Positive = Annotated[int, BeforeValidator(_positive)]
NotNegative = Annotated[int, BeforeValidator(_not_negative)]
TracePath = Annotated[Path | None, BeforeValidator(_file_or_null)]
Flag = Annotated[bool, BeforeValidator(_bool)]
FlagOrAuto = Annotated[bool | Auto, BeforeValidator(_bool_or_auto)]
Budget = Annotated[int | Auto, BeforeValidator(_budget)]
Block = Annotated[int, BeforeValidator(_block)]
Node = Annotated[int | Literal["auto", "off"], BeforeValidator(_node)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class GradientConfig(_Section):
    """What becomes of the gradient that reaches the prompt's state."""

    prompt: Literal["exact", "detached"] = "exact"
    accumulate: Literal["float32", "model"] = "float32"
    reduce: Literal["deferred", "each_pass"] = "deferred"


class CaptureConfig(_Section):
    """How the prompt is cut for its forward passes."""

    chunk_tokens: PositiveOrAuto = AUTO
    keep_attention: Literal["auto", "always", "never"] = AUTO


class ReplayConfig(_Section):
    """How responses are replayed with autograd, and how their log-probs are computed."""

    lane_tokens: PositiveOrAuto = AUTO
    checkpoint: FlagOrAuto = AUTO
    logit_block_tokens: Positive = 1024
    temperature: Annotated[float, BeforeValidator(_temperature)] = 1.0
    entropy: Flag = False


class PagesConfig(_Section):
    """How prompt state is cut into pages and streamed."""

    tokens: Positive = 1024
    block_tokens: PositiveOrAuto = AUTO
    lookahead: Positive = 2

    @field_validator("block_tokens")
    @classmethod
    def _whole_pages(cls, value: int | Auto, info: ValidationInfo) -> int | Auto:
        page = info.data.get("tokens")
        if page is not None and value != AUTO and value % page:
            nearest = max(page, round(value / page) * page)
            raise ValueError(f"{value} is no multiple of pages.tokens ({page}); use {nearest}")
        return value


class KernelsConfig(_Section):
    """Which implementation computes what has several."""

    gated_delta: Literal["auto", "fla", "torch"] = AUTO


class DeviceTier(_Section):
    """Memory of the device that computes."""

    kind: Literal["device"] = "device"
    budget: Budget = AUTO


class HostTier(_Section):
    """Host memory: pinned where the device is a GPU, unless the user wants it pageable."""

    kind: Literal["host"] = "host"
    budget: Budget = AUTO
    pinned: FlagOrAuto = AUTO
    numa: Node = AUTO


class NvmeTier(_Section):
    """A private file under a directory that exists."""

    kind: Literal["nvme"] = "nvme"
    path: Path
    budget: Budget = AUTO
    engine: Literal["auto", "posix", "deepspeed", "kvikio"] = AUTO
    checksum: Flag = True
    threads: Positive = 4
    block: Block = 4 << 20
    queue_depth: PositiveOrAuto = AUTO

    @field_validator("checksum")
    @classmethod
    def _checked(cls, value: bool, info: ValidationInfo) -> bool:
        if not value and info.data.get("engine") == "deepspeed":
            raise ValueError(
                "false would leave failed writes unseen: engine deepspeed does not look at what its requests return; "
                "set it to true, or engine to posix"
            )
        return value

    @field_validator("queue_depth")
    @classmethod
    def _has_queue(cls, value: int | Auto, info: ValidationInfo) -> int | Auto:
        engine = info.data.get("engine")
        if value != AUTO and engine in (AUTO, "posix"):
            raise ValueError(
                f"{value} is for an engine with a queue, and engine is {engine}: posix has one request a thread; raise "
                "threads, or set engine to deepspeed or kvikio"
            )
        return value


Tier = Annotated[DeviceTier | HostTier | NvmeTier, Field(discriminator="kind")]
_SPEED = {"device": 0, "host": 1, "nvme": 2}


class Config(_Section):
    """All settings of a `Runtime`. Frozen; build it with `Config.load`, or with keyword arguments.

    Raises `ConfigError`, which lists every problem at once: the key's path, its value, and the fix.
    """

    gradient: GradientConfig = GradientConfig()
    capture: CaptureConfig = CaptureConfig()
    replay: ReplayConfig = ReplayConfig()
    pages: PagesConfig = PagesConfig()
    kernels: KernelsConfig = KernelsConfig()
    tiers: tuple[Tier, ...] = (DeviceTier(), HostTier())
    staleness: NotNegative = 0
    trace: TracePath = None

    def __init__(self, **settings: Any) -> None:
        with config_error_from(type(self), settings):
            super().__init__(**settings)

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Config | None = None, **overrides: Any) -> Self:
        """Settings from `source`, with `overrides` on top.

        `source` is the path of a YAML file, a mapping with the same keys, another `Config`, or None for the
        defaults. An override is a top-level key; a mapping is merged into its section key by key, and
        anything else (`tiers` too) replaces what was there. Raises `ConfigError`.
        """
        return cls(**sources.merge(sources.read(source), overrides))

    @field_validator("tiers")
    @classmethod
    def _fastest_first(cls, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
        if not tiers:
            raise ValueError("at least one tier is needed; leave the key out for a device and a host tier")
        kinds = [tier.kind for tier in tiers]
        for kind in ("device", "host"):
            if kinds.count(kind) > 1:
                raise ValueError(f"{kinds.count(kind)} {kind} tiers; give one, with the sum of their budgets")
        if kinds != sorted(kinds, key=_SPEED.__getitem__):
            ordered = ", ".join(sorted(kinds, key=_SPEED.__getitem__))
            raise ValueError(f"tiers go from fast to slow, got {', '.join(kinds)}; reorder to {ordered}")
        paths = [tier.path.absolute() for tier in tiers if isinstance(tier, NvmeTier)]
        if len(set(paths)) < len(paths):
            raise ValueError("two nvme tiers share a path; give one, with the sum of their budgets")
        if all(tier.budget == 0 for tier in tiers):
            raise ValueError("every budget is 0, so no page fits anywhere; raise one, or write auto")
        return tiers

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as YAML or JSON can hold them; `Config.load` reads them back to an equal Config."""
        settings = self.model_dump(mode="json")
        for tier in settings["tiers"]:
            for key in ("budget", "block"):
                if tier.get(key, AUTO) != AUTO:
                    tier[key] = format_bytes(tier[key])
        return settings

    def describe(self) -> str:
        """YAML text with every key, defaults included, that `Config.load` would read back."""
        return sources.to_yaml(self.to_dict())
