"""The reward: bounds, its order over answers, and what gains nothing."""

from __future__ import annotations

import pytest

from longstraw.demo.reward import reward


def score(answer: str, *, tokens: int = 10, ended: bool = True) -> float:
    return reward(answer, "7351", tokens=tokens, max_tokens=20, ended=ended)


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("7351", 1.0),
        ("The access code of the archive is 7351.", 1.0),
        ("7352", 0.75),
        ("It is 12 or 7399", 0.5),
        ("1735", 0.0),
        ("73519", 0.75),
        ("735199999", 0.0),
        ("I do not know", 0.0),
        ("", 0.0),
    ],
)
def test_digits(answer: str, share: float) -> None:
    brief = 0.05 if share == 1 else 0.0
    assert score(answer, ended=False) == pytest.approx(0.7 * share + brief)
    assert score(answer) == pytest.approx(0.7 * share + 0.2 + brief)


def test_brevity_counts_only_with_the_right_code() -> None:
    assert score("7351", tokens=5) > score("7351", tokens=15)
    assert score("735", tokens=1) == score("735", tokens=20)


def test_bounds() -> None:
    assert reward("7351", "7351", tokens=1, max_tokens=10**9, ended=True) == pytest.approx(1.0)
    assert reward("", "7351", tokens=20, max_tokens=20, ended=False) == 0.0
