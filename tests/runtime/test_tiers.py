"""Tiers as a configuration asks for them: what `budget: auto` comes to, and what is printed of it."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longstraw import Config, Runtime
from longstraw.pagers import limits
from longstraw.runtime import tiers as tiers_module
from longstraw.runtime.engine import Engine
from longstraw.runtime.tiers import TIER_SHARE, build_store
from tests.parity.models import build, make_group, replay_group, settings

CPU = torch.device("cpu")
FREE = {"device": 900 << 20, "host": 700 << 20, "nvme": 500 << 20}


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "free_device_bytes", lambda device: FREE["device"])
    monkeypatch.setattr(tiers_module, "free_host_bytes", lambda: FREE["host"])
    usage = SimpleNamespace(total=1 << 40, used=0, free=FREE["nvme"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def auto(path: Path, *kinds: str) -> list[dict[str, Any]]:
    return [{"kind": kind, "budget": "auto"} | ({"path": path} if kind == "nvme" else {}) for kind in kinds]


@pytest.mark.usefixtures("free")
def test_auto_takes_a_share_of_what_is_free(tmp_path: Path) -> None:
    store = build_store(Config(tiers=auto(tmp_path, "host", "nvme")), CPU)
    for pager in store.pagers:
        assert pager.budget == int(FREE[pager.kind] * TIER_SHARE[pager.kind])
        pager.close()


@pytest.mark.usefixtures("free")
def test_device_memory_does_not_grow_with_the_prompt_unless_there_is_nothing_else(tmp_path: Path) -> None:
    beside = build_store(Config(tiers=auto(tmp_path, "device", "host")), CPU)
    assert beside.pagers[0].budget == 0
    alone = build_store(Config(tiers=auto(tmp_path, "device")), CPU)
    assert alone.pagers[0].budget == int(FREE["device"] * TIER_SHARE["device"])


def test_the_host_tier_stays_within_the_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{100 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{60 << 20}\n")
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    (pager,) = build_store(Config(tiers=auto(tmp_path, "host")), CPU).pagers
    assert pager.budget == int((40 << 20) * TIER_SHARE["host"])


@pytest.mark.usefixtures("free")
def test_budgets_are_printed(tmp_path: Path) -> None:
    with Runtime(build("qwen3"), settings(tiers=auto(tmp_path, "host", "nvme"))) as runtime:
        text = runtime.describe()
    assert "host: 490.00 MiB" in text
    assert "nvme: 400.00 MiB" in text


def test_a_closed_runtime_holds_no_staging_slots(tmp_path: Path) -> None:
    group = make_group()
    tiers = [{"kind": "nvme", "path": tmp_path, "budget": "64MiB", "engine": "posix"}]
    with Runtime(build("qwen3"), settings(tiers=tiers)) as runtime:
        with runtime.transaction(group.prompt) as txn:
            replay_group(txn, group)
        assert runtime._engine.staging.bytes > 0
    assert runtime._engine.staging.bytes == 0


def test_a_reference_engine_holds_no_staging_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, original = make_group(), Engine.__init__
    made: list[Engine] = []

    def init(self: Engine, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "__init__", init)
    tiers = [{"kind": "nvme", "path": tmp_path, "budget": "64MiB", "engine": "posix"}]
    with Runtime(build("qwen3"), settings(tiers=tiers)) as runtime:
        for _ in range(2):
            runtime.score(group.prompt, group.responses, model=build("qwen3", seed=5))
        assert len(made) == 3
        assert [engine.staging.bytes for engine in made] == [0, 0, 0]
        with runtime.transaction(group.prompt) as txn:
            replay_group(txn, group)


def test_a_tier_that_cannot_be_closed_does_not_keep_the_others_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group()
    tiers = [
        {"kind": "host", "budget": "40KiB"},
        {"kind": "nvme", "path": tmp_path, "budget": "64MiB", "engine": "posix"},
    ]
    runtime = Runtime(build("qwen3"), settings(tiers=tiers))
    with runtime.transaction(group.prompt) as txn:
        replay_group(txn, group)
    engine = runtime._engine
    host, nvme = engine.store.pagers
    closed, original = [], nvme.close
    assert engine.staging.bytes

    def refuse() -> None:
        raise RuntimeError("the host's arena is still registered")

    monkeypatch.setattr(host, "close", refuse)
    monkeypatch.setattr(nvme, "close", lambda: (original(), closed.append(nvme)))
    with pytest.raises(RuntimeError, match="still registered"):
        runtime.close()
    assert closed == [nvme]
    assert engine.staging.bytes == 0


def test_nothing_that_comes_back_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was unpickled")

    group = make_group()
    tiers = [{"kind": "nvme", "path": tmp_path, "budget": "64MiB", "engine": "posix"}]
    with Runtime(build("qwen3"), settings(tiers=tiers)) as runtime:
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(pickle, name, refuse)
        monkeypatch.setattr(torch, "load", refuse)
        with runtime.transaction(group.prompt) as txn:
            replay_group(txn, group)
        assert txn.report.bytes_read["nvme"] > 0
