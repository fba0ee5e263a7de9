"""Shows the error of a rank that failed within a pass or a reduction on the ranks that wait for it in a collective."""

from __future__ import annotations

import logging
import threading

from longstraw.collectives.ranks import Ranks

BROKEN_NOTICE = "broken"
"""The notice of a rank that failed within a pass or a reduction."""

_SECONDS = 0.5
_LOG = logging.getLogger("longstraw")


class FailureWatcher:
    """A thread that looks at the board until it is stopped. The main thread may hang in a collective meanwhile."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="longstraw-watcher", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(_SECONDS):
            posted = self._ranks.posted(BROKEN_NOTICE)
            if posted is not None:
                _LOG.critical(
                    "rank %d failed within a pass or a reduction, and rank %d waits for it in a collective; start the "
                    "processes again. Its error: %s",
                    posted[0],
                    self._ranks.rank,
                    posted[1],
                )
                return

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()
