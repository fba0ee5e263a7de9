"""Stores over every layout of tiers that streams are tested on; each has nothing left when its test is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from longstraw.resident import PageStore
from tests.pagers.streams import LAYOUTS, build


@pytest.fixture(params=LAYOUTS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PageStore]:
    yield from build(tmp_path, *LAYOUTS[request.param])


@pytest.fixture
def straddling(tmp_path: Path) -> Iterator[PageStore]:
    yield from build(tmp_path, *LAYOUTS["straddle"])


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[PageStore]:
    yield from build(tmp_path, *LAYOUTS["nvme"])
