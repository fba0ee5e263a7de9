"""LONGSTRAW_DEBUG=1: NaN in memory that holds nothing, a random delay in every copy: a missing wait shows."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from typing import Literal

import torch

from longstraw.errors import ConfigError, PageLostError
from longstraw.pagers.protocol import Extent, Pager
from longstraw.pagers.transfer import Transfer, record

VARIABLE = "LONGSTRAW_DEBUG"
POISON = 0xFF
"""A byte that makes NaN of every floating type (and -1 of every signed integer) when all bytes are alike."""
_LONGEST = 2e-3
_CYCLES_PER_SECOND = 1.5e9  # of torch.cuda._sleep: an order of magnitude is enough
_PIECE = 16 << 20


def enabled() -> bool:
    """Whether debug mode is on. Raises ConfigError for a value that is neither 0 nor 1."""
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1", ""):
        raise ConfigError(f"{VARIABLE}={value}: use 1 for debug mode, 0 or nothing for none")
    return value == "1"


def poison(pager: Pager, extent: Extent) -> None:
    """Fill an extent that holds nothing, and that no copy is on its way to, with NaN.

    Raises PageLostError if its disk does not take that.
    """
    view = pager.view(extent, 0, extent.nbytes)
    if view is not None:
        view.fill_(POISON)
        return
    source = torch.full((min(extent.nbytes, _PIECE),), POISON, dtype=torch.uint8, device=pager.device)
    filled = record(pager.device)  # the copies go on another stream
    try:
        for at in range(0, extent.nbytes, _PIECE):
            pager.write(extent, at, source[: min(_PIECE, extent.nbytes - at)], (filled,)).result()
    except OSError as error:
        raise PageLostError(
            f"tier {pager.name}: unused pages could not be filled with NaN ({VARIABLE}=1): {error}"
        ) from error


class Delay:
    """A transfer that takes a while to have ended: what comes after it comes later, on a stream or a thread.

    As each worker thread waits by itself, the parts of one copy end in any order.
    """

    nbytes = 0

    def __init__(self, device: torch.device, rng: random.Random) -> None:
        self._device = device
        self._rng = rng

    def wait(self) -> None:
        self.order(torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None)

    def order(self, stream: torch.cuda.Stream | None) -> None:
        seconds = self._rng.uniform(0, _LONGEST)
        if stream is None or threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        if stream is not None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))

    def done(self) -> bool:
        return True

    def result(self) -> int:
        return 0


class DelayedPager:
    """A pager each of whose copies begins after a random delay of up to 2 ms.

    The delays are drawn anew in each process: what they find must not depend on them.
    """

    def __init__(self, pager: Pager, seed: int | None = None) -> None:
        self.inner = pager
        self.name = pager.name
        self.device = pager.device
        self.budget = pager.budget
        self._rng = random.Random(seed)

    @property
    def kind(self) -> Literal["device", "host", "nvme"]:
        return self.inner.kind

    @property
    def used(self) -> int:
        return self.inner.used

    @property
    def peak(self) -> int:
        return self.inner.peak

    def grow_to(self, nbytes: int) -> None:
        self.inner.grow_to(nbytes)

    def largest_free(self) -> int:
        return self.inner.largest_free()

    def allocate(self, nbytes: int) -> Extent:
        return self.inner.allocate(nbytes)

    def free(self, extent: Extent) -> None:
        self.inner.free(extent)

    def view(self, extent: Extent, offset: int, nbytes: int) -> torch.Tensor | None:
        return self.inner.view(extent, offset, nbytes)

    def read(self, extent: Extent, offset: int, target: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        return self.inner.read(extent, offset, target, (*after, Delay(self.device, self._rng)))

    def write(self, extent: Extent, offset: int, source: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        return self.inner.write(extent, offset, source, (*after, Delay(self.device, self._rng)))

    def describe(self) -> str:
        return f"{self.inner.describe()}; {VARIABLE}: random delays, NaN where nothing is"

    def close(self) -> None:
        self.inner.close()
