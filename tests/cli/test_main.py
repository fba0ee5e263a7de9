"""The command itself: version, help, and how a user's mistake ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import longstraw
from longstraw.cli import main


def test_version(invoke: Callable[..., Any]) -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"longstraw {longstraw.__version__}\n"


@pytest.mark.parametrize("command", [[], ["demo"], ["verify"]])
def test_help(invoke: Callable[..., Any], command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    for option in {
        (): ("demo", "verify"),
        ("demo",): ("prompt-tokens", "seed", "elsewhere"),
        ("verify",): ("tolerance",),
    }[tuple(command)]:
        assert option in result.stdout


def test_a_mistake_is_a_message_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["longstraw", "demo", "--steps", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.replace("\n", " ").strip() == "longstraw: --steps 0 is too small; use at least 1"


@pytest.mark.slow
def test_as_a_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from longstraw.cli import main; main()", "verify", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "cannot load a causal LM" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "command",
    [["doctor", "--json"], ["probe", "--json"], ["stress", "--json"], ["demo", "--json"], ["verify", ".", "--json"]],
    ids=lambda words: words[0],
)
def test_an_output_that_cannot_be_written_is_refused_first(
    tmp_path: Path, invoke: Callable[..., Any], command: list[str]
) -> None:
    for path, words in ((tmp_path / "missing" / "a.json", "is no folder; create it"), (tmp_path, "is a folder;")):
        ended = invoke(*command, path)
        assert ended.exit_code == 2
        assert words in " ".join(ended.output.replace("│", " ").split())
