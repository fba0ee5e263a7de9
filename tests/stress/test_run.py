"""The stress run: passes here, puts faults in, and finds each kind of thing that it is there to find."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw.errors import ConfigError
from longstraw.pagers import HostPager
from longstraw.pagers.checksums import Checksums
from longstraw.resident import PageStore
from longstraw.runtime.ledger import GradientLedger
from longstraw.stress import Fault, StressOptions, attempt, growth, loop, run_stress
from longstraw.stress.faults import ENDS, UserError

CPU = torch.device("cpu")


def options(path: Path, **changes: Any) -> StressOptions:
    given: dict[str, Any] = {"seconds": 120, "steps": 5, "scratch": path, "layers": 2}
    given |= {"prompt_tokens": 96, "response_tokens": 10, "group": 3}
    return StressOptions(**(given | changes))


@pytest.mark.stress
def test_passes(tmp_path: Path) -> None:
    result = run_stress(options(tmp_path, steps=14, seed=3), CPU)
    assert result.problems == []
    assert result.steps > 5
    assert result.compared > 0
    assert result.worst_error < result.tolerance
    assert sum(result.faults.values()) > 0
    assert result.read["nvme"] > 0
    assert result.disk_written > 0
    assert result.dtype == "float64"
    assert max(result.fullest.values()) > 0.8, "the budgets are no limits"
    assert list(tmp_path.iterdir()) == []
    json.dumps(result.to_dict())


@pytest.mark.stress
@pytest.mark.parametrize("fault", list(Fault))
def test_every_fault_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    monkeypatch.setattr(loop, "Fault", [fault])
    result = run_stress(options(tmp_path, fault_rate=1.0, parity_rate=0.5), CPU)
    assert result.problems == []
    assert result.steps > 0
    if fault in (Fault.READ_ERROR, Fault.WRITE_ERROR, Fault.DISK_FULL, Fault.FLIPPED_BYTE, Fault.TRUNCATED_FILE):
        assert result.failed_cleanly["PageLostError"] > 0
    elif UserError in ENDS[fault]:
        assert result.failed_cleanly["UserError"] > 0
    elif fault in (Fault.SHORT_READ, Fault.SHORT_WRITE, Fault.SLOW_DISK, Fault.LATE_RANK):
        assert result.failed_cleanly.keys() <= {"CapacityError"}
        assert result.faults[fault.value] > 0


def broken(monkeypatch: pytest.MonkeyPatch, where: str) -> dict[str, Any]:
    """Break one thing that the runtime promises; what the run is to be asked, if not the usual."""
    if where == "leaked pages":
        monkeypatch.setattr(PageStore, "release", lambda self, owner, force=False: None)
    elif where == "leaked bytes":
        monkeypatch.setattr(HostPager, "free", lambda self, extent: None)
    elif where == "wrong bytes":
        monkeypatch.setattr(Checksums, "first_wrong", lambda self, data, offset: None)
        monkeypatch.setattr(loop, "Fault", [Fault.FLIPPED_BYTE])
        return {"fault_rate": 1.0, "parity_rate": 1.0, "steps": 40}
    elif where == "leaked device memory":
        held = iter(range(1 << 20, 1 << 40, 48 << 20))
        monkeypatch.setattr(growth, "held_device_bytes", lambda device: next(held))
        monkeypatch.setattr(loop, "STEPS_OF_AN_ERA", 1)
        return {"steps": 6, "fault_rate": 0.0, "parity_rate": 0.0}
    elif where == "a touched gradient":
        real = GradientLedger.rollback

        def rollback(self: GradientLedger) -> None:
            parameters = list(self._entry)
            real(self)
            if parameters:
                parameters[0].grad = torch.ones_like(parameters[0])

        monkeypatch.setattr(GradientLedger, "rollback", rollback)
        monkeypatch.setattr(loop, "Fault", [Fault.USER_ERROR])
        return {"fault_rate": 1.0}
    return {}


@pytest.mark.stress
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("leaked pages", "pages are still reserved"),
        ("leaked bytes", "bytes of tier host are still used"),
        ("leaked device memory", "bytes of CUDA memory are held between runtimes"),
        ("wrong bytes", "is off by"),
        ("a touched gradient", "is not what it was before the step"),
    ],
)
def test_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, words: str) -> None:
    changes = broken(monkeypatch, where)
    result = run_stress(options(tmp_path, **changes), CPU)
    assert not result.passed
    assert any(words in problem for problem in result.problems), result.problems


def test_nothing_done_is_no_pass(tmp_path: Path) -> None:
    result = run_stress(options(tmp_path, seconds=1e-9), CPU)
    assert result.steps == 0
    assert result.problems == ["no step ended well in the time that there was: give it more, or shorter prompts"]


def test_an_error_that_is_not_clear_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "CLEAR", ())
    monkeypatch.setattr(loop, "Fault", [Fault.USER_ERROR])
    with pytest.raises(UserError):
        run_stress(options(tmp_path, fault_rate=1.0), CPU)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": 0}, "--seconds 0: use a time above 0"),
        ({"fault_rate": 2}, "--fault-rate 2"),
        ({"prompt_tokens": 3}, "--prompt-tokens 3 is too small; use 16"),
        ({"hidden_size": 40}, "--hidden-size 40"),
        ({"scratch": Path("/nowhere/at/all")}, "--scratch /nowhere/at/all is no directory"),
    ],
)
def test_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options(tmp_path, **change)


@pytest.fixture
def invoke() -> Callable[..., Any]:
    from typer.testing import CliRunner

    from longstraw.cli import app

    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_command(tmp_path: Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    arguments = ("stress", "--steps", 2, "--scratch", tmp_path, "--prompt-tokens", 32, "--layers", 2)
    out.write_text(json.dumps({"passed": True, "steps": 999}))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "build_model", lambda *given: 1 / 0)
        assert isinstance(invoke(*arguments, "--json", out).exception, ZeroDivisionError)
    found = json.loads(out.read_text())
    assert (found["passed"], found["finished"], found["steps"]) == (None, False, 0)
    assert "ZeroDivisionError" in found["error"]
    ended = invoke(*arguments, "--json", out, "--budgets", "64KiB,128KiB,16MiB")
    assert ended.exit_code == 0, ended.output
    assert "passed: nothing leaked, nothing wrong" in ended.output
    assert json.loads(out.read_text()).items() >= {"passed": True, "finished": True}.items()
    ended = invoke(*arguments, "--fault-rate", 1e-9, "--parity-rate", 1e-9)
    assert "no fault happened in 2 steps; give it more --seconds" in ended.output
    assert "no gradient was compared in 2 steps; give it more --seconds" in ended.output
    ended = invoke(*arguments, "--fault-rate", 0, "--parity-rate", 1)
    assert "give it more --seconds" not in ended.output
    monkeypatch.setattr(HostPager, "free", lambda self, extent: None)
    ended = invoke(*arguments)
    assert ended.exit_code == 1
    assert "PROBLEM" in ended.output


@pytest.mark.parametrize(
    ("budgets", "words"),
    [("1GiB,2GiB", "--budgets 1GiB,2GiB: write three sizes"), ("1GiB,x,2GiB", "got 'x'; write three sizes")],
)
def test_budgets_that_are_none(invoke: Callable[..., Any], budgets: str, words: str) -> None:
    error = invoke("stress", "--budgets", budgets).exception
    assert isinstance(error, ConfigError)
    assert words in str(error)


def test_a_run_that_is_stopped_leaves_its_figures(
    tmp_path: Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = loop._Run._step, tmp_path / "out.json"

    def stopped_in_the_third(self: Any, runtime: Any, step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt
        real(self, runtime, step)

    monkeypatch.setattr(loop._Run, "_step", stopped_in_the_third)
    ended = invoke("stress", "--scratch", tmp_path, "--prompt-tokens", 32, "--layers", 2, "--json", out)
    assert ended.exit_code == 130
    found = json.loads(out.read_text())
    assert (found["passed"], found["finished"], found["steps"]) == (None, False, 2)
    assert found["error"] == "KeyboardInterrupt()"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.stress
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_on_a_gpu(tmp_path: Path, dtype: torch.dtype | None) -> None:
    """bfloat16 goes through the fused kernels; its rounding against float32 is not what this is about."""
    given = options(
        tmp_path, steps=26, hidden_size=256, prompt_tokens=4000, response_tokens=200, dtype=dtype,
        parity_rate=0.3 if dtype is None else 0.0,
    )  # fmt: skip
    result = run_stress(given, torch.device("cuda", 0))
    assert result.problems == []
    assert result.compared > 0 or dtype is not None
    assert result.disk_written > 0
    assert result.device_bytes[0] > 0
    assert max(result.fullest.values()) > 0.8
