"""Reads --device and --dtype."""

from __future__ import annotations

import torch

from longstraw.errors import ConfigError

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parse_device(name: str) -> torch.device:
    """A device that is present. Raises ConfigError."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: use cpu or cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"--device {name}: torch sees {count} CUDA devices here; use --device cpu")
    # With its number, which torch.cuda.set_device wants.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def parse_dtype(name: str) -> torch.dtype:
    """Raises ConfigError for anything but a floating dtype that models come in."""
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name}: use one of {', '.join(DTYPES)}")
    return DTYPES[name]
