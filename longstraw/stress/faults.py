"""Faults that a stress run puts into a step: what the disk does wrong, memory that runs out, the user's own error."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from longstraw.errors import CapacityError, PageLostError

Call = Callable[[int, list[Any], int], int]
_SECTOR = 4096
_PUT_IN = "put in by the stress run"


class Fault(Enum):
    """What goes wrong. `ENDS` says what each may end a step with."""

    SHORT_READ = "short read"
    SHORT_WRITE = "short write"
    SLOW_DISK = "slow disk"
    OUT_OF_MEMORY_WIDE = "out of memory in wide lanes"
    READ_ERROR = "read error"
    WRITE_ERROR = "write error"
    DISK_FULL = "disk full"
    FLIPPED_BYTE = "flipped byte"
    TRUNCATED_FILE = "truncated file"
    OUT_OF_MEMORY = "out of memory"
    USER_ERROR = "the user's own error"
    USER_ERROR_IN_BACKWARD = "the user's own error in a loss's backward"
    USER_ERROR_AFTER_LANES = "the user's own error after the last lane"
    LATE_RANK = "a rank that comes late"


class UserError(Exception):
    """Stands for whatever a user's loss function may raise."""


ENDS: dict[Fault, tuple[type[Exception], ...]] = {
    Fault.SHORT_READ: (),
    Fault.SHORT_WRITE: (),
    Fault.SLOW_DISK: (),
    Fault.OUT_OF_MEMORY_WIDE: (),
    Fault.READ_ERROR: (PageLostError,),
    Fault.WRITE_ERROR: (PageLostError,),
    Fault.DISK_FULL: (PageLostError, CapacityError),
    Fault.FLIPPED_BYTE: (PageLostError,),
    Fault.TRUNCATED_FILE: (PageLostError,),
    Fault.OUT_OF_MEMORY: (CapacityError,),
    Fault.USER_ERROR: (UserError,),
    Fault.USER_ERROR_IN_BACKWARD: (UserError,),
    Fault.USER_ERROR_AFTER_LANES: (UserError,),
    Fault.LATE_RANK: (),
}
"""The errors that a step with this fault may end with. Those with none are to be survived."""

ALTERS = (Fault.FLIPPED_BYTE, Fault.TRUNCATED_FILE)
"""Faults that change bytes of a file: a step that ends well with one may have trained on them."""


@dataclass(kw_only=True)
class Armed:
    """One fault put into one step. `happened` counts how often; 0 if the step never came to it."""

    fault: Fault
    at: int
    rng: random.Random
    narrow: int
    happened: int = 0
    _calls: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def now(self) -> bool:
        """Count one call of what may go wrong: whether it does in this one. Threads call it."""
        with self._lock:
            self._calls += 1
            due = self._calls > self.at and self.rng.random() < 0.5
            self.happened += due
        return due

    def in_loss(self, logprobs_R: Tensor) -> Tensor:
        """Called by the user's loss on a response's log-probs: the same values."""
        if self.fault is Fault.USER_ERROR and self.now():
            raise UserError(_PUT_IN)
        if self.fault is Fault.LATE_RANK and self.now():
            time.sleep(self.rng.uniform(0, 0.1))
        if self.fault is Fault.USER_ERROR_IN_BACKWARD:
            logprobs_R = logprobs_R * 1
            logprobs_R.register_hook(self._in_backward)
        return logprobs_R

    def after_lanes(self) -> None:
        """Called by the user's loop once all lanes of a transaction are done."""
        if self.fault is Fault.USER_ERROR_AFTER_LANES and self.now():
            raise UserError(_PUT_IN)

    def _in_backward(self, gradient: Tensor) -> None:
        if self.now():
            raise UserError(_PUT_IN)


@contextmanager
def put_in(fault: Fault, model: Any, rng: random.Random, narrow: int) -> Iterator[Armed]:
    """Within it, `fault` happens from some call on, in about half of the calls.

    Memory runs out in passes of any width, or, for OUT_OF_MEMORY_WIDE, in those of more than `narrow` tokens.

    Disk calls are replaced for the whole process, at the lowest place: under every retry and check of the tiers.
    """
    # A loop ends once a transaction, and a step has few of them.
    at = 0 if fault is Fault.USER_ERROR_AFTER_LANES else rng.randint(0, 6)
    armed = Armed(fault=fault, at=at, rng=random.Random(rng.random()), narrow=narrow)
    with ExitStack() as stack:
        if fault in _READS:
            stack.enter_context(patch.object(os, "preadv", _disk(armed, os.preadv, _READS[fault])))
        if fault in _WRITES:
            stack.enter_context(patch.object(os, "pwritev", _disk(armed, os.pwritev, _WRITES[fault])))
        if fault in (Fault.OUT_OF_MEMORY, Fault.OUT_OF_MEMORY_WIDE):
            layer = model.model.layers[-1]
            hook = layer.mlp.register_forward_pre_hook(lambda module, inputs: _memory(armed, inputs[0].shape[1]))
            stack.callback(hook.remove)
        yield armed


def _memory(armed: Armed, tokens: int) -> None:
    # Narrow passes always fit: a wide one has somewhere to go, though not so far that a long prompt takes forever.
    if (armed.fault is Fault.OUT_OF_MEMORY or tokens > armed.narrow) and armed.now():
        raise torch.OutOfMemoryError(f"CUDA out of memory. ({_PUT_IN})")


def _disk(armed: Armed, call: Call, wrong: Callable[[Armed, Call, int, list[Any], int], int]) -> Call:
    def replaced(fd: int, data: list[Any], offset: int) -> int:
        return wrong(armed, call, fd, data, offset) if armed.now() else call(fd, data, offset)

    return replaced


def _short(armed: Armed, call: Call, fd: int, data: list[Any], offset: int) -> int:
    sectors = len(data[0]) // _SECTOR
    return call(fd, [data[0][: armed.rng.randint(1, max(sectors - 1, 1)) * _SECTOR]], offset)


def _slow(armed: Armed, call: Call, fd: int, data: list[Any], offset: int) -> int:
    time.sleep(armed.rng.uniform(0, 0.01))
    return call(fd, data, offset)


def _flipped(armed: Armed, call: Call, fd: int, data: list[Any], offset: int) -> int:
    done = call(fd, data, offset)
    at = armed.rng.randrange(max(done, 1))
    data[0][at] ^= 1 << armed.rng.randrange(8)
    return done


def _truncated(armed: Armed, call: Call, fd: int, data: list[Any], offset: int) -> int:
    os.ftruncate(fd, armed.rng.randint(0, offset // _SECTOR) * _SECTOR)
    return call(fd, data, offset)


def _error(code: int) -> Callable[[Armed, Call, int, list[Any], int], int]:
    def fail(armed: Armed, call: Call, fd: int, data: list[Any], offset: int) -> int:
        raise OSError(code, f"{os.strerror(code)} ({_PUT_IN})")

    return fail


_READS = {
    Fault.SHORT_READ: _short,
    Fault.SLOW_DISK: _slow,
    Fault.READ_ERROR: _error(errno.EIO),
    Fault.FLIPPED_BYTE: _flipped,
    Fault.TRUNCATED_FILE: _truncated,
}
_WRITES = {
    Fault.SHORT_WRITE: _short,
    Fault.SLOW_DISK: _slow,
    Fault.WRITE_ERROR: _error(errno.EIO),
    Fault.DISK_FULL: _error(errno.ENOSPC),
}
