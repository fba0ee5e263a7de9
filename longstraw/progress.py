"""Progress of long phases on a terminal; silent anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence

_PATIENCE = 2.0
"""Seconds after which a phase is long enough to show."""


def terminal_progress(phase: str, chunks: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the chunks, and rewrite one line of standard error with the share that is done."""
    todo: Sequence[tuple[int, int]] = list(chunks)
    show = sys.stderr.isatty()
    start, shown = time.perf_counter(), False
    try:
        for done, chunk in enumerate(todo):
            seconds = time.perf_counter() - start
            if show and seconds > _PATIENCE:
                left = seconds / done * (len(todo) - done) if done else 0.0
                line = f"{phase}: chunk {done + 1} of {len(todo)}, {seconds:.0f} s, about {left:.0f} s to go"
                sys.stderr.write(f"\r\033[K{line}")
                sys.stderr.flush()
                shown = True
            yield chunk
    finally:
        if shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
