"""Each engine of the nvme tier against fio (or dd) on one disk: the same block size, depth and file size, CPU use too.

    python -m benchmarks.disk_engines --path /scratch --size 4GiB --block 4MiB --threads 4 --seconds 5

fio runs `threads` jobs of synchronous direct I/O, which is what engine posix does, and one job of libaio with a queue
of `threads`. Without fio, dd writes and reads with oflag/iflag=direct, `threads` of them side by side. Rates are in
bytes a second; each engine's is also given as a share of the best of the references. Write, then read, a round each;
`--rounds` of them alternate, and the median counts, since shared disks vary.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common import Record
from longstraw.config import parse_bytes
from longstraw.pagers.engines import EngineSettings, Rates, engines_here, make_engine, measure
from longstraw.pagers.spool import SpoolFile

Way = dict[str, float]
"""`read` and `write` in bytes a second, `read_cpu` and `write_cpu` in CPU seconds for 10^9 bytes."""


def fio(folder: Path, settings: EngineSettings, size: int, seconds: float, engine: str) -> Way:
    """fio's rates by one of its own engines: psync with a job a thread, or libaio with a queue of as many."""
    jobs, depth = (settings.threads, 1) if engine == "psync" else (1, settings.threads)
    found: Way = {}
    for way in ("write", "read"):
        command = [
            "fio", "--name=longstraw", f"--filename={folder / 'fio'}", f"--ioengine={engine}", "--direct=1",
            f"--rw={way}", f"--bs={settings.block}", f"--numjobs={jobs}", f"--iodepth={depth}",
            f"--size={size // jobs}", "--offset_increment=" + str(size // jobs), "--time_based",
            f"--runtime={seconds}", "--group_reporting", "--output-format=json", "--thread", "--refill_buffers",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        found[way] = float(job[way]["bw_bytes"])
        busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job[way]["runtime"] / 1e3 * jobs
        found[f"{way}_cpu"] = busy / (job[way]["io_bytes"] / 1e9)
    return found


def dd(folder: Path, settings: EngineSettings, size: int) -> Way:
    """dd's rates, one process a thread, each on a part of one file."""
    file = folder / "dd"
    blocks = size // settings.threads // settings.block
    with file.open("wb") as out:
        os.posix_fallocate(out.fileno(), 0, size)
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


def ours(name: str, folder: Path, settings: EngineSettings, size: int, seconds: float, device: torch.device) -> Way:
    """One engine's rates."""
    file = SpoolFile(folder)
    try:
        file.grow(size)
        engine = make_engine(name, file, settings, device)  # type: ignore[arg-type]
        found: Rates = measure(engine, settings, size, seconds)
        engine.close()
    finally:
        file.close()
    return {"write": found.write, "read": found.read, "write_cpu": found.write_cpu, "read_cpu": found.read_cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--size", type=parse_bytes, default="4GiB")
    parser.add_argument("--block", type=parse_bytes, default="4MiB")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    given = parser.parse_args()
    settings = EngineSettings(threads=given.threads, block=given.block)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    record = Record(given.out)
    with tempfile.TemporaryDirectory(dir=given.path) as name:
        folder = Path(name)
        runs: dict[str, Callable[[], Way]] = {}
        if shutil.which("fio"):
            for engine in ("psync", "libaio"):
                runs[f"fio {engine}"] = lambda e=engine: fio(folder, settings, given.size, given.seconds, e)  # type: ignore[misc]
        else:
            runs["dd"] = lambda: dd(folder, settings, given.size)
        references = list(runs)
        file = SpoolFile(folder)
        made, refused = engines_here(file, settings, device)
        for engine in made.values():
            engine.close()
        file.close()
        for one in made:
            runs[one] = lambda e=one: ours(e, folder, settings, given.size, given.seconds, device)  # type: ignore[misc]
        found: dict[str, list[Way]] = {one: [] for one in runs}
        for _ in range(given.rounds):
            for one, run in runs.items():
                found[one].append(run())
        medians = {
            one: {key: statistics.median(way[key] for way in ways) for key in ways[0]} for one, ways in found.items()
        }
        best = {way: max(medians[one][way] for one in references) for way in ("read", "write")}
        for one, values in medians.items():
            shares = {f"{way}_share": values[way] / best[way] for way in best}
            record.add("disk engine", engine=one, block=given.block, threads=given.threads, **values, **shares)
        for one, why in refused.items():
            record.add("disk engine", engine=one, refused=why)


if __name__ == "__main__":
    main()
