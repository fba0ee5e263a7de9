"""Each engine of the nvme tier against fio (or dd): one file, the same size, block and depth, direct I/O, CPU use.

    python -m benchmarks.disk_engines --path /scratch --size 4GiB --block 4MiB --threads 4 --seconds 2 --fio fio
    python -m benchmarks.disk_engines --path /scratch --size 1GiB --rounds 1 --sweep

fio runs `threads` jobs of synchronous direct I/O, which is what engine posix does, and one job of libaio with a queue
of `threads`. Without fio, dd writes and reads with oflag/iflag=direct, `threads` of them side by side. All go over one
file of `--size` bytes, allocated and written once before, since the first write to a block costs more. Rates are in
bytes a second, CPU in seconds for each 10^9 bytes; each engine's rate is also given as a share of the best reference's.
A shared disk varies: `--rounds` rounds of everything alternate, and medians count.

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
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.common import Record
from longstraw.config import format_bytes, parse_bytes
from longstraw.errors import ConfigError
from longstraw.pagers.engines import EngineSettings, engines_here, make_engine, measure
from longstraw.pagers.spool import SpoolFile

Way = dict[str, float]
"""`read` and `write` in bytes a second, `read_cpu` and `write_cpu` in CPU seconds for 10^9 bytes."""
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


def ours(name: str, file: SpoolFile, settings: EngineSettings, size: int, seconds: float, device: torch.device) -> Way:
    """One engine's rates on the file."""
    engine = make_engine(name, file, settings, device)  # type: ignore[arg-type]
    found = measure(engine, settings, size, seconds)
    engine.close()
    return {"write": found.write, "read": found.read, "write_cpu": found.write_cpu, "read_cpu": found.read_cpu}


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


def alternate(runs: dict[str, Callable[[], Way]], rounds: int) -> dict[str, Way]:
    """Medians of each, with the order turned round every other time."""
    found: dict[str, list[Way]] = {one: [] for one in runs}
    for turn in range(rounds):
        for one in list(runs) if turn % 2 == 0 else reversed(runs):
            found[one].append(runs[one]())
    return {one: {key: statistics.median(way[key] for way in ways) for key in ways[0]} for one, ways in found.items()}


def compare(given: argparse.Namespace, file: SpoolFile, device: torch.device, record: Record) -> None:
    """Every engine and the references, on one file."""
    settings = EngineSettings(threads=given.threads, block=given.block, queue_depth=given.queue_depth)
    same = Path(file.reopen_path.replace("self", str(os.getpid())))
    runs: dict[str, Callable[[], Way]] = {}
    if given.fio is not None:
        for engine in ("psync", "libaio"):
            runs[f"fio {engine}"] = lambda e=engine: fio(given.fio, same, settings, given.size, given.seconds, e)  # type: ignore[misc]
    else:
        runs["dd"] = lambda: dd(same, settings, given.size)
    references = list(runs)
    made, refused = engines_here(file, settings, device)
    described = {}
    for name, engine_ in made.items():
        described[name] = engine_.describe()
        engine_.close()
        runs[name] = lambda e=name: ours(e, file, settings, given.size, given.seconds, device)  # type: ignore[misc]
    medians = alternate(runs, given.rounds)
    best = {way: max(medians[one][way] for one in references) for way in ("read", "write")}
    for one, values in medians.items():
        shares = {f"{way}_share": values[way] / best[way] for way in best}
        record.add(
            "disk engine", engine=one, how=described.get(one, "reference"), size=given.size, block=given.block,
            threads=given.threads, rounds=given.rounds, **values, **shares,
        )  # fmt: skip
    for one, why in refused.items():
        record.add("disk engine", engine=one, refused=why)


def sweep(given: argparse.Namespace, file: SpoolFile, device: torch.device, record: Record) -> None:
    """Engine posix over threads and blocks; engines with a queue over its depth."""
    seconds = given.seconds / 4
    runs: dict[str, Callable[[], Way]] = {}
    cases: dict[str, dict[str, object]] = {}

    def add(engine: str, settings: EngineSettings) -> None:
        label = f"{engine}, {settings.threads} threads, {format_bytes(settings.block)}, depth {settings.queue_depth}"
        cases[label] = {
            "engine": engine, "threads": settings.threads, "block": settings.block, "queue_depth": settings.queue_depth
        }  # fmt: skip
        runs[label] = lambda: ours(engine, file, settings, given.size, seconds, device)

    for threads, block in itertools.product(SWEEP_THREADS, SWEEP_BLOCKS):
        add("posix", EngineSettings(threads=threads, block=parse_bytes(block)))
    made, _ = engines_here(file, EngineSettings(), device)
    for name, engine in made.items():
        engine.close()
        if name != "posix":
            for depth in SWEEP_DEPTHS:
                add(name, EngineSettings(threads=given.threads, block=given.block, queue_depth=depth))
    medians = alternate(runs, given.rounds)
    print_table(medians)
    for label, values in medians.items():
        record.add("disk sweep", **cases[label], **values)


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
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--size", type=parse_bytes, default="4GiB")
    parser.add_argument("--block", type=parse_bytes, default="4MiB")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--queue-depth", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fio")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out")
    given = parser.parse_args()
    given.fio = find_fio(given.fio)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory(dir=given.path) as name, written_file(Path(name), given.size) as file:
        (sweep if given.sweep else compare)(given, file, device, Record(given.out))


if __name__ == "__main__":
    main()
