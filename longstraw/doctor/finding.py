"""What an examination finds: a fact about this machine, how grave it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """GOOD: as it should be. NOTE: works, but slower or less safe than it could. BAD: something will fail."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fact. `fix` is the next thing to do, and empty only where nothing is wrong."""

    area: str
    level: Level
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.level is not Level.GOOD), self


def good(area: str, text: str) -> Finding:
    return Finding(area=area, level=Level.GOOD, text=text)


def note(area: str, text: str, fix: str) -> Finding:
    return Finding(area=area, level=Level.NOTE, text=text, fix=fix)


def bad(area: str, text: str, fix: str) -> Finding:
    return Finding(area=area, level=Level.BAD, text=text, fix=fix)
