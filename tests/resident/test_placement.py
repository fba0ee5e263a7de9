"""Placement: order, overflow at page borders, exact last pages, and the message when nothing is left."""

from __future__ import annotations

import random

import pytest

from longstraw.errors import CapacityError
from longstraw.resident import Field, PlacedRun, Reservation, State, StateKind, TierBudget, place
from longstraw.resident.placement import round_up


def state(name: str = "kv", row_bytes: int = 64, layer: int = 0) -> State:
    return State(StateKind.TOKEN, layer, name, (Field("x", (row_bytes,)),), "uint8")


def tiers(*sizes: int) -> list[TierBudget]:
    return [TierBudget(name=f"t{i}", free_bytes=size, budget_bytes=size) for i, size in enumerate(sizes)]


def test_overflows_at_a_page_border() -> None:
    # 64 rows of 64 bytes are one unit of 4096: the first tier takes 64 rows, that is 6 whole pages of 10.
    (runs,) = place([Reservation(state(), 100)], tiers(4096, 1 << 20), 10)
    assert runs == (
        PlacedRun(tier=0, first_page=0, pages=6, rows=60),
        PlacedRun(tier=1, first_page=6, pages=4, rows=40),
    )


def test_last_page_takes_only_its_rows() -> None:
    (runs,) = place([Reservation(state(), 64)], tiers(4096), 60)
    assert runs == (PlacedRun(tier=0, first_page=0, pages=2, rows=64),)


def test_lower_priority_number_takes_the_faster_tier() -> None:
    kv, grad = place([Reservation(state(), 64, 1), Reservation(state("kv_grad"), 64, 0)], tiers(4096, 4096), 64)
    assert (kv[0].tier, grad[0].tier) == (1, 0)


def test_no_rows_take_no_pages() -> None:
    assert place([Reservation(state(), 0)], tiers(0), 10) == [()]


def test_shortage_names_every_figure() -> None:
    short = [TierBudget(name="device", free_bytes=0, budget_bytes=8192), *tiers(4096)]
    with pytest.raises(CapacityError) as error:
        place([Reservation(state(), 100), Reservation(state("kv_grad", 128), 50)], short, 10)
    message = str(error.value)
    for part in (
        "12800 bytes asked for, 4096 bytes free",
        "kv: 6400 bytes",
        "kv_grad: 6400 bytes",
        "tiers[0] device: budget 8192 bytes, used 8192 bytes, free 0 bytes",
        "tiers[1] t0: budget 4096 bytes, used 0 bytes, free 4096 bytes",
        "raise tiers[1].budget by 8704 bytes or more",
    ):
        assert part in message


@pytest.mark.parametrize("seed", range(20))
def test_random_placements_cover_all_rows_within_the_budgets(seed: int) -> None:
    rng = random.Random(seed)
    budgets = tiers(*(rng.randrange(0, 1 << 16) for _ in range(3)), 1 << 30)
    wishes = [
        Reservation(state(row_bytes=rng.choice((2, 64, 300))), rng.randrange(0, 500), rng.randrange(3))
        for _ in range(8)
    ]
    page_rows = rng.choice((1, 7, 64))
    used = [0] * len(budgets)
    for wish, runs in zip(wishes, place(wishes, budgets, page_rows), strict=True):
        page = rows = 0
        for run in runs:
            assert run.first_page == page
            assert run.pages == -(-run.rows // page_rows)
            page, rows = page + run.pages, rows + run.rows
            used[run.tier] += round_up(run.rows * wish.state.row_bytes)
        assert rows == wish.rows
        assert all(run.rows % page_rows == 0 for run in runs[:-1])
    assert all(u <= tier.free_bytes for u, tier in zip(used, budgets, strict=True))
