"""Rates from a JSON file: what is taken over, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longstraw.doctor import DiskRates, LinkRates, ProbeResult
from longstraw.errors import ConfigError
from longstraw.pagers.engines import EngineSettings
from longstraw.pagers.engines.measure import Rates
from longstraw.planner import Machine


def load(folder: Path, values: Any) -> Machine:
    path = folder / "rates.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return Machine.load(path)


def test_figures_replace_the_defaults(tmp_path: Path) -> None:
    found = load(tmp_path, {"h2d": 1e9, "attention_forward": {"128": 1e12}, "device_bytes": 8e9})
    assert (found.h2d, found.attention_forward, found.device_bytes) == (1e9, {128: 1e12}, 8_000_000_000)
    assert found.d2h == Machine().d2h


def test_a_record_of_the_probe(tmp_path: Path) -> None:
    alone = LinkRates(devices=(0,), to_device=1e9, from_device=2e9, both=3e9)
    together = LinkRates(devices=(0, 1), to_device=9e9, from_device=9e9, both=9e9)
    slow, fast = (Rates(read=read, write=5.0, read_cpu=0.0, write_cpu=0.0) for read in (1.0, 7.0))
    disk = DiskRates(
        path=tmp_path, direct=True, settings=EngineSettings(), engines={"posix": slow, "kvikio": fast}, refused={}
    )
    record = ProbeResult(date="today", links=[together, alone], disks=[disk])
    found = load(tmp_path, record.to_dict())
    assert (found.h2d, found.d2h, found.both) == (1e9, 2e9, 3e9)
    assert (found.disk_read, found.disk_write) == (7.0, 5.0)
    assert found.name.endswith("probed today")
    assert load(tmp_path, ProbeResult(date="today", links=[], disks=[]).to_dict()).h2d == Machine().h2d


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
