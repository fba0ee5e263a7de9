"""The trace on CUDA: copies on their streams within the transaction, waits of the compute stream, no waiting inside."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw import Runtime
from longstraw.integrations.plain import PlainSharding
from tests.parity.models import build, make_group, replay_group, settings

pytestmark = pytest.mark.gpu


def test_copies_and_layers_are_on_the_device_clock(tmp_path: Path) -> None:
    trace, group = tmp_path / "trace.json", make_group(300, (40, 9))
    model = build("qwen3", dtype=torch.float32).cuda()
    with Runtime(model, settings(trace=str(trace))) as runtime:
        for _ in range(2):
            with runtime.transaction(group.prompt) as txn:
                replay_group(txn, group)
    report = txn.report
    events = json.loads(trace.read_text())
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[rows[event["tid"]]].append(event)
    first = min(e["ts"] for e in found["phases"])
    last = max(e["ts"] + e["dur"] for e in found["phases"])
    for row in ("layers", "passes", "copies to the device", "copies from the device"):
        assert found[row], row
        for event in found[row]:
            # The two clocks are read together to some tens of microseconds.
            assert first - 1e3 <= event["ts"] and event["ts"] + event["dur"] <= last + 1e3, (row, event)
            assert event["dur"] >= 0
    read = sum(e["args"]["bytes"] for e in found["copies to the device"])
    assert read == 2 * report.bytes_read["host"]


def test_waits_are_counted_without_a_trace() -> None:
    group = make_group(3000, (40, 9))
    model = build("qwen3", dtype=torch.float32, max_position_embeddings=4096).cuda()
    with Runtime(model, settings()) as runtime, runtime.transaction(group.prompt) as txn:
        replay_group(txn, group)
    report = txn.report
    assert set(report.stall_seconds_by_tier) == {"host"}
    assert 0 < report.stall_seconds_by_tier["host"] <= sum(report.seconds.values())
    assert report.stall_seconds_by_tier["host"] == pytest.approx(sum(report.stall_seconds.values()))
    assert all(one["peak_device_bytes"] > 0 for one in report.passes)
    assert report.peak_device_bytes >= max(one["peak_device_bytes"] for one in report.passes)


def test_a_traced_backward_does_not_wait_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(300, (40,))
    model = build("qwen3", dtype=torch.float32).cuda()
    original, strict = PlainSharding.backward, []

    def backward(self: PlainSharding, out: torch.Tensor, gradient: torch.Tensor) -> None:
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            original(self, out, gradient)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(PlainSharding, "backward", backward)
    with Runtime(model, settings(trace=str(tmp_path / "trace.json"))) as runtime:
        for _ in range(2):
            with runtime.transaction(group.prompt) as txn:
                replay_group(txn, group)
            # The first transaction loads kernels and reserves memory.
            strict.append(True)
