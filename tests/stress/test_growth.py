"""What a stress run makes of a process that grows, and of one that does not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw.stress import StressOptions, loop, run_stress
from longstraw.stress.growth import STEADY_ERAS, WARM_ERAS, Held, grown

MIB = 1 << 20
ERAS = 12


def eras(**series: Callable[[int], int]) -> list[Held]:
    """What is held after each of ERAS runtimes; of what is not given, always the same."""
    steady = {"resident_bytes": lambda era: 400 * MIB, "device_bytes": lambda era: 0, "files": lambda era: 6}
    chosen = {**steady, "threads": lambda era: 1, **series}
    return [Held(**{what: of(era) for what, of in chosen.items()}) for era in range(ERAS)]


def test_nothing_grows() -> None:
    assert grown(eras()) == []


@pytest.mark.parametrize(
    "series",
    [
        {"resident_bytes": lambda era: (400 + 100 * (era > 0)) * MIB},
        {"resident_bytes": lambda era: (400 + 60 * (era % 3 == 0)) * MIB},
        {"files": lambda era: 6 + (era == ERAS - 1)},
        {"threads": lambda era: 1 + (era % 2)},
        {"resident_bytes": lambda era: (400 + 2 * era) * MIB},
    ],
    ids=["a cache of a warm process", "up and down", "a file that is open now", "threads that come and go", "2 MiB"],
)
def test_what_is_no_leak(series: dict[str, Any]) -> None:
    assert grown(eras(**series)) == []


@pytest.mark.parametrize(
    ("series", "words"),
    [
        (
            {"resident_bytes": lambda era: (400 + 8 * era) * MIB},
            f"bytes of resident memory rise from runtime to runtime: at most {432 * MIB} at first, {472 * MIB} or more",
        ),
        ({"device_bytes": lambda era: 5 * MIB * era}, "bytes of CUDA memory rise"),
        ({"files": lambda era: 6 + era // 2}, "open files rise from runtime to runtime: at most 8 at first, 10 or"),
        ({"threads": lambda era: 1 + era}, "threads rise"),
        ({"resident_bytes": lambda era: (400 + 300 * (era > 4)) * MIB}, "are held between runtimes, once it was"),
    ],
)
def test_what_is_a_leak(series: dict[str, Any], words: str) -> None:
    found = grown(eras(**series))
    assert len(found) == 1
    assert words in found[0]


def test_too_few_runtimes_say_nothing() -> None:
    leak = eras(files=lambda era: era, device_bytes=lambda era: 100 * MIB * era)
    assert grown(leak[:WARM_ERAS]) == []
    assert [words.split()[1] for words in grown(leak[: WARM_ERAS + 1])] == ["bytes"]
    assert grown(eras(files=lambda era: era)[: STEADY_ERAS - 1]) == []


# A real process


@pytest.fixture
def leak(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Leaks a little of something at each call, until the test is over."""
    over, files, held, threads = threading.Event(), [], [], []

    def call() -> None:
        if request.param == "open files":
            files.append(os.open(os.devnull, os.O_RDONLY))
        elif request.param == "threads":
            threads.append(threading.Thread(target=over.wait))
            threads[-1].start()
        elif request.param == "bytes of resident memory":
            held.append(torch.ones(12 * MIB, dtype=torch.uint8))

    yield call
    over.set()
    for thread in threads:
        thread.join()
    for file in files:
        os.close(file)


@pytest.mark.stress
@pytest.mark.parametrize(
    ("leak", "words"),
    [
        ("open files", "open files rise"),
        ("threads", "threads rise"),
        ("bytes of resident memory", "bytes of resident memory rise"),
        ("nothing", None),
    ],
    indirect=["leak"],
)
def test_a_run_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak: Callable[[], None], words: str | None
) -> None:
    update = loop._Run._update

    def leaking(run: Any) -> None:
        leak()
        update(run)

    monkeypatch.setattr(loop._Run, "_update", leaking)
    monkeypatch.setattr(loop, "STEPS_OF_AN_ERA", 1)
    options = StressOptions(
        seconds=100, steps=STEADY_ERAS + 6, prompt_tokens=32, layers=2, fault_rate=0, parity_rate=0, scratch=tmp_path
    )
    result = run_stress(options, torch.device("cpu"))
    assert result.passed is (words is None), result.problems
    assert words is None or words in result.problems[-1]
