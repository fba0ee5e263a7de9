"""Sizes: units, exactness, and what is refused."""

from __future__ import annotations

import pytest

from longstraw.config.sizes import approximate_bytes, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("64GiB", 64 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5TB", 1_500_000_000_000),
        ("100kb", 100_000),
        ("0", 0),
        ("17", 17),
        (" 3 B ", 3),
        (4096, 4096),
        # float(9007199254740993) is one off.
        ("9007199254740993", 9007199254740993),
    ],
)
def test_parse(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("bad", ["", "-1", -1, "GiB", "3 parsecs", "1.3B", "1e9", True, None, 1.5, "0x10"])
def test_parse_refuses(bad: object) -> None:
    with pytest.raises(ValueError, match=r"size|unit|whole number|negative"):
        parse_bytes(bad)


@pytest.mark.parametrize("count", [0, 1, 1023, 2**20, 3 * 2**30, 2**40 + 1])
def test_format_reads_back(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count


def test_approximate() -> None:
    assert approximate_bytes(1536) == "1.5 KiB"
    assert approximate_bytes(1000) == "1000 B"
    assert approximate_bytes(1002 * 2**20) == "1002 MiB"
    assert approximate_bytes(5.094 * 2**30) == "5.09 GiB"
