"""The suite of figures: what runs beside what, what is stopped, and what a second start does again."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import FIGURES, Figure
from benchmarks.suite import Suite, choose

QUICK = "python -c pass"


def nap(seconds: float) -> str:
    return f'python -c "import time; time.sleep({seconds})"'


def run(folder: Path, *figures: Figure, seconds: float = 100.0, gpus: int = 1) -> dict[str, dict[str, Any]]:
    suite = Suite(folder, seconds, gpus, device_gib=100)
    suite.run(figures)
    rows = [json.loads(line) for line in (folder / "outcomes.jsonl").read_text().splitlines()]
    return {row["figure"]: row for row in rows}


def test_timed_figures_run_alone_and_others_as_memory_allows(tmp_path: Path) -> None:
    rows = run(
        tmp_path,
        Figure(name="a", command=nap(2), seconds=30, device_gib=60, timed=False),
        Figure(name="b", command=nap(2), seconds=30, device_gib=30, timed=False),
        Figure(name="too big beside a and b", command=QUICK, seconds=30, device_gib=50, timed=False),
        Figure(name="timed", command=QUICK, seconds=30),
        Figure(name="after", command=QUICK, seconds=30, timed=False),
    )
    assert {row["outcome"] for row in rows.values()} == {"passed"}
    assert rows["a"]["beside"] == ["b"] and rows["b"]["beside"][0] == "a"
    assert rows["too big beside a and b"]["beside"] in ([], ["b"])
    assert rows["timed"]["beside"] == []
    assert "timed" not in rows["after"]["beside"]


def test_a_figure_past_its_time_is_stopped_with_its_children(tmp_path: Path) -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'import time; time.sleep(600)'!r}])"
    rows = run(tmp_path, Figure(name="long", command=f"python -c {shlex.quote(child)}", seconds=2))
    assert rows["long"]["outcome"] == "stopped after 2 s"
    assert 2 <= rows["long"]["seconds"] < 20


def test_a_launcher_is_asked_first_and_ends_ranks_in_groups_of_their_own(tmp_path: Path) -> None:
    rank = "import time; time.sleep(600)"
    code = (
        "import pathlib, signal, subprocess, sys\n"
        f"rank = subprocess.Popen([sys.executable, '-c', {rank!r}], start_new_session=True)\n"
        "def end(*_):\n    rank.kill(); rank.wait(); pathlib.Path(sys.argv[1]).write_text('ended'); sys.exit(1)\n"
        "signal.signal(signal.SIGINT, end)\n"
        "signal.pause()\n"
    )
    command = f"python -c {shlex.quote(code.replace('{', '{{').replace('}', '}}'))} {{out}}"
    rows = run(tmp_path, Figure(name="launcher", command=command, seconds=3))
    assert rows["launcher"]["outcome"] == "stopped after 3 s"
    assert (tmp_path / "launcher.jsonl").read_text() == "ended"


def test_a_figure_that_is_stopped_says_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # As a shell has it for what it starts in the background.
    here = signal.signal(signal.SIGINT, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, here))
    test = tmp_path / "test_two.py"
    test.write_text("import time\ndef test_a():\n    assert 1 == 2\ndef test_b():\n    time.sleep(60)\n")
    rows = run(tmp_path, Figure(name="tests", command=f"python -m pytest -q -p no:cacheprovider {test}", seconds=5))
    assert rows["tests"]["outcome"] == "stopped after 5 s"
    assert "assert 1 == 2" in (tmp_path / "tests.log").read_text()
    deaf = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; time.sleep(60)"
    monkeypatch.setattr("benchmarks.suite._GRACE", 0.5)
    rows = run(tmp_path, Figure(name="deaf", command=f"python -c {shlex.quote(deaf)}", seconds=3))
    assert rows["deaf"]["outcome"] == "stopped after 3 s"
    assert rows["deaf"]["seconds"] < 10


def test_what_does_not_fit_is_left_out_by_name(tmp_path: Path) -> None:
    rows = run(
        tmp_path,
        Figure(name="two", command=QUICK, seconds=5, gpus=2),
        Figure(name="slow", command=QUICK, seconds=500),
        Figure(name="quick", command=QUICK, seconds=20),
    )
    assert [rows[name]["outcome"] for name in ("two", "slow", "quick")] == ["left out", "left out", "passed"]
    assert "2 GPUs" in rows["two"]["why"] and "500 s" in rows["slow"]["why"]


def test_a_second_start_runs_only_what_did_not_pass(tmp_path: Path) -> None:
    mark = tmp_path / "marks"
    append = f"python -c \"open({str(mark)!r}, 'a').write('x')\""
    fails = 'python -c "raise SystemExit(3)"'
    figures = (Figure(name="good", command=append, seconds=20), Figure(name="bad", command=fails, seconds=20))
    assert run(tmp_path / "out", *figures)["bad"]["outcome"] == "failed with status 3"
    run(tmp_path / "out", *figures)
    assert mark.read_text() == "x"
    outcomes = [json.loads(line) for line in (tmp_path / "out" / "outcomes.jsonl").read_text().splitlines()]
    assert [row["figure"] for row in outcomes] == ["good", "bad", "bad"]


def test_records_and_scratch_are_named(tmp_path: Path) -> None:
    code = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(str(pathlib.Path(sys.argv[2]).is_dir()))"
    command = f"python -c {shlex.quote(code)} {{out}} {{scratch}}"
    run(tmp_path, Figure(name="one", command=command, seconds=20))
    assert (tmp_path / "one.jsonl").read_text() == "True"


def test_names_are_unique_and_unknown_ones_refused() -> None:
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
    assert [f.name for f in choose(["stress", "step-32k"])] == ["stress", "step-32k"]
    with pytest.raises(SystemExit, match="--only none"):
        choose(["none"])
