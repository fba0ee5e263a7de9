"""Byte counts as people write them: "64GiB", "512 MiB", "1.5TB", "0", 4096."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_BY_LOWER = {name.lower(): factor for name, factor in _UNITS.items()}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: object) -> int:
    """Whole bytes from an int or a string with a binary (KiB) or decimal (kB) unit.

    Units are read without regard to case. Raises ValueError for a negative size, another type, an unknown
    unit, or a size that is no whole number of bytes.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f'expected a size such as "64GiB", "512MB" or a number of bytes, got {value!r}')
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"a size cannot be negative, got {value}")
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f'expected a size such as "64GiB", "512MB" or "0", got {value!r}')
    number, unit = match.groups()
    factor = _BY_LOWER.get(unit.lower())
    if factor is None:
        units = ", ".join(name for name in _UNITS if name)
        raise ValueError(f"unknown unit {unit!r} in {value!r}; use one of {units}")
    # Fraction, since float would lose single bytes of a large tier.
    total = Fraction(number) * factor
    if total.denominator != 1:
        raise ValueError(f"{value!r} is no whole number of bytes")
    return int(total)


def format_bytes(count: int) -> str:
    """The shortest exact text that `parse_bytes` reads back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]}{unit}"
    return str(count)


def approximate_bytes(count: float) -> str:
    """Three or four digits in binary units, for tables: 1.42 GiB, 1002 MiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= _UNITS[unit]:
            scaled = count / _UNITS[unit]
            return f"{scaled:.0f} {unit}" if abs(scaled) >= 100 else f"{scaled:.3g} {unit}"
    return f"{count:.0f} B"
