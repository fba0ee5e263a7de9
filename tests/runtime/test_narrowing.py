"""Widths that memory running out taught: what they cap, and what they are not handed on to."""

from __future__ import annotations

import pytest

from longstraw.runtime.narrowing import Narrowing, Widths
from longstraw.runtime.sizing import GraphSize


def test_nothing_is_narrowed_at_first() -> None:
    size = GraphSize(tokens=100, checkpoint=True)
    widths, trial = Narrowing().begin()
    assert widths == trial == Widths()
    assert widths.lane(size) == widths.chunk(size, 1) == size


@pytest.mark.parametrize(("learned", "shortest", "tokens"), [(40, 1, 40), (40, 60, 60), (40, 200, 100), (300, 1, 100)])
def test_a_short_prompts_chunks_do_not_cut_a_long_one_to_pieces(learned: int, shortest: int, tokens: int) -> None:
    size = GraphSize(tokens=100, checkpoint=True)
    assert Widths(chunk_tokens=learned).chunk(size, shortest) == GraphSize(tokens=tokens, checkpoint=True)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_checkpointing_that_memory_asked_for_stays(learned: bool, planned: bool) -> None:
    size = GraphSize(tokens=100, checkpoint=planned)
    within = Widths(lane_tokens=40, checkpoint=learned).lane(size)
    assert within == GraphSize(tokens=40, checkpoint=learned or planned)


def test_the_narrower_of_two_is_learned() -> None:
    widths = Widths(lane_tokens=8)
    copy = widths.copy()
    copy.learn(Widths(lane_tokens=9, chunk_tokens=5, checkpoint=True))
    assert copy == Widths(lane_tokens=8, chunk_tokens=5, checkpoint=True)
    assert widths == Widths(lane_tokens=8)


def trained(narrowing: Narrowing, proven: Widths | None = None, *, ran_out: bool = False) -> None:
    narrowing.ended(proven or Widths(), ran_out=ran_out, replayed=True, swept=True)


def test_twice_the_width_is_tried_after_eight_calm_transactions() -> None:
    narrowing = Narrowing()
    learned = Widths(lane_tokens=6, chunk_tokens=5, checkpoint=True)
    trained(narrowing, learned, ran_out=True)
    for _ in range(7):
        trained(narrowing, Widths(lane_tokens=6))
    assert narrowing.widths == learned
    trained(narrowing)
    assert narrowing.widths == Widths(lane_tokens=12, chunk_tokens=10)
    assert (narrowing.calm_lanes, narrowing.calm_chunks) == (0, 0)


def test_running_out_again_starts_the_count_anew() -> None:
    narrowing = Narrowing()
    narrowing.widths.lane_tokens = 6
    for ran_out in (False,) * 7 + (True,) + (False,) * 7:
        trained(narrowing, ran_out=ran_out)
    assert narrowing.widths.lane_tokens == 6


def test_scoring_says_nothing_of_graphs() -> None:
    """A model that is trained between transactions that only score keeps the width that its graphs need."""
    narrowing = Narrowing()
    trained(narrowing, Widths(lane_tokens=6, chunk_tokens=5), ran_out=True)
    for _ in range(3):
        for _ in range(20):
            narrowing.ended(Widths(), ran_out=False, replayed=False, swept=False)
        trained(narrowing)
    assert narrowing.widths == Widths(lane_tokens=6, chunk_tokens=5)


def test_a_model_that_is_only_scored_tries_wider_passes_again() -> None:
    narrowing = Narrowing()
    narrowing.widths = Widths(lane_tokens=6, chunk_tokens=5)
    for _ in range(8):
        narrowing.ended(Widths(), ran_out=False, replayed=False, swept=False)
    assert narrowing.widths == Widths(lane_tokens=12, chunk_tokens=10)


def test_a_trial_is_for_one_transaction() -> None:
    narrowing = Narrowing(trial=Widths(chunk_tokens=7))
    assert narrowing.begin() == (Widths(chunk_tokens=7), Widths(chunk_tokens=7))
    assert narrowing.begin() == (Widths(), Widths())
