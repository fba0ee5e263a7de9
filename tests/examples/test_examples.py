"""The examples run as they are written, with `accelerate launch`, and every framework takes the same steps."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.pool import free_port

ROOT = Path(__file__).parents[2]
SHORT = ("--steps", "1", "--prompt-tokens", "192", "--group", "3", "--response-tokens", "6")
NAMES = {
    "plain": "one process",
    "ddp": "DDP over 2 ranks",
    "fsdp2": "FSDP2 over 2 ranks",
    "zero3": "ZeRO-3 over 2 ranks",
}
SECONDS = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS)]


def commands() -> dict[str, list[str]]:
    """The lines of the example's own docstring, by config file."""
    text = (ROOT / "examples" / "grpo.py").read_text(encoding="utf-8")
    lines = re.findall(r"^ +(accelerate launch .*)$", text, flags=re.MULTILINE)
    return {Path(words[3]).stem: words for words in map(shlex.split, lines)}


def launch(kind: str, *options: str) -> str:
    """Run the command of that config file on the CPU, with shorter prompts. Returns what it printed."""
    program, action, *rest = commands()[kind]
    assert (program, action) == ("accelerate", "launch")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "MASTER_", "TORCHELASTIC_"))}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    port = ["--main_process_port", str(free_port())]
    process = subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", action, *port, *rest, *SHORT, *options],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 15)  # the launcher ends its workers
            process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


def figures(output: str) -> tuple[int, float, float]:
    """Responses, mean reward and gradient norm of the only step."""
    found = re.findall(r"^step 1: (\d+) responses, mean reward (\S+), gradient norm (\S+),", output, flags=re.MULTILINE)
    assert len(found) == 1, output
    return int(found[0][0]), float(found[0][1]), float(found[0][2])


def test_every_config_file_has_a_command() -> None:
    files = {path.stem for path in (ROOT / "examples").glob("*.yaml")}
    assert commands().keys() == files == NAMES.keys()


def test_one_process() -> None:
    output = launch("plain")
    assert NAMES["plain"] in output
    assert figures(output)[0] == 3


def test_two_processes_under_each_framework() -> None:
    kinds = ["ddp", "fsdp2"]
    if importlib.util.find_spec("deepspeed") is not None:
        kinds.append("zero3")
    found = {}
    for kind in kinds:
        output = launch(kind)
        assert NAMES[kind] in output
        found[kind] = figures(output)
    responses, reward, norm = found["ddp"]
    assert responses == 6
    assert norm > 0.01, "all rewards are equal: there is nothing to compare"
    for kind, figure in found.items():
        assert figure == (responses, pytest.approx(reward, abs=1e-3), pytest.approx(norm, rel=1e-2)), (kind, found)


def test_a_rank_without_a_group() -> None:
    assert figures(launch("fsdp2", "--uneven"))[0] == 6
