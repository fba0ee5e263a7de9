"""A device tier's pages are taken off before lanes and chunks are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longstraw import Report, Runtime
from longstraw.runtime import engine
from longstraw.runtime.beside_pages import beside
from tests.parity.models import build, make_group, replay_group, settings

AUTO = {"capture": {"chunk_tokens": "auto"}, "replay": {"lane_tokens": "auto", "logit_block_tokens": 1}}


def run(monkeypatch: pytest.MonkeyPatch, tiers: list[dict[str, Any]], free: int) -> Report:
    """A step on a device with so many bytes free beyond gradient sums."""
    group = make_group(301, (20,) * 8)
    with Runtime(build("qwen3", dtype=torch.float32), settings(tiers=tiers, **AUTO)) as runtime:
        free += runtime._engine.sharding.gradient_bytes()
        monkeypatch.setattr(engine, "free_device_bytes", lambda device: free)
        with runtime.transaction(group.prompt) as txn:
            replay_group(txn, group)
    return txn.report


def test_lanes_and_chunks_are_cut_beside_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1_000_000
    device = [{"kind": "device", "budget": "64MiB"}]
    host = [{"kind": "host", "budget": "64MiB"}]
    pages = run(monkeypatch, device, free).tier_bytes["device"]
    free = 2 * pages
    on_device, on_host = run(monkeypatch, device, free), run(monkeypatch, host, free)
    assert on_device.tier_bytes["device"] >= pages
    smaller = run(monkeypatch, host, beside(free, on_device.tier_bytes["device"]))
    assert (on_device.lane_tokens, on_device.chunk_tokens) == (smaller.lane_tokens, smaller.chunk_tokens)
    assert on_device.lane_tokens < on_host.lane_tokens
    assert on_device.chunk_tokens < on_host.chunk_tokens


def test_pages_lie_in_what_graphs_leave_free(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers: list[dict[str, Any]] = [{"kind": "device", "budget": 65_536}, {"kind": "host", "budget": "64MiB"}]
    both, host = run(monkeypatch, tiers, 1_000_000), run(monkeypatch, tiers[1:], 1_000_000)
    assert both.tier_bytes["device"] > 60_000
    assert (both.lane_tokens, both.chunk_tokens) == (host.lane_tokens, host.chunk_tokens)


def test_no_more_than_the_budget_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers: list[dict[str, Any]] = [{"kind": "device", "budget": 65_536}, {"kind": "host", "budget": "64MiB"}]
    both, host = run(monkeypatch, tiers, 150_000), run(monkeypatch, tiers[1:], beside(150_000, 65_536))
    assert (both.lane_tokens, both.chunk_tokens) == (host.lane_tokens, host.chunk_tokens)
    assert both.lane_tokens < run(monkeypatch, tiers[1:], 150_000).lane_tokens
