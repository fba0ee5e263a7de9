"""Each engine of the nvme tier against fio (or dd): one file, the same size, block and depth, direct I/O, CPU use.

    python -m benchmarks.disk_engines --path /scratch --size 4GiB --block 4MiB --threads 4 --seconds 2 --fio fio
    python -m benchmarks.disk_engines --path /scratch --size 1GiB --rounds 1 --sweep

fio runs `threads` jobs of synchronous direct I/O, which is what engine posix does, and one job of libaio with a queue
of `threads`. Without fio, dd writes and reads with oflag/iflag=direct, `threads` of them side by side. All go over one
file of `--size` bytes, allocated and written once before, since the first write to a block costs more. Rates are in
bytes a second, CPU in seconds for each 10^9 bytes; each engine's rate is also given as a share of the best reference's.
A shared disk varies: `--rounds` rounds of everything alternate, and medians count. Each of our engines runs in a
process of its own, anew in each round, so that one that ends its process loses nobody's figures but the rest of its
own; the record says which signal it died by.

`--sweep` prints engine posix's rates over threads and blocks, and those of the engines with a queue over its depth at
the settings given: what the defaults are chosen from.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.common import Record
from longstraw.config import format_bytes, parse_bytes
from longstraw.errors import CapacityError, ConfigError
from longstraw.pagers.engines import DiskEngine, EngineSettings, make_engine, measure
from longstraw.pagers.engines.deepspeed import DeepSpeedEngine, is_built
from longstraw.pagers.spool import SpoolFile

Way = dict[str, float]
"""`read` and `write` in bytes a second, `read_cpu` and `write_cpu` in CPU seconds for 10^9 bytes."""
ENGINES = ("posix", "deepspeed", "kvikio")
SWEEP_THREADS = (1, 2, 4, 8, 16)
SWEEP_BLOCKS = ("256KiB", "1MiB", "4MiB", "16MiB")
SWEEP_DEPTHS = (1, 4, 16)


def fio(command: str, file: Path, settings: EngineSettings, size: int, seconds: float, engine: str) -> Way:
    """fio's rates by one of its own engines: psync with a job a thread, or libaio with a queue of as many."""
    jobs, depth = (settings.threads, 1) if engine == "psync" else (1, settings.threads)
    part = size // jobs // settings.block * settings.block
    found: Way = {}
    for way in ("write", "read"):
        asked = [
            command, "--name=longstraw", f"--filename={file}", f"--ioengine={engine}", "--direct=1",
            f"--rw={way}", f"--bs={settings.block}", f"--numjobs={jobs}", f"--iodepth={depth}", f"--size={part}",
            f"--offset_increment={part}", "--time_based", f"--runtime={seconds}", "--group_reporting",
            "--output-format=json", "--thread", "--overwrite=1",
        ]  # fmt: skip
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(asked)} ended with {done.returncode}: {done.stderr or done.stdout}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        found[way] = float(job[way]["bw_bytes"])
        # Percentages of the jobs' time, averaged over them.
        busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job[way]["runtime"] / 1e3 * jobs
        found[f"{way}_cpu"] = busy / (job[way]["io_bytes"] / 1e9)
    return found


def dd(file: Path, settings: EngineSettings, size: int) -> Way:
    """dd's rates, one process a thread, each on a part of the file."""
    blocks = size // settings.threads // settings.block
    common = [f"bs={settings.block}", f"count={blocks}", "status=none"]

    def run(make: Callable[[int], list[str]]) -> tuple[float, float]:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        children = [subprocess.Popen(make(part)) for part in range(settings.threads)]
        assert [child.wait() for child in children] == [0] * settings.threads
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        moved = blocks * settings.block * settings.threads
        busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return moved / wall, busy / (moved / 1e9)

    def writer(part: int) -> list[str]:
        return ["dd", "if=/dev/zero", f"of={file}", f"seek={part * blocks}", "conv=notrunc", "oflag=direct", *common]

    def reader(part: int) -> list[str]:
        return ["dd", f"if={file}", "of=/dev/null", f"skip={part * blocks}", "iflag=direct", *common]

    write, write_cpu = run(writer)
    read, read_cpu = run(reader)
    return {"write": write, "read": read, "write_cpu": write_cpu, "read_cpu": read_cpu}


class GivenFile(SpoolFile):
    """The file of the process that started this one, by its descriptors."""

    def __init__(self, path: Path, size: int, buffered: int, used: int) -> None:
        self.path, self.size, self.reclaimed = path, size, []
        self._buffered, self._fd, self._left_behind = buffered, used, None
        self.direct = used != buffered


def apart(
    name: str, cases: Sequence[EngineSettings], file: SpoolFile, size: int, seconds: float
) -> tuple[list[Way], str, str | None]:
    """One engine's rates in each case, measured by a process of its own: rates, how it works, and why not all."""
    settings = [(one.threads, one.block, one.requests) for one in cases]
    asked = json.dumps([name, settings, str(file.path), size, file._buffered, file._fd, seconds])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.disk_engines", "--one-engine", asked],
        stdout=subprocess.PIPE, text=True, check=False, pass_fds=(file._buffered, file._fd),
    )  # fmt: skip
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    ways = [line["way"] for line in said if "way" in line]
    how = next((line["how"] for line in said if "how" in line), "")
    lost = next((line["refused"] for line in said if "refused" in line), None)
    if done.returncode < 0:
        lost = f"its process died by {signal.Signals(-done.returncode).name}"
    elif done.returncode > 0:
        lost = f"its process ended with {done.returncode}"
    return ways, how, lost


def one_engine(asked: str) -> None:
    """What `apart` starts: a line as each figure comes."""

    def say(**line: object) -> None:
        print(json.dumps(line), flush=True)

    name, cases, path, size, buffered, used, seconds = json.loads(asked)
    file = GivenFile(Path(path), size, buffered, used)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        for threads, block, depth in cases:
            settings = EngineSettings(threads=threads, block=block, queue_depth=depth)
            engine = make_here(name, file, settings, device)
            say(how=engine.describe())
            found = measure(engine, settings, size, seconds)
            engine.close()
            rates = {"write": found.write, "read": found.read}
            say(way=rates | {"write_cpu": found.write_cpu, "read_cpu": found.read_cpu})
    except (ConfigError, CapacityError) as refusal:
        say(refused=str(refusal).removeprefix("tiers[i].engine: "))


def make_here(name: str, file: SpoolFile, settings: EngineSettings, device: torch.device) -> DiskEngine:
    """An engine of this process, which is there for nothing else."""
    if name != "deepspeed":
        return make_engine(name, file, settings, device)  # type: ignore[arg-type]
    if not is_built():
        raise ConfigError("its async_io is not built; `longstraw doctor` says how")
    return DeepSpeedEngine(file, settings, device, expendable=True)


@contextlib.contextmanager
def written_file(folder: Path, size: int) -> Iterator[SpoolFile]:
    """The tier's own kind of file, with every block written."""
    file = SpoolFile(folder)
    try:
        file.grow(size)
        block = EngineSettings().block
        engine = make_engine("posix", file, EngineSettings(), torch.device("cpu"))
        buffer = engine.make_buffer(block)
        buffer.memory.random_()
        for at in range(0, size - block + 1, block):
            engine.write(buffer, 0, block, at)
        buffer.close()
        yield file
    finally:
        file.close()


class Alternating:
    """Rounds of everything, every other time backwards: what each run gave, and what became of those that broke off."""

    def __init__(self) -> None:
        self.found: dict[str, list[Way]] = {}
        self.lost: dict[str, str] = {}

    def run(self, runs: dict[str, Callable[[], Iterable[tuple[str, Way | str]]]], rounds: int) -> None:
        """A run gives figures by label, or the reason why a label has none. One that gave a reason is not run again."""
        for turn in range(rounds):
            for one in list(runs) if turn % 2 == 0 else list(reversed(runs)):
                if one in self.lost:
                    continue
                for label, result in runs[one]():
                    if isinstance(result, str):
                        self.lost[one] = self.lost[label] = f"{result}, in round {turn + 1} of {rounds}"
                    else:
                        self.found.setdefault(label, []).append(result)

    def medians(self) -> dict[str, Way]:
        return {
            one: {key: statistics.median(way[key] for way in ways) for key in ways[0]}
            for one, ways in self.found.items()
        }


def compare(given: argparse.Namespace, file: SpoolFile, record: Record) -> None:
    """Every engine and the references, on one file."""
    settings = EngineSettings(threads=given.threads, block=given.block, queue_depth=given.queue_depth)
    same = Path(file.reopen_path.replace("self", str(os.getpid())))
    references: dict[str, Callable[[], Way]] = {}
    if given.fio is not None:
        for engine in ("psync", "libaio"):
            references[f"fio {engine}"] = lambda e=engine: fio(given.fio, same, settings, given.size, given.seconds, e)  # type: ignore[misc]
    else:
        references["dd"] = lambda: dd(same, settings, given.size)
    described = dict.fromkeys(references, "reference")

    def ours(name: str) -> Iterator[tuple[str, Way | str]]:
        ways, how, lost = apart(name, [settings], file, given.size, given.seconds)
        described[name] = how or described.get(name, "")
        yield from ((name, way) for way in ways)
        if lost is not None:
            yield name, lost

    runs: dict[str, Callable[[], Iterable[tuple[str, Way | str]]]] = {}
    for one, reference in references.items():
        runs[one] = lambda one=one, reference=reference: [(one, reference())]  # type: ignore[misc]
    for name in ENGINES:
        runs[name] = lambda name=name: ours(name)  # type: ignore[misc]
    alternating = Alternating()
    alternating.run(runs, given.rounds)
    medians = alternating.medians()
    best = {way: max(medians[one][way] for one in references) for way in ("read", "write")}
    for one, values in medians.items():
        shares = {f"{way}_share": values[way] / best[way] for way in best}
        record.add(
            "disk engine", engine=one, how=described[one], size=given.size, block=given.block, threads=given.threads,
            rounds=len(alternating.found[one]), load=os.getloadavg()[0], **values, **shares,
        )  # fmt: skip
    for one, why in alternating.lost.items():
        record.add("disk engine", engine=one, lost=why)


def sweep(given: argparse.Namespace, file: SpoolFile, record: Record) -> None:
    """Engine posix over threads and blocks; engines with a queue over its depth."""
    given_at = {"threads": given.threads, "block": given.block}
    cases = {
        name: [EngineSettings(**given_at, queue_depth=depth) for depth in SWEEP_DEPTHS]
        for name in ENGINES
        if name != "posix"
    }
    cases["posix"] = [
        EngineSettings(threads=threads, block=parse_bytes(block))
        for threads, block in itertools.product(SWEEP_THREADS, SWEEP_BLOCKS)
    ]

    def label(name: str, one: EngineSettings) -> str:
        return f"{name}, {one.threads} threads, {format_bytes(one.block)}, depth {one.queue_depth}"

    def ours(name: str) -> Iterator[tuple[str, Way | str]]:
        ways, _, lost = apart(name, cases[name], file, given.size, given.seconds / 4)
        # In order: what is missing is at the end.
        yield from zip((label(name, one) for one in cases[name]), ways, strict=False)
        if lost is not None:
            yield name, lost

    alternating = Alternating()
    alternating.run({name: lambda name=name: ours(name) for name in cases}, given.rounds)  # type: ignore[misc]
    medians = alternating.medians()
    print_table(medians)
    for name, each in cases.items():
        for one in each:
            if label(name, one) in medians:
                asked = {"threads": one.threads, "block": one.block, "queue_depth": one.queue_depth}
                record.add("disk sweep", engine=name, **asked, **medians[label(name, one)])
    for name, why in alternating.lost.items():
        record.add("disk sweep", engine=name, lost=why)


def print_table(medians: dict[str, Way]) -> None:
    """GB/s and CPU seconds a GB, one row a case."""
    rows: list[Sequence[str]] = [("engine, threads, block, queue depth", "read", "CPU", "write", "CPU")]
    for label, way in medians.items():
        rates = (f"{way['read'] / 1e9:.2f} GB/s", f"{way['read_cpu']:.2f} s/GB")
        rows.append((label, *rates, f"{way['write'] / 1e9:.2f} GB/s", f"{way['write_cpu']:.2f} s/GB"))
    for row in rows:
        print(f"{row[0]:<44}" + "".join(f"{cell:>14}" for cell in row[1:]), flush=True)


def find_fio(given: str | None) -> str | None:
    """The program to run, or None where none was named and none is installed."""
    found = shutil.which(given or "fio")
    if given is not None and found is None:
        raise ConfigError(f"--fio {given}: no program that can be run; name fio's file, or leave it out")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--size", type=parse_bytes, default="4GiB")
    parser.add_argument("--block", type=parse_bytes, default="4MiB")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--queue-depth", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fio")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--one-engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one_engine is not None:
        return one_engine(given.one_engine)
    if given.path is None:
        parser.error("--path FOLDER is needed: a folder on the disk to measure")
    given.fio = find_fio(given.fio)
    with tempfile.TemporaryDirectory(dir=given.path) as name, written_file(Path(name), given.size) as file:
        (sweep if given.sweep else compare)(given, file, Record(given.out))


if __name__ == "__main__":
    main()
