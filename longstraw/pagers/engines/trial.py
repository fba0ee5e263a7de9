"""Does what an engine will do in a process of its own first, where what the engine does not check can end only that."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from longstraw.errors import CapacityError, ConfigError
from longstraw.pagers.engines.protocol import Buffer, DiskEngine, EngineSettings
from longstraw.pagers.spool import SECTOR, SpoolFile

PATIENCE_SECONDS = 600.0
"""Starting Python and torch on a busy machine takes long; a trial that hangs must end all the same."""
_REFUSED = 3
NO_PGETEVENTS = "the kernel has no io_pgetevents, or the container forbids it"
_PGETEVENTS = {"x86_64": 333, "aarch64": 292}
_passed: set[tuple[int, EngineSettings, str]] = set()


def try_apart(path: Path, settings: EngineSettings, device: torch.device) -> None:
    """Have another process make engine deepspeed in `path`, and write and read a block on each of its threads.

    Once for each filesystem, settings and kind of device. The other process has CUDA if this one's tier has.

    Raises ConfigError, with the signal and what was said last, if that process did not end well.
    """
    key = (path.stat().st_dev, settings, device.type)
    if key in _passed:
        return
    asked = json.dumps([str(path), settings.threads, settings.block, settings.requests, str(device)])
    # What this process can import is not only what its environment says: a script's own folder, for one.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-c", "import sys; from longstraw.pagers.engines.trial import main; main(sys.argv[1])"]
    try:
        done = subprocess.run(
            [*command, asked], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as cause:
        raise ConfigError(
            f"tiers[i].engine: deepspeed was tried in a process of its own, which had not ended after "
            f"{PATIENCE_SECONDS:.0f} s; set engine to posix"
        ) from cause
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode == 0:
        _passed.add(key)
        return
    if done.returncode == _REFUSED:
        raise ConfigError(said[-1])
    if done.returncode < 0:
        how = f"died by {signal.Signals(-done.returncode).name}"
        said = [line for line in said if "failed" in line]
    else:
        how = f"ended with {done.returncode}"
        said = said[-1:]
    reasons = "; ".join([*([NO_PGETEVENTS] if lacks_pgetevents() else []), *said]) or "it said nothing"
    raise ConfigError(
        f"tiers[i].engine: deepspeed was tried in a process of its own, which {how}, as this one would have "
        f"({reasons}); set engine to posix"
    )


def lacks_pgetevents() -> bool:
    """Whether the call by which DeepSpeed waits is refused as such; a kernel that has it calls these arguments bad."""
    number = _PGETEVENTS.get(platform.machine())
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(number, *[ctypes.c_long(0)] * 6)
    return ctypes.get_errno() in (errno.ENOSYS, errno.EPERM)


def main(asked: str) -> None:
    """What the other process runs. Exits with a code of its own after an error that is to be passed on."""
    # Only here: that module imports this one.
    from longstraw.pagers.engines.deepspeed import DeepSpeedEngine

    path, threads, block, requests, name = json.loads(asked)
    settings, device = EngineSettings(threads=threads, block=block, queue_depth=requests), torch.device(name)
    try:
        if device.type == "cuda":
            torch.empty(1, device=device)
        file = SpoolFile(Path(path))
        try:
            file.grow(threads * block)
            engine = DeepSpeedEngine(file, settings, device, expendable=True)
            exercise(engine, settings)
            engine.close()
        finally:
            file.close()
    except (ConfigError, CapacityError) as refusal:
        print(str(refusal).replace("\n", " "), file=sys.stderr)
        raise SystemExit(_REFUSED) from None


def exercise(engine: DiskEngine, settings: EngineSettings) -> None:
    """On each thread at once: write a block and read it back, whole, from its middle on, and its first sector.

    Raises OSError if other bytes come back.
    """

    def work(lane: int) -> None:
        buffer, at, half = buffers[lane], lane * settings.block, settings.block // 2 // SECTOR * SECTOR
        sent = torch.randint(256, (settings.block,), dtype=torch.uint8, device="cpu")
        for start, stop in ((0, settings.block), (half, settings.block), (0, min(SECTOR, settings.block))):
            buffer.memory.copy_(sent)
            engine.write(buffer, start, stop, at + start)
            buffer.memory.zero_()
            engine.read(buffer, start, stop, at + start)
            if not torch.equal(buffer.memory[start:stop], sent[start:stop]):
                raise OSError(errno.EIO, f"bytes {start}:{stop} of a block came back as others")

    buffers: list[Buffer] = []
    try:
        buffers += [engine.make_buffer(settings.block) for _ in range(settings.threads)]
        with ThreadPoolExecutor(settings.threads, "longstraw-trial") as pool:
            list(pool.map(work, range(settings.threads)))
    finally:
        for buffer in buffers:
            buffer.close()
