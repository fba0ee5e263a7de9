"""docs/tiers.md: the outputs in it are those of the commands above them."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from longstraw import Runtime
from longstraw.cli import main
from longstraw.errors import CapacityError
from longstraw.stress import StressOptions
from longstraw.stress.workload import build_model, largest_group

TEXT = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text(encoding="utf-8")
CASE = r"^`(\w+\.yaml)`:.*?```yaml\n(.*?)```\n\n```console\n\$ (.*?)\n(.*?)```"
CASES = re.findall(CASE, TEXT, re.DOTALL | re.MULTILINE)


def words(text: str) -> list[str]:
    """The words, wherever the terminal broke the lines; the size of a machine is its own."""
    return re.sub(r"has [\d.]+ \w+ in all", "has SIZE in all", " ".join(text.split())).split()


def test_all_are_here() -> None:
    assert [name for name, *_ in CASES] == ["bad.yaml", "broken.yaml", "greedy.yaml", "missing.yaml", "ignored.yaml"]


@pytest.mark.parametrize(("name", "yaml", "command", "output"), CASES, ids=[case[0] for case in CASES])
def test_output(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    yaml: str,
    command: str,
    output: str,
) -> None:
    (tmp_path / name).write_text(yaml)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words(capsys.readouterr().err) == words(output)


def test_a_prompt_that_does_not_fit() -> None:
    (expected,) = re.findall(r"```text\nCapacityError: (.*?)```", TEXT, re.DOTALL)
    options = StressOptions(prompt_tokens=512)
    tiers = [{"kind": "device", "budget": "64KiB"}, {"kind": "host", "budget": "128KiB"}]
    with (
        Runtime(build_model(options, torch.device("cpu")), tiers=tiers) as runtime,
        pytest.raises(CapacityError) as caught,
        runtime.transaction(largest_group(options).prompt),
    ):
        pass
    assert str(caught.value) == expected.strip()
