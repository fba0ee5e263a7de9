"""The page's state machine: every pair of states, and the order in which holders decide."""

from __future__ import annotations

import itertools

import pytest

from longstraw.errors import PageStateError
from longstraw.resident import MOVES, Page, PageState

S = PageState
LEGAL = {
    *((S.FREE, to) for to in (S.FILLING,)),
    *((S.FILLING, to) for to in (S.RESIDENT, S.MOVING, S.LEASED, S.FREE, S.LOST)),
    *((S.RESIDENT, to) for to in (S.FILLING, S.MOVING, S.LEASED, S.FREE)),
    *((S.MOVING, to) for to in (S.RESIDENT, S.LEASED, S.FILLING, S.LOST)),
    *((S.LEASED, to) for to in (S.RESIDENT, S.MOVING, S.FILLING, S.LOST)),
    *((S.LOST, to) for to in (S.FREE,)),
}


@pytest.mark.parametrize(("start", "to"), list(itertools.product(PageState, PageState)))
def test_every_move(start: PageState, to: PageState) -> None:
    page = Page("kv of 'me'", 7, 16)
    page.state = start
    if (start, to) in LEGAL:
        page.move(to)
        assert page.state is to
    else:
        with pytest.raises(PageStateError, match=rf"page 7 of kv of 'me'.*{start.name}.*{to.name}"):
            page.move(to)
        assert page.state is start


def test_the_table_is_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOVES, S.LOST, frozenset(S))
    page = Page("kv", 0, 16)
    page.state = S.LOST
    page.move(S.RESIDENT)
    assert page.state is S.RESIDENT


def test_first_of_filling_leased_moving_decides() -> None:
    page = Page("kv", 0, 16)
    page.filling = 1
    page.settle()
    page.filled = 4
    page.leased = page.moving = 1
    page.settle()
    assert page.state is S.FILLING
    page.filling = 0
    page.settle()
    assert page.state is S.LEASED
    page.leased = 0
    page.settle()
    assert page.state is S.MOVING
    page.moving = 0
    page.settle()
    assert page.state is S.RESIDENT


def test_lost_stays_lost_until_voided() -> None:
    page = Page("kv", 0, 16)
    page.filling = 1
    page.settle()
    page.lose()
    page.filling = 0
    page.settle()
    assert page.state is S.LOST
    page.void()
    assert (page.state, page.filled, page.generation) == (S.FREE, 0, 1)


def test_a_held_page_is_not_voided() -> None:
    page = Page("kv", 0, 16)
    page.filling = 1
    page.settle()
    with pytest.raises(PageStateError, match="must end before"):
        page.void()
