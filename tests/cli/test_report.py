"""`longstraw report` on the report of a transaction that ran."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from longstraw import Runtime
from longstraw.errors import ConfigError
from tests.parity.models import build, make_group, replay_group, settings


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a step whose pages lay on disk."""
    folder, group = tmp_path_factory.mktemp("run"), make_group(61)
    tiers = [{"kind": "nvme", "path": str(folder), "budget": "64MiB"}]
    with Runtime(build("qwen3"), settings(tiers=tiers)) as runtime, runtime.transaction(group.prompt) as txn:
        replay_group(txn, group)
    txn.report.save(folder / "run.json")
    return folder / "run.json"


def test_tables(invoke: Callable[..., Any], saved: Path) -> None:
    result = invoke("report", saved)
    assert result.exit_code == 0, result.output
    for word in ("capture", "sweep", "nvme", "waits for pages", "exact gradient: prompt 61 in 3 chunks"):
        assert word in result.stdout


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_pictures(invoke: Callable[..., Any], saved: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"run.{suffix}"
    result = invoke("report", saved, "--plot", out)
    assert result.exit_code == 0, result.output
    text = out.read_text()
    picture = ElementTree.fromstring(text[text.index("<svg") :])
    assert any("nvme read" in str(part.text) for part in picture.iter())


def test_a_report_inside_a_record(invoke: Callable[..., Any], saved: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"figure": "step", "report": json.loads(saved.read_text())}))
    assert invoke("report", record).stdout == invoke("report", saved).stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "no JSON that can be read"), ("[]", "no report of this version"), ('{"seconds": {}}', "'stall_seconds'")],
)
def test_files_that_are_no_report(invoke: Callable[..., Any], tmp_path: Path, text: str, words: str) -> None:
    run = tmp_path / "run.json"
    run.write_text(text)
    result = invoke("report", run)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_pictures_of_other_kinds_are_refused(invoke: Callable[..., Any], saved: Path, tmp_path: Path) -> None:
    result = invoke("report", saved, "--plot", tmp_path / "run.png")
    assert isinstance(result.exception, ConfigError)
    assert "name a .svg or a .html file" in str(result.exception)
