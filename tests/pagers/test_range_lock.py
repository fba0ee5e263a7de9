"""The range lock: who waits for whom."""

from __future__ import annotations

import threading

import pytest

from longstraw.pagers.range_lock import RangeLock


@pytest.mark.parametrize(
    ("held", "wanted", "waits"),
    [
        ((0, 10, False), (5, 15, False), True),
        ((0, 10, True), (5, 15, False), True),
        ((0, 10, False), (9, 10, True), True),
        ((0, 10, True), (5, 15, True), False),
        ((0, 10, False), (10, 15, False), False),
    ],
)
def test_who_waits(held: tuple[int, int, bool], wanted: tuple[int, int, bool], waits: bool) -> None:
    lock, entered = RangeLock(), threading.Event()

    def enter() -> None:
        with lock.hold(wanted[0], wanted[1], shared=wanted[2]):
            entered.set()

    with lock.hold(held[0], held[1], shared=held[2]):
        thread = threading.Thread(target=enter)
        thread.start()
        assert entered.wait(0.2 if waits else 30) is not waits
    thread.join(30)
    assert entered.is_set()
