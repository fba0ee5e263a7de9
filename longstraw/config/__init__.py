"""The runtime's settings: one frozen `Config`, from YAML, a mapping or keyword arguments."""

from longstraw.config.schema import (
    AUTO,
    Auto,
    CaptureConfig,
    Config,
    DeviceTier,
    GradientConfig,
    HostTier,
    KernelsConfig,
    NvmeTier,
    PagesConfig,
    ReplayConfig,
    Tier,
)
from longstraw.config.sizes import format_bytes, parse_bytes

__all__ = [
    "AUTO",
    "Auto",
    "CaptureConfig",
    "Config",
    "DeviceTier",
    "GradientConfig",
    "HostTier",
    "KernelsConfig",
    "NvmeTier",
    "PagesConfig",
    "ReplayConfig",
    "Tier",
    "format_bytes",
    "parse_bytes",
]
