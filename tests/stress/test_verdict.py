"""The stress run's verdict: each thing that a run must not pass with, or must not be failed for."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw.errors import CapacityError, PageLostError, RankFailedError
from longstraw.pagers.checksums import Checksums
from longstraw.pagers.spool import SpoolFile
from longstraw.pagers.staging import Slot, StagingPool
from longstraw.pagers.transfer import Transfer
from longstraw.resident.placement import HolesError, Reservation
from longstraw.resident.segment import Segment
from longstraw.resident.store import PageStore
from longstraw.runtime.widths import PassWidths
from longstraw.stress import Fault, StressOptions, StressResult, loop, run_stress
from longstraw.stress.faults import ENDS, Armed, UserError
from longstraw.stress.growth import STEADY_ERAS, WARM_ERAS
from longstraw.stress.notes import make_notes
from longstraw.stress.outcome import Outcome, judge

CPU = torch.device("cpu")
Reserve = Callable[[PageStore, str, Sequence[Reservation]], list[Segment]]


def run(path: Path, **changes: Any) -> StressResult:
    given: dict[str, Any] = {"seconds": 120, "steps": 5, "scratch": path, "layers": 2}
    given |= {"prompt_tokens": 96, "response_tokens": 10, "group": 3}
    return run_stress(StressOptions(**(given | changes)), CPU)


# A fault that is to be survived


@pytest.mark.stress
def test_short_reads_that_end_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: SpoolFile, into: memoryview, offset: int) -> None:
        if os.preadv(self._fd, [into], offset) != len(into):
            raise OSError(errno.EIO, "short read")

    monkeypatch.setattr(SpoolFile, "read", read)
    monkeypatch.setattr(loop, "Fault", [Fault.SHORT_READ])
    result = run(tmp_path, fault_rate=1.0, seed=1)
    assert any("short read is to be survived, and ended a step: PageLostError" in p for p in result.problems), result


@pytest.mark.stress
def test_wide_lanes_that_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever pass runs out of memory, the runtime gives up at once."""

    def give_up(self: PassWidths, *given: Any, **more: Any) -> None:
        raise CapacityError("out of memory, and that is it")

    monkeypatch.setattr(PassWidths, "narrow", give_up)
    monkeypatch.setattr(PassWidths, "shorten_chunks", give_up)
    monkeypatch.setattr(loop, "Fault", [Fault.OUT_OF_MEMORY_WIDE])
    result = run(tmp_path, fault_rate=1.0, seed=1)
    words = "out of memory in wide lanes is to be survived, and ended a step: CapacityError"
    assert any(words in problem for problem in result.problems), result.problems


def test_memory_that_the_runtime_does_not_look_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longstraw.runtime.captured.is_out_of_memory", lambda error: False)
    monkeypatch.setattr(loop, "Fault", [Fault.OUT_OF_MEMORY])
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, fault_rate=1.0, seed=1)


@pytest.mark.stress
def test_memory_runs_out_from_the_first_pass_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a new runtime too, whose model has not been looked at before."""
    monkeypatch.setattr(loop, "Fault", [Fault.OUT_OF_MEMORY])
    monkeypatch.setattr(loop, "STEPS_OF_AN_ERA", 1)
    real = loop.put_in

    @contextmanager
    def at_once(*given: Any) -> Iterator[Armed]:
        with real(*given) as armed:
            armed.at = 0
            monkeypatch.setattr(armed.rng, "random", lambda: 0.0)
            yield armed

    monkeypatch.setattr(loop, "put_in", at_once)
    result = run(tmp_path, fault_rate=1.0, steps=3)
    assert result.problems == []
    assert result.failed_cleanly == {"CapacityError": 3}


def put(fault: Fault, happened: int = 1) -> Armed:
    return Armed(fault=fault, at=0, rng=random.Random(0), narrow=8, happened=happened)


WELL, HOLES = Outcome.of(None, None), Outcome.of(HolesError(), None)


@pytest.mark.parametrize("fault", list(Fault))
def test_which_fault_ends_a_step_with_what(fault: Fault) -> None:
    errors = (PageLostError("lost"), CapacityError("full"), UserError("mine"))
    for error in errors:
        ended = [Outcome.of(error, None)]
        allowed = isinstance(error, ENDS[fault])
        assert (judge(error, put(fault), ended, [WELL]) is None) == allowed
        assert judge(error, put(fault, happened=0), ended, [WELL]) == f"a step failed without a fault: {error!r}"
        assert judge(error, None, ended, [WELL]) == f"a step failed without a fault: {error!r}"
        # It did not fit anyway, of whichever subclass the refusal is.
        refused = isinstance(error, CapacityError)
        assert (judge(error, None, ended, [HOLES]) is None) == refused
        assert (judge(error, put(fault), ended, [HOLES]) is None) == (refused or allowed)


def test_the_survivable_faults_end_no_step() -> None:
    survived = {fault for fault in Fault if not ENDS[fault]}
    disk = {Fault.SHORT_READ, Fault.SHORT_WRITE, Fault.SLOW_DISK}
    assert survived == disk | {Fault.OUT_OF_MEMORY_WIDE, Fault.LATE_RANK}


def test_of_two_ranks_one_has_to_have_failed_itself() -> None:
    error = RankFailedError("rank 1 failed")
    here, there = Outcome.of(error, None), Outcome.of(PageLostError("lost"), put(Fault.READ_ERROR))
    assert judge(error, None, [here, there], [WELL, WELL]) is None
    assert "no rank has any" in str(judge(error, None, [here, here], [WELL, WELL]))
    assert "others' did not" in str(judge(None, None, [WELL, there], [WELL, WELL]))


# Steps that do not fit


def refuse_above(rows: int, error: type[CapacityError] = CapacityError) -> Reserve:
    real = PageStore.reserve

    def reserve(self: PageStore, owner: str, reservations: Sequence[Reservation]) -> list[Segment]:
        if sum(one.rows for one in reservations) > rows:
            raise error("it does not fit")
        return real(self, owner, reservations)

    return reserve


@pytest.mark.stress
def test_more_refused_than_ended_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageStore, "reserve", refuse_above(60))
    result = run(tmp_path, steps=12, seed=1, fault_rate=0.0, budgets=(1 << 20, 1 << 20, 1 << 20))
    assert result.refused > result.steps > 0
    words = f"{result.refused} steps did not fit the budgets, and {result.steps} ended well: raise --budgets"
    assert any(words in problem for problem in result.problems), result.problems


@pytest.mark.stress
def test_tiers_with_holes_are_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageStore, "reserve", refuse_above(270, HolesError))
    result = run(tmp_path, steps=8, fault_rate=0.0, parity_rate=0.0, budgets=(1 << 20, 1 << 20, 1 << 20))
    assert result.failed_cleanly.keys() == {"HolesError"}
    assert result.refused > 0
    assert not any("failed without a fault" in problem for problem in result.problems), result.problems


# Bytes that are flipped unseen


@pytest.mark.stress
@pytest.mark.parametrize(
    ("changes", "compared"),
    [({"parity_rate": 1e-9}, True), ({"parity_rate": 1e-9, "parity_tokens": 16}, False), ({"parity_rate": 0.0}, False)],
    ids=["plain autograd", "too long for it", "without it"],
)
def test_a_step_with_a_flipped_byte_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], compared: bool
) -> None:
    monkeypatch.setattr(Checksums, "first_wrong", lambda self, data, offset: None)
    monkeypatch.setattr(loop, "Fault", [Fault.FLIPPED_BYTE])
    result = run(tmp_path, fault_rate=1.0, steps=40, **changes)
    assert any("is off by" in problem for problem in result.problems), result.problems
    assert (result.compared > 0) == compared
    assert (result.repeated > 0) == (not compared)


# Slots that nobody gives back


@pytest.mark.stress
def test_staging_slots_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Slot] = []

    def keep(self: StagingPool, slot: Slot, after: Sequence[Transfer]) -> None:
        kept.append(slot)

    monkeypatch.setattr(StagingPool, "give_back", keep)
    result = run(tmp_path, fault_rate=0.0)
    assert any("bytes of staging slots were not given back" in problem for problem in result.problems), result.problems


# Notes


def test_notes_say_what_was_not_tried(tmp_path: Path) -> None:
    result = StressResult()
    asked, nothing = StressOptions(scratch=tmp_path), StressOptions(scratch=tmp_path, fault_rate=0, parity_rate=0)
    assert make_notes(result, nothing, eras=WARM_ERAS) == [
        "no fault was put in: --fault-rate is 0",
        "no gradient was compared with plain autograd: --parity-rate is 0",
        "growth was not checked: it is from runtime 3 on, and there were 2",
    ]
    result.drawn.update({"disk full": 2, "slow disk": 1})
    result.faults.update({"disk full": 0, "slow disk": 1})
    assert make_notes(result, asked, eras=WARM_ERAS + 1) == [
        "disk full never happened (steps that it was put into: 2)",
        "no gradient was compared in 0 steps; give it more --seconds",
        "a steady rise (of memory in small steps, of open files, of threads) was not looked for: it is from runtime 8 "
        "on, and there were 3",
    ]
    result.compared = 1
    del result.drawn["disk full"]
    assert make_notes(result, asked, eras=STEADY_ERAS) == []


def test_notes_are_in_the_json(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from longstraw.cli import app

    out = tmp_path / "out.json"
    arguments = ["stress", "--steps", "1", "--prompt-tokens", "32", "--layers", "2", "--fault-rate", "0"]
    ended = CliRunner().invoke(app, [*arguments, "--parity-rate", "0", "--json", str(out)])
    assert ended.exit_code == 0, ended.output
    found = json.loads(out.read_text())
    assert found["passed"] is True
    assert "no fault was put in: --fault-rate is 0" in found["notes"]
    assert "no gradient was compared with plain autograd: --parity-rate is 0" in found["notes"]
    assert any("growth was not checked" in note for note in found["notes"])
    assert all(f"note: {note}" in ended.output for note in found["notes"])
