"""Stores over every layout of tiers that streams are tested on, with nothing left behind a test; fake disk engines."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longstraw.pagers.engines import deepspeed, kvikio
from longstraw.resident import PageStore
from tests.pagers.fake_engines import FakeCuFile, FakeHandle
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


@pytest.fixture
def fake_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "load_op", lambda: types.SimpleNamespace(aio_handle=FakeHandle))
    monkeypatch.setattr(deepspeed, "try_apart", lambda path, settings, device: None)


@pytest.fixture
def fake_kvikio(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    defaults = types.SimpleNamespace(set=chosen.update, is_compat_mode_preferred=lambda: True)
    mode = types.SimpleNamespace(ON="on")
    module = types.SimpleNamespace(defaults=defaults, CuFile=FakeCuFile, CompatMode=mode, __version__="0")
    monkeypatch.setattr(kvikio, "load_module", lambda: module)
    return chosen
