"""The demo's reward: can be checked, and is graded, so that a group's responses differ in it."""

from __future__ import annotations

import re

DIGITS, ENDED, BRIEF = 0.7, 0.2, 0.1


def reward(answer: str, code: str, *, tokens: int, max_tokens: int, ended: bool) -> float:
    """Between 0 and 1 for one answer.

    0.7 for the code: the longest run of digits that a number in the answer shares with it from its start, as
    a share of its length (each digit too many takes one away). 0.2 for an answer that ended by itself. 0.1
    for its brevity, and only if the code is right, so that saying nothing gains nothing.
    """
    best = max((_common_start(number, code) for number in re.findall(r"\d+", answer)), default=0.0)
    brief = BRIEF * (1 - tokens / max_tokens) if best == 1 else 0.0
    return DIGITS * best + (ENDED if ended else 0.0) + brief


def _common_start(number: str, code: str) -> float:
    same = 0
    for got, want in zip(number, code, strict=False):
        if got != want:
            break
        same += 1
    surplus = max(len(number) - len(code), 0)
    return max(same - surplus, 0) / len(code)
