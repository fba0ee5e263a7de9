"""Reads token counts as people write them: 4096, 4k, 1M."""

from __future__ import annotations

import re

from longstraw.errors import ConfigError

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmM]?)")
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}


def parse_count(option: str, text: str) -> int:
    """A whole number of tokens; k is 1,024 and M is 1,048,576. Raises ConfigError that names `option`."""
    match = _COUNT.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if match is None:
        raise ConfigError(f"{option} {text}: expected a number of tokens such as 4096, 4k or 1M")
    number = float(match[1]) * _FACTORS[match[2].lower()]
    if number != int(number):
        raise ConfigError(f"{option} {text}: {number} is no whole number of tokens")
    return int(number)
