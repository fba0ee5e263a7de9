"""All figures of RESULTS.md, or some, within a time that you give.

    python -m benchmarks.suite --list
    python -m benchmarks.suite --out results --seconds 3600
    python -m benchmarks.suite --out results --only stress capacity-exact

What measures time runs alone; tests, gradient checks and stress run beside one another, as far as device memory goes.
Each figure leaves `NAME.log` and, if it writes records, `NAME.jsonl` in the folder, and a line in `outcomes.jsonl`. A
figure that passed there is not run again, so a suite that was cut short goes on where it was. The exit status is 1 if
a figure failed or ran out of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import commit
from benchmarks.figures import FIGURES, Figure

_POLL = 0.2
_GRACE = 15.0
"""Seconds in which whoever is asked to end does."""


@dataclass(slots=True)
class Running:
    """A figure's process, the leader of its own process group, and what it ran beside."""

    figure: Figure
    process: subprocess.Popen[bytes]
    started: float
    scratch: Path
    beside: set[str]


def _hear_interrupts() -> None:
    """A shell starts what runs in its background deaf to Ctrl-C, and children inherit that; `_stop` asks by it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Suite:
    """Runs figures in their order. `device_gib` is what figures beside one another may take of a GPU in all."""

    def __init__(self, out: Path, seconds: float, gpus: int, device_gib: float) -> None:
        self._out = out
        self._gpus = gpus
        self._device_gib = device_gib
        self._deadline = time.monotonic() + seconds
        self._running: list[Running] = []
        self.outcomes: dict[str, str] = {}
        out.mkdir(parents=True, exist_ok=True)

    def run(self, figures: Sequence[Figure]) -> None:
        done = self._passed_before()
        waiting = [figure for figure in figures if figure.name not in done]
        try:
            while waiting or self._running:
                self._reap()
                waiting = self._begin(waiting)
                time.sleep(_POLL)
        finally:
            for running in self._running:
                self._stop(running)
                self._end(running, "interrupted")

    def _begin(self, waiting: list[Figure]) -> list[Figure]:
        """Start what can start now. A timed figure waits for an idle machine, and holds up those behind it."""
        left: list[Figure] = []
        blocked = False
        for figure in waiting:
            if figure.gpus > self._gpus:
                self._leave_out(figure, f"needs {figure.gpus} GPUs")
            elif time.monotonic() + figure.seconds > self._deadline:
                self._leave_out(figure, f"its {figure.seconds} s are more than is left")
            elif blocked or not self._has_room(figure):
                left.append(figure)
                blocked = blocked or figure.timed
            else:
                self._start(figure)
        return left

    def _has_room(self, figure: Figure) -> bool:
        if not self._running:
            return True
        if figure.timed or any(other.figure.timed for other in self._running):
            return False
        return sum(other.figure.device_gib for other in self._running) + figure.device_gib <= self._device_gib

    def _start(self, figure: Figure) -> None:
        scratch = Path(tempfile.mkdtemp(prefix=f"{figure.name}-"))
        words = shlex.split(figure.command.format(out=self._out / f"{figure.name}.jsonl", scratch=scratch))
        if words[0] == "python":
            words[0] = sys.executable
        elif words[0] == "torchrun":
            words[:1] = [sys.executable, "-m", "torch.distributed.run"]
        elif words[0] == "longstraw":
            words[:1] = [sys.executable, "-m", "longstraw"]
        with (self._out / f"{figure.name}.log").open("wb") as log:
            process = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_hear_interrupts,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        beside = {other.figure.name for other in self._running}
        for other in self._running:
            other.beside.add(figure.name)
        self._running.append(Running(figure, process, time.monotonic(), scratch, beside))
        print(f"begun   {figure.name}: {figure.command}", flush=True)

    def _reap(self) -> None:
        for running in list(self._running):
            status = running.process.poll()
            if status is not None:
                self._running.remove(running)
                self._end(running, "passed" if status == 0 else f"failed with status {status}")
            elif time.monotonic() - running.started > running.figure.seconds:
                self._running.remove(running)
                self._stop(running)
                self._end(running, f"stopped after {running.figure.seconds} s")

    @staticmethod
    def _stop(running: Running) -> None:
        """End the whole process group. It is asked first: as by Ctrl-C, so that pytest tells what failed so far and a
        script where it was; then as a launcher wants it, whose ranks are in groups of their own."""
        for ask in (signal.SIGINT, signal.SIGTERM):
            os.killpg(running.process.pid, ask)
            try:
                running.process.wait(timeout=_GRACE)
                return
            except subprocess.TimeoutExpired:
                continue
        os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()

    def _end(self, running: Running, outcome: str) -> None:
        shutil.rmtree(running.scratch)
        took = time.monotonic() - running.started
        self._note(running.figure, outcome, seconds=round(took, 1), beside=sorted(running.beside))
        print(f"{outcome:<8}{running.figure.name}, {took:.0f} s", flush=True)

    def _leave_out(self, figure: Figure, why: str) -> None:
        self._note(figure, "left out", why=why)
        print(f"left out {figure.name}: {why}", flush=True)

    def _note(self, figure: Figure, outcome: str, **values: object) -> None:
        self.outcomes[figure.name] = outcome
        row = {"figure": figure.name, "outcome": outcome, "commit": commit(), "command": figure.command, **values}
        with (self._out / "outcomes.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")

    def _passed_before(self) -> set[str]:
        path = self._out / "outcomes.jsonl"
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
        return {row["figure"] for row in rows if row["outcome"] == "passed"}


def find_gpus() -> tuple[int, float]:
    """How many GPUs there are, and GiB of the smallest; asked of a child, so that this process holds no context."""
    code = (
        "import torch; n = torch.cuda.device_count(); "
        "print(n, min((torch.cuda.get_device_properties(i).total_memory for i in range(n)), default=0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, size = done.stdout.split()
    return int(count), int(size) / 2**30


def choose(names: Sequence[str] | None, figures: Sequence[Figure] = FIGURES) -> list[Figure]:
    """The figures of these names, in the order given; all of them without any."""
    by_name = {figure.name: figure for figure in figures}
    unknown = [name for name in names or () if name not in by_name]
    if unknown:
        raise SystemExit(f"--only {' '.join(unknown)}: no such figure; --list shows them")
    return [by_name[name] for name in names] if names else list(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=7200.0, help="in all; what does not fit is left out")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    figures = choose(given.only)
    if given.list:
        for figure in figures:
            print(f"{figure.name:<30}{figure.seconds:>5} s  {figure.command}")
        return
    if given.out is None:
        parser.error("--out FOLDER: where records and logs go")
    gpus, size = find_gpus()
    if not gpus:
        raise SystemExit("no CUDA device: these figures are a GPU's")
    # A context and cuDNN's workspaces take about a gibibyte a process.
    suite = Suite(given.out, given.seconds, gpus, size - 4)
    suite.run(figures)
    if any(outcome not in ("passed", "left out") for outcome in suite.outcomes.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
