"""The trace file: valid at every moment, its spans nested and named, its bytes those of the report."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw import Runtime
from longstraw.errors import ConfigError
from longstraw.pagers.nvme import NvmePager
from longstraw.pagers.stalls import Stall
from longstraw.pagers.trace import Track
from longstraw.runtime.passes import PassTraffic
from longstraw.runtime.report import Report
from longstraw.runtime.trace import Recorder
from tests.parity.models import build, gradients, make_group, replay_group, settings

CPU = torch.device("cpu")
Event = dict[str, Any]


def spans(path: Path) -> dict[str, list[Event]]:
    """Complete events by the name of their row."""
    events = json.loads(path.read_text())
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[rows[event["tid"]]].append(event)
    return found


def run(folder: Path, *, trace: Path | None, steps: int = 1, model: Any = None) -> list[Report]:
    model = build("qwen3") if model is None else model
    group = make_group(61)
    config = settings(tiers=[{"kind": "nvme", "path": str(folder), "budget": "64MiB"}])
    config["trace"] = None if trace is None else str(trace)
    reports = []
    with Runtime(model, config) as runtime:
        for _ in range(steps):
            with runtime.transaction(group.prompt) as txn:
                txn.score(group.responses)
                replay_group(txn, group)
            reports.append(txn.report)
            if trace is not None:
                spans(trace)
    return reports


def test_what_ran_is_in_it(tmp_path: Path) -> None:
    (report,) = run(tmp_path, trace=tmp_path / "trace.json")
    found = spans(tmp_path / "trace.json")
    phases = [event["name"] for event in found["phases"]]
    assert set(phases) == {"capture", "score", "replay", "backward", "sweep", "finalize"}
    assert phases.count("replay") == phases.count("backward") == report.lanes
    passes = [event["name"] for event in found["passes"]]
    assert passes.count("capture") == passes.count("sweep") == report.chunks
    assert {e["name"] for e in found["layers"]} == {
        f"layer {i} {way}" for i in (0, 1) for way in ("forward", "backward")
    }
    # A phase of the trace is as long as in the report.
    for phase, seconds in report.seconds.items():
        traced = sum(e["dur"] for e in found["phases"] if e["name"] == phase) / 1e6
        assert traced == pytest.approx(seconds, abs=0.01)


def test_the_disk_moves_what_the_report_says(tmp_path: Path) -> None:
    (report,) = run(tmp_path, trace=tmp_path / "trace.json")
    disk = [e for row, events in spans(tmp_path / "trace.json").items() if row.startswith("disk") for e in events]
    for way, expected in (("read nvme", report.bytes_read), ("write nvme", report.bytes_written)):
        assert sum(e["args"]["bytes"] for e in disk if e["name"] == way) == expected["nvme"]


def test_spans_of_a_row_do_not_overlap(tmp_path: Path) -> None:
    run(tmp_path, trace=tmp_path / "trace.json")
    for row, events in spans(tmp_path / "trace.json").items():
        ordered = sorted(events, key=lambda e: e["ts"])
        for before, after in itertools.pairwise(ordered):
            # The clock's own grain.
            assert before["ts"] + before["dur"] <= after["ts"] + 1, (row, before, after)


def test_layers_lie_within_their_pass(tmp_path: Path) -> None:
    run(tmp_path, trace=tmp_path / "trace.json")
    found = spans(tmp_path / "trace.json")
    for layer in found["layers"]:
        assert any(
            p["ts"] - 1 <= layer["ts"] and layer["ts"] + layer["dur"] <= p["ts"] + p["dur"] + 1 for p in found["passes"]
        )


def test_transactions_are_added_to_one_file(tmp_path: Path) -> None:
    run(tmp_path, trace=tmp_path / "trace.json", steps=3)
    names = [event["name"] for event in spans(tmp_path / "trace.json")["phases"]]
    assert names.count("capture") == names.count("finalize") == 3


def test_a_failed_transaction_leaves_a_valid_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with Runtime(build("qwen3"), settings(trace=str(trace))) as runtime:
        with pytest.raises(KeyError), runtime.transaction(make_group(61).prompt):
            raise KeyError("the user's own")
        assert not spans(trace)
    assert [event["name"] for event in spans(trace)["phases"]] == ["capture"]


def test_gradients_are_the_same_without_it(tmp_path: Path) -> None:
    models = [build("qwen3") for _ in range(2)]
    reports = [
        run(tmp_path, trace=trace, model=model)[0]
        for model, trace in zip(models, (None, tmp_path / "trace.json"), strict=True)
    ]
    plain, traced = (gradients(model) for model in models)
    for name, gradient in plain.items():
        assert gradient is not None
        other = traced[name]
        assert other is not None
        assert torch.equal(gradient, other), name
    assert reports[0].bytes_read == reports[1].bytes_read


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: .*missing/trace.json cannot be written"):
        Runtime(build("qwen3"), settings(trace=str(tmp_path / "missing" / "trace.json")))
    with pytest.raises(ConfigError, match="trace: expected a file to write, or null"):
        Runtime(build("qwen3"), settings(trace=True))


def test_every_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    paths = [Recorder(tmp_path / "trace.json", CPU, rank).path.name for rank in (None, 0, 3)]
    assert paths == ["trace.json", "trace.json", "trace.rank3.json"]


class _LateEvent:
    """A CUDA event that happens when it is told to."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def elapsed_time(self, other: Any) -> float:
        assert self.happened and other.happened, "the length of a wait was asked for too early"
        return 250.0


def late(tier: str, events: Sequence[_LateEvent]) -> Stall:
    return Stall(tier, 9.0, (events[0], events[1]))  # type: ignore[arg-type]


def test_stalls_are_counted_by_phase_and_tier_once_they_are_over() -> None:
    report, events = Report(), [_LateEvent(), _LateEvent()]
    report.add_traffic("replay", PassTraffic(stalls=[Stall("nvme", 0.5), late("host", events), Stall("nvme", 1.0)]))
    assert report.stall_seconds_by_tier == {"nvme": 0.5}
    for event in events:
        event.happened = True
    with report.phase("sweep", CPU):
        pass
    assert report.stall_seconds == {"replay": 1.75}
    assert report.stall_seconds_by_tier == {"nvme": 1.5, "host": 0.25}


def test_a_slow_disk_shows_as_stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fast,) = run(tmp_path, trace=None)
    original = NvmePager._read_now

    def slow(self: NvmePager, start: int, target: torch.Tensor) -> None:
        time.sleep(0.01)
        original(self, start, target)

    monkeypatch.setattr(NvmePager, "_read_now", slow)
    (late,) = run(tmp_path, trace=tmp_path / "trace.json")
    assert late.stall_seconds_by_tier["nvme"] > fast.stall_seconds_by_tier["nvme"] + 0.1
    assert late.stall_seconds_by_tier["nvme"] == pytest.approx(sum(late.stall_seconds.values()))
    traced = sum(event["dur"] for event in spans(tmp_path / "trace.json")[Track.STALL.value]) / 1e6
    assert traced == pytest.approx(late.stall_seconds_by_tier["nvme"], rel=0.05)


def test_the_report_knows_each_pass(tmp_path: Path) -> None:
    (report,) = run(tmp_path, trace=None)
    assert [p["phase"] for p in report.passes].count("sweep") == report.chunks
    assert sum(p["read"].get("nvme", 0) for p in report.passes) == report.bytes_read["nvme"]
    times = [p["seconds"] for p in report.passes]
    assert times == sorted(times)
    report.save(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text()) == report.to_dict()


class _Clock:
    """A pretend CUDA event at a millisecond of the device's clock."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, other: _Clock) -> float:
        return other.at - self.at


def test_streams_times_are_told_on_the_hosts_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    recorder = Recorder(tmp_path / "trace.json", torch.device("cuda"))
    recorder._anchor = (_Clock(1000.0), 2.0)  # type: ignore[assignment]
    recorder.waited(_Clock(1500.0), _Clock(1750.0), Track.STALL, "wait for host")  # type: ignore[arg-type]
    # A failed transaction's spans lie before the next one's reading of the clocks.
    recorder.waited(_Clock(500.0), _Clock(501.0), Track.STALL, "wait for nvme")  # type: ignore[arg-type]
    recorder.finish()
    late, early = spans(tmp_path / "trace.json")["stalls"]
    assert (late["ts"], late["dur"]) == pytest.approx((2.5e6, 0.25e6))
    assert (early["ts"], early["dur"]) == pytest.approx((1.5e6, 1e3))
