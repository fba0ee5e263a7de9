"""A lock on byte ranges: writers of overlapping ranges come one by one, readers beside each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class RangeLock:
    """Held for few ranges at once (a worker thread each), so a list is searched."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: list[tuple[int, int, bool]] = []

    @contextmanager
    def hold(self, start: int, stop: int, *, shared: bool) -> Iterator[None]:
        """Hold [start, stop): with other readers if `shared`, else alone. A thread holds one range at a
        time."""
        mine = (start, stop, shared)
        with self._changed:
            self._changed.wait_for(lambda: not any(_clash(mine, other) for other in self._held))
            self._held.append(mine)
        try:
            yield
        finally:
            with self._changed:
                self._held.remove(mine)
                self._changed.notify_all()


def _clash(a: tuple[int, int, bool], b: tuple[int, int, bool]) -> bool:
    return a[0] < b[1] and b[0] < a[1] and not (a[2] and b[2])
