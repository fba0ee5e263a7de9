"""The disk engines' benchmark: an engine whose process dies loses its own figures only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.disk_engines import Alternating, apart
from longstraw.pagers.engines import EngineSettings
from longstraw.pagers.spool import SpoolFile

WAY = {"read": 1.0, "write": 2.0, "read_cpu": 0.1, "write_cpu": 0.2}
SMALL = EngineSettings(threads=2, block=256 << 10)


def test_an_engine_that_dies_loses_its_own_figures_only() -> None:
    alternating, calls = Alternating(), []

    def works() -> list[tuple[str, dict[str, float] | str]]:
        calls.append("works")
        return [("works", {"read": float(len(calls))})]

    def dies() -> list[tuple[str, dict[str, float] | str]]:
        calls.append("dies")
        first = [("dies", {"read": 7.0})]
        return first if calls.count("dies") == 1 else [*first, ("dies", "its process died by SIGSEGV")]

    alternating.run({"works": works, "dies": dies}, 4)
    assert calls == ["works", "dies", "dies", "works", "works", "works"]
    assert alternating.medians() == {"works": {"read": 4.5}, "dies": {"read": 7.0}}
    assert alternating.lost == {"dies": "its process died by SIGSEGV, in round 2 of 4"}


def test_figures_of_a_process_that_died_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\necho noise\n"
        """echo '{"how": "by hand"}'\n"""
        """echo '{"way": {"read": 1.0, "write": 2.0, "read_cpu": 0.1, "write_cpu": 0.2}}'\nkill -SEGV $$\n"""
    )
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    (tmp_path / "disk").mkdir()
    file = SpoolFile(tmp_path / "disk")
    assert apart("posix", [SMALL, SMALL], file, 1 << 20, 0.01) == (
        [WAY],
        "by hand",
        "its process died by SIGSEGV",
    )
    file.close()


def test_an_engine_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path)
    file.grow(1 << 20)
    ways, how, lost = apart("posix", [SMALL, SMALL], file, 1 << 20, 0.01)
    assert lost is None
    assert how.startswith("preadv/pwritev")
    assert len(ways) == 2
    assert min(way[key] for way in ways for key in ("read", "write")) > 1e6
    file.close()
