"""Widths that memory running out taught: what they cap, and what they are not handed on to."""

from __future__ import annotations

import pytest

from longstraw.runtime.narrowing import Narrowing
from longstraw.runtime.sizing import GraphSize


def test_nothing_is_narrowed_at_first() -> None:
    size = GraphSize(tokens=100, checkpoint=True)
    assert Narrowing().lane(size) is size
    assert Narrowing().chunk(size, 1) is size


@pytest.mark.parametrize(("learned", "shortest", "tokens"), [(40, 1, 40), (40, 60, 60), (40, 200, 100), (300, 1, 100)])
def test_a_short_prompts_chunks_do_not_cut_a_long_one_to_pieces(learned: int, shortest: int, tokens: int) -> None:
    size = GraphSize(tokens=100, checkpoint=True)
    assert Narrowing(chunk_tokens=learned).chunk(size, shortest) == GraphSize(tokens=tokens, checkpoint=True)


def test_the_narrower_of_two_is_learned() -> None:
    narrowing = Narrowing(lane_tokens=8)
    copy = narrowing.copy()
    copy.learn(Narrowing(lane_tokens=9, chunk_tokens=5))
    assert copy == Narrowing(lane_tokens=8, chunk_tokens=5)
    assert narrowing == Narrowing(lane_tokens=8)


def test_twice_the_width_is_tried_after_eight_calm_transactions() -> None:
    narrowing = Narrowing()
    narrowing.ended(Narrowing(lane_tokens=6, chunk_tokens=5), ran_out=True)
    for _ in range(7):
        narrowing.ended(Narrowing(lane_tokens=6), ran_out=False)
    assert (narrowing.lane_tokens, narrowing.chunk_tokens) == (6, 5)
    narrowing.ended(Narrowing(), ran_out=False)
    assert (narrowing.lane_tokens, narrowing.chunk_tokens, narrowing.calm) == (12, 10, 0)


def test_running_out_again_starts_the_count_anew() -> None:
    narrowing = Narrowing(lane_tokens=6)
    for ran_out in (False,) * 7 + (True,) + (False,) * 7:
        narrowing.ended(Narrowing(), ran_out=ran_out)
    assert narrowing.lane_tokens == 6
