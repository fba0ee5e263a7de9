"""Rates from a JSON file: what is taken over, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longstraw.errors import ConfigError
from longstraw.planner import Machine


def load(folder: Path, values: Any) -> Machine:
    path = folder / "rates.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return Machine.load(path)


def test_figures_replace_the_defaults(tmp_path: Path) -> None:
    found = load(tmp_path, {"h2d": 1e9, "attention_forward": {"128": 1e12}, "device_bytes": 8e9})
    assert (found.h2d, found.attention_forward, found.device_bytes) == (1e9, {128: 1e12}, 8_000_000_000)
    assert found.d2h == Machine().d2h


def test_the_nearest_head_dim_counts() -> None:
    rates = {64: 1.0, 128: 2.0, 256: 3.0}
    assert [Machine.attention_rate(rates, dim) for dim in (32, 80, 112, 128, 512)] == [1.0, 1.0, 2.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("no json", "no JSON that can be read"),
        ([1], "expected a JSON object"),
        ({"h2dd": 1}, "unknown rate 'h2dd'; did you mean 'h2d'"),
        ({"h2d": 0}, "h2d: expected a number above 0, got 0"),
        ({"h2d": True}, "h2d: expected a number above 0"),
        ({"attention_forward": 5}, "rates by head dim"),
        ({"attention_forward": {"128": -1}}, "attention_forward.128"),
    ],
)
def test_mistakes(tmp_path: Path, values: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, values)
    assert words in str(caught.value)
